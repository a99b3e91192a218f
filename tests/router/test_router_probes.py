"""What the router finds out by asking: who an instance is, and that it is another one now."""

from __future__ import annotations

import asyncio
import errno
import os

import aiohttp
import pytest
from router_harness import cluster, decode_engine, prefill_engine

from kvferry.router.fleet import probes
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.upstream.failures import DEADLINE, EXHAUSTED, OUT_OF, REFUSED, reason_of
from kvferry.router.upstream.http_client import HttpClient


def telling(engine, epoch, model):
    engine.ready_status = 200
    engine.info = {"engine": "kvferry", "wire_version": "1", "epoch": epoch, "models": [model], "cache": model}
    return engine


async def test_an_instance_that_comes_back_as_another_one_between_two_probes_is_asked_again(monkeypatch):
    monkeypatch.setattr(probes, "PROBES_PER_INFO", 1 << 40)
    p, d = telling(prefill_engine(), "p-1", "tiny"), telling(decode_engine(), "d-1", "tiny")
    async with cluster([p], [d], probe_interval_s=0.05) as c:
        assert (await c.complete()).headers["x-kvferry-path"] == "disaggregated"
        telling(p, "p-2", "another")
        while not (await c.members())["incompatible_pairs"]:
            continue
        assert (await c.complete()).headers["x-kvferry-path"] == "decode-only"


async def test_a_defect_in_a_turn_of_probes_is_not_the_end_of_them(monkeypatch, caplog):
    def fail(pool):
        raise ZeroDivisionError("the defect")

    p = prefill_engine()
    async with cluster([p], [decode_engine()], probe_interval_s=0.05) as c:
        with monkeypatch.context() as patch:
            patch.setattr(InstancePool, "expire", fail)
            while "the defect" not in caplog.text:
                await asyncio.sleep(0)
        p.health_status = 500
        await c.until_health_changes()
    assert "ended a turn of probes" in caplog.text


async def test_an_engine_that_says_at_length_that_it_has_no_such_path_is_healthy():
    engines = prefill_engine(), decode_engine()
    for engine in engines:
        engine.models_status, engine.models = 404, [{"id": "x" * (2 * probes.MAX_INFO_BYTES)}]
    p, d = engines
    async with cluster([p], [d], probe_interval_s=0.05) as c:
        assert (await c.complete()).headers["x-kvferry-path"] == "disaggregated"


@pytest.mark.parametrize("number", [*OUT_OF, errno.ECONNREFUSED])
def test_what_this_process_lacks_is_told_from_what_an_instance_refuses(number):
    error = aiohttp.ClientOSError(number, os.strerror(number))
    assert reason_of(error, DEADLINE) == (EXHAUSTED if number in OUT_OF else "reset")
    assert reason_of(ConnectionRefusedError(errno.ECONNREFUSED, "refused"), DEADLINE) == REFUSED


async def test_a_router_that_can_open_no_more_connections_takes_no_instance_for_down(monkeypatch, caplog):
    async def lack(*_, **__):
        raise aiohttp.ClientOSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with cluster([prefill_engine()], [decode_engine()], probe_interval_s=0.05) as c:
        with monkeypatch.context() as patch:
            patch.setattr(HttpClient, "send", lack)
            while caplog.text.count("no instance can be probed") < 4:
                await asyncio.sleep(0)
            response = await c.complete()
            assert response.status == 502
            assert "the router can open no more connections" in response.error["message"]
        assert (await c.complete()).headers["x-kvferry-path"] == "disaggregated"
