"""What SGLang's `/server_info` tells of our transfer backend, in the words that our router reads."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from kvferry import WIRE_VERSION
from kvferry.connectors.sglang.plugin import introduce
from kvferry.connectors.sglang.settings import VARIABLE
from kvferry.router.fleet.sglang_info import sglang_info
from kvferry.router.policy.records import Role

READY = {"status": "ready"}


@pytest.mark.parametrize("queue", ["disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"])
def test_a_router_reads_where_the_backend_listens_and_what_the_schedulers_pool_keeps(monkeypatch, queue):
    monkeypatch.setenv(VARIABLE, json.dumps({"host": "10.0.0.5"}))
    scheduler = SimpleNamespace(**{queue: SimpleNamespace(kv_manager=SimpleNamespace(cache="abc"))})
    told = introduce(READY, scheduler)
    info = sglang_info(json.dumps(told).encode(), Role.PREFILL, ())
    assert (info.bootstrap_host, info.wire_version, info.cache) == ("10.0.0.5", str(WIRE_VERSION), "abc")
    assert told == {**READY, "kvferry": told["kvferry"]}


@pytest.mark.parametrize("queue", [None, SimpleNamespace(), SimpleNamespace(kv_manager=SimpleNamespace())])
def test_a_scheduler_of_another_backend_says_what_it_always_says(queue):
    assert introduce(READY, SimpleNamespace(disagg_prefill_bootstrap_queue=queue)) == READY
