"""What the router finds out by asking: who an instance is, and that it is another one now."""

from __future__ import annotations

import asyncio
import errno
import os

import aiohttp
import pytest
from aiohttp import web
from router_harness import DONE, ONE, Engine, cluster, decode_engine, prefill_engine, streaming
from sglang_stubs import sglang_engine

from kvferry.router.fleet import probes
from kvferry.router.fleet.instance import Origin
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.policy.records import Instance, Role
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


@pytest.mark.parametrize("trouble", ["models", "server_info", "length"])
async def test_what_is_known_of_an_engine_outlives_a_question_that_it_does_not_answer(monkeypatch, trouble):
    """A proxy that restarts, a front end that is busy: it is asked again at the next probe, and serves meanwhile."""
    monkeypatch.setattr(probes, "PROBES_PER_INFO", 1)
    d = sglang_engine("null", streaming(ONE, DONE)) if trouble == "server_info" else decode_engine()
    d.models = [{"id": "tiny", "owned_by": "sglang" if trouble == "server_info" else "vllm"}]
    d.ready_status = 404
    async with cluster([], [d], probe_interval_s=0.05) as c:
        before = c.app.state.pool.info_of(Instance(d.url, Role.DECODE))
        assert before.models == ("tiny",)
        if trouble == "models":
            d.models_status = 503
        elif trouble == "server_info":
            d.server_info_status = 503
        else:
            d.models = [{"id": "x" * probes.MAX_INFO_BYTES, "owned_by": "vllm"}]
        for _ in range(4):
            d.probed.clear()
            await d.probed.wait()
        assert c.app.state.pool.info_of(Instance(d.url, Role.DECODE)) == before
        assert (await c.complete()).status == 200
        # Other words are heard as soon as it speaks.
        d.models_status, d.models = 200, [{"id": "other", "owned_by": d.models[0]["owned_by"]}]
        d.server_info_status = 200
        while c.app.state.pool.info_of(Instance(d.url, Role.DECODE)).models != ("other",):
            await asyncio.sleep(0)


async def test_an_engine_that_could_not_say_who_it_is_when_it_came_is_asked_at_its_next_probe():
    d = decode_engine()
    d.models, d.models_status = [{"id": "tiny", "owned_by": "vllm"}], 503
    async with cluster([], [d]) as c:
        pool, instance = c.app.state.pool, Instance(d.url, Role.DECODE)
        prober, state = probes.Prober(c.app.state.services.http, pool, c.app.state.config), pool.probed_state(instance)
        assert (state.healthy, state.info.models) == (True, ())
        d.models_status = 200
        await prober._probe(state)
        assert state.info.models == ("tiny",)


async def test_a_server_of_sglang_without_that_path_is_heard_nevertheless():
    d = sglang_engine("null", streaming(ONE, DONE))
    d.server_info = {}
    async with cluster([], [d]) as c:
        pool, instance = c.app.state.pool, Instance(d.url, Role.DECODE)
        prober, state = probes.Prober(c.app.state.services.http, pool, c.app.state.config), pool.probed_state(instance)
        d.models = [{"id": "other", "owned_by": "sglang"}]
        for _ in range(probes.PROBES_PER_INFO):
            await prober._probe(state)
        assert state.info.models == ("other",)


async def test_a_probe_tells_nothing_of_who_came_after_its_instance(monkeypatch):
    """It has left, and come again, while its probe was under way."""
    asked, may_answer = asyncio.Event(), asyncio.Event()
    may_answer.set()

    async def list_models(engine, request):
        asked.set()
        await may_answer.wait()
        return web.json_response({"data": [{"id": "m1", "owned_by": "vllm"}]})

    monkeypatch.setattr(Engine, "list_models", list_models)
    d = decode_engine()
    async with cluster([], [d]) as c:
        pool, instance = c.app.state.pool, Instance(d.url, Role.DECODE)
        prober = probes.Prober(c.app.state.services.http, pool, c.app.state.config)
        state = pool.probed_state(instance)
        state.healthy = False
        asked.clear()
        may_answer.clear()
        probe = asyncio.create_task(prober._probe(state))
        await asked.wait()
        assert pool.remove(instance, state.origin)
        assert pool.add(instance, Origin.FILE)
        may_answer.set()
        await probe
        assert not pool.probed_state(instance).is_proven
        assert pool.info_of(instance).models == ()


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
