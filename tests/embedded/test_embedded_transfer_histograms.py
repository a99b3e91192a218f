"""What a cache that came cost, on an engine's `/metrics`."""

from __future__ import annotations

import pytest
from embedded_server import Served

from kvferry import FetchReport
from kvferry.connectors.peer_labels import MAX_PEERS, OTHER_PEERS
from kvferry.embedded.engine.async_engine import Engine
from kvferry.embedded.serving.metrics import Metrics
from kvferry.embedded.transfer.agent_transfer import ReceivedCache
from kvferry.http.histogram_buckets import BYTES_BUCKETS, PHASE_BUCKETS_S

COMPLETIONS = "/v1/completions"
REMOTE_DECODE = {"do_remote_decode": True}


def received(peer: str) -> ReceivedCache:
    return ReceivedCache(peer, FetchReport(8, 4096, 4, "shm", "", "direct", {"claim": 0.001, "wire": 0.002}))


@pytest.mark.parametrize("stream", [False, True])
def test_every_transfer_is_observed_streamed_or_not(prefiller: Served, decoder: Served, stream: bool) -> None:
    prompt = list(range(20, 60))
    answered = prefiller.ask(COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE})[1]
    labels = 'peer="e",transport="loopback"'
    names = [
        f'kvferry_engine_phase_seconds_count{{peer="e",phase="{phase}",transport="loopback"}}'
        for phase in ("queue", "wire")
    ]
    names += [f"kvferry_engine_transfer_{what}_count{{{labels}}}" for what in ("bytes", "descriptors")]
    before = [decoder.metric(name) for name in names]
    total = decoder.metric(f"kvferry_engine_transfer_bytes_sum{{{labels}}}")
    decode = {"prompt": prompt, "max_tokens": 2, "kv_transfer_params": answered["kv_transfer_params"], "stream": stream}
    status, _ = decoder.raw(COMPLETIONS, decode)
    assert status == 200
    assert [decoder.metric(name) for name in names] == [count + 1 for count in before]
    assert decoder.metric(f"kvferry_engine_transfer_bytes_sum{{{labels}}}") > total


def test_peers_that_come_and_go_do_not_grow_the_page_for_ever(source: Engine) -> None:
    metrics = Metrics(source, lambda: True)
    for number in range(MAX_PEERS + 5):
        metrics.observe_transfer(received(f"p{number}"), 0.0)
    counts = {
        name: metrics.registry.get_sample_value(
            "kvferry_engine_transfer_bytes_count", {"peer": name, "transport": "shm"}
        )
        for name in ("p0", OTHER_PEERS, f"p{MAX_PEERS}")
    }
    assert counts == {"p0": 1, OTHER_PEERS: 5, f"p{MAX_PEERS}": None}


def test_buckets_reach_from_a_claim_to_the_longest_prompts() -> None:
    assert PHASE_BUCKETS_S[0] == pytest.approx(1e-4)
    assert PHASE_BUCKETS_S[-1] == 120
    assert (BYTES_BUCKETS[0], BYTES_BUCKETS[-1]) == (4096, 64 << 30)
    for buckets in (PHASE_BUCKETS_S, BYTES_BUCKETS):
        assert list(buckets) == sorted(set(buckets))
