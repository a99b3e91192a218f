"""What SGLang's `/server_info` tells of our transfer backend, in the words that our router reads."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from kvferry import WIRE_VERSION
from kvferry.connectors.sglang.plugin import introduce, name_cache
from kvferry.connectors.sglang.settings import VARIABLE
from kvferry.router.fleet.sglang_info import sglang_info
from kvferry.router.policy.records import Role


@pytest.fixture
def options(monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"host": "10.0.0.5"}))
    return {"disaggregation_transfer_backend": "kvferry", "disaggregation_mode": "prefill"}


def test_a_router_reads_where_the_backend_listens_and_its_version(options):
    told = introduce(options, "options of SGLang", {"more": 1})
    info = sglang_info(json.dumps(told).encode(), Role.PREFILL, ())
    assert (info.bootstrap_host, info.wire_version) == ("10.0.0.5", str(WIRE_VERSION))
    assert told == {**options, "kvferry": told["kvferry"]}


@pytest.mark.parametrize("queue", ["disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"])
def test_a_router_reads_the_name_of_what_the_schedulers_pool_keeps(options, queue):
    scheduler = SimpleNamespace(**{queue: SimpleNamespace(kv_manager=SimpleNamespace(cache="abc"))})
    ready = name_cache({"status": "ready"}, scheduler)
    told = introduce(options | ready)
    assert sglang_info(json.dumps(told).encode(), Role.PREFILL, ()).cache == "abc"
    assert told == {**options, "status": "ready", "kvferry": told["kvferry"]}


@pytest.mark.parametrize("queue", [None, SimpleNamespace(), SimpleNamespace(kv_manager=SimpleNamespace())])
def test_a_scheduler_of_another_backend_says_what_it_always_says(queue):
    assert name_cache({"status": "ready"}, SimpleNamespace(disagg_prefill_bootstrap_queue=queue)) == {"status": "ready"}


def test_of_another_backend_nothing_is_told(options):
    others = {**options, "disaggregation_transfer_backend": "nixl"}
    assert introduce(others) == others
