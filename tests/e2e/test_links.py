"""Cables between two hosts that fail: a right answer soon, nothing left behind, and a cache again once they work.

Engines and client are each on a host of their own. What a client waits for is printed (`pytest -s`), not asserted:
it is bounded by three heartbeats (3 s), which is when a peer that does not answer is lost, or by the transport, where
it sees that nothing arrives (tcp: 5 s).
"""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chaos_support import Asking, Process
from conftest import post, prefilled
from hosts import WHY_NOT, Network

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.timeout(600)]

LATE = Path(__file__).parents[1] / "late_serve.py"
# At this rate a prompt of LONG tokens, 8 MB, takes four seconds.
SLOW, LONG = "16mbit", 1000
LEASE_S = 4.0
# Both take minutes, one is what continuous integration has time for; `make chaos` has both.
TRANSPORTS = ("tcp", pytest.param("nixl", marks=pytest.mark.chaos))
BOTH = "prefill", "decode"
# What gets lost: in both directions, or in one.
WAYS = [BOTH, *(pytest.param((way,), marks=pytest.mark.chaos) for way in BOTH)]
LOST = ("peer_lost", "unreachable", "transport")
seeds = itertools.count(1)


class Pair:
    """A prefill and a decode engine, each on its host, and a client on a third one, whose cables always work."""

    def __init__(self, network: Network, engines: dict[str, Process], transport: str, folder: Path, mover: str) -> None:
        self.network, self.engines, self.transport, self.folder = network, engines, transport, folder
        self.client, self.mover = network.hosts["client"], engines[mover]

    @property
    def prefill(self) -> Process:
        return self.engines["prefill"]

    @property
    def decode(self) -> Process:
        return self.engines["decode"]

    def handed_over(self, num_tokens: int = 100) -> tuple[list[int], dict]:
        """A prompt that is computed, and what the decode request has to say of its cache."""
        dice = random.Random(next(seeds))
        prompt = [dice.randrange(10, 1000) for _ in range(num_tokens)]
        return prompt, self.client.do(lambda: prefilled(self.prefill.url, prompt))

    def ask(self, prompt: list[int], params: dict) -> Asking:
        body = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True, "kv_transfer_params": params}
        return Asking(self.decode.url, body, self.client)

    def check(self, prompt: list[int], asked: Asking, recomputed: tuple[str, ...]) -> None:
        """The right tokens, and what has become of the cache; prints how long the client has waited."""
        found = asked.answer()
        told = found["kvferry"]
        print(f"waited {asked.took_s:.2f} s: {told['recomputed'] or 'received'}")
        assert told["recomputed"] in recomputed, self.decode.log.read_text()[-2000:]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
        url = f"{self.decode.url}/v1/completions"
        alone = self.client.do(lambda: post(url, body | {"cache_salt": "alone"}))
        assert found["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]

    def works(self) -> None:
        """At once, and nothing of what was before is left."""
        for engine in (self.prefill, self.decode):
            engine.until_free()
        prompt, params = self.handed_over()
        self.check(prompt, self.ask(prompt, params), ("",))

    @contextmanager
    def lost(self, *ways: str) -> Iterator[None]:
        """Between the engines. `prefill` is what prefill sends, `decode` what decode sends."""
        other = {"prefill": "decode", "decode": "prefill"}
        for way in ways:
            self.network.lose(way, other[way])
        try:
            yield
        finally:
            for way in ways:
                self.network.find(way, other[way])

    @contextmanager
    def reading(self) -> Iterator[tuple[list[int], Asking]]:
        """A long transfer is under way, and its cable slow."""
        self.network.slow_down("decode", SLOW)
        try:
            prompt, params = self.handed_over(LONG)
            asked = self.ask(prompt, params)
            self.mover.until_reading()
            yield prompt, asked
        finally:
            self.network.slow_down("decode", "")


@contextmanager
def started(
    tmp_path: Path, model: Path, transport: str, prefix: str = "10.77.0.", direction: str = "pull", **scripts: Path
) -> Iterator[Pair]:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    network = Network("client", "prefill", "decode", prefix=prefix)
    engines: dict[str, Process] = {}
    try:
        for name in ("prefill", "decode"):
            engines[name] = engine(network, name, tmp_path, model, transport, direction, **scripts)
        for process in engines.values():
            process.wait()
        yield Pair(network, engines, transport, tmp_path, "decode" if direction == "pull" else "prefill")
    finally:
        for process in engines.values():
            process.close()
        network.close()


def engine(
    network: Network, name: str, folder: Path, model: Path, transport: str, direction: str = "pull", **scripts: Path
) -> Process:
    """Begins to start."""
    host = network.hosts[name]
    what = ("--engine-id", name, "--model", str(model), "--served-name", "tiny", "--num-blocks", "600")
    where = ("--host", host.address, "--transfer-host", host.address, "--token-file", str(folder / "token"))
    how = ("--transport", transport, "--strategy", "direct", "--transfer-direction", direction)
    more = {"script": scripts[name]} if name in scripts else {}
    words = ("serve", *what, *where, *how, "--lease-timeout", str(LEASE_S))
    return Process(folder / f"{name}.log", *words, host=host, **more).start()


@pytest.fixture(scope="module", params=TRANSPORTS)
def hosts(request, tmp_path_factory, tiny_model) -> Iterator[Pair]:
    with started(tmp_path_factory.mktemp(request.param), tiny_model, request.param) as pair:
        yield pair


@pytest.fixture
def pair(hosts) -> Iterator[Pair]:
    hosts.works()
    yield hosts
    hosts.works()


def test_a_cable_that_is_out_for_a_second_costs_a_second(pair):
    with pair.reading() as (prompt, asked):
        pair.network.unplug("decode")
        time.sleep(1.0)  # That is what is tested.
        pair.network.plug_in("decode")
        pair.check(prompt, asked, ("",))


@pytest.mark.parametrize("ways", [("prefill", "decode"), ("prefill",), ("decode",)], ids="+".join)
def test_what_gets_lost_while_the_cache_is_read(pair, ways):
    with pair.reading() as (prompt, asked), pair.lost(*ways):
        pair.check(prompt, asked, LOST)


@pytest.mark.parametrize("ways", WAYS, ids="+".join)
def test_what_gets_lost_before_the_cache_is_claimed(pair, ways):
    prompt, params = pair.handed_over(LONG)
    with pair.lost(*ways):
        pair.check(prompt, pair.ask(prompt, params), LOST)


@pytest.mark.parametrize("ways", WAYS, ids="+".join)
def test_what_gets_lost_after_the_cache_has_landed(pair, ways):
    prompt, params = pair.handed_over(LONG)
    asked = pair.ask(prompt, params)
    asked.began.wait(60.0)
    with pair.lost(*ways):
        pair.check(prompt, asked, ("",))
        # Whether or not it was told that the cache has landed: a lease ends by itself.
        pair.prefill.until_free()


@pytest.mark.chaos
def test_a_cable_that_is_out_for_ten_seconds_while_the_cache_is_read(pair):
    """Longer than anybody waits for it, and back before the next request."""
    with pair.reading() as (prompt, asked):
        with pair.lost(*BOTH):
            time.sleep(10.0)  # That is what is tested.
        pair.check(prompt, asked, LOST)


@pytest.mark.parametrize("is_used", [True, False], ids=["asked", "idle"])
def test_an_outage_that_is_longer_than_ucx_has_patience(tmp_path, tiny_model, monkeypatch, is_used):
    """It gives up its connection for ever, after half a minute as it is set. Another one has to be opened, whether the
    engines have noticed the outage or nobody has asked for anything."""
    for name, value in {"IDLE": "1s", "INTVL": "1s", "CNT": "2"}.items():
        monkeypatch.setenv(f"UCX_TCP_KEEP{name}", value)
    with started(tmp_path, tiny_model, "nixl") as pair:
        pair.works()
        prompt, params = pair.handed_over()
        with pair.lost(*BOTH):
            asked = [pair.ask(prompt, params)] * is_used
            time.sleep(10.0)  # That is what is tested.
        for each in asked:
            pair.check(prompt, each, LOST)
        for engine in pair.engines.values():
            engine.until_free()
        # Who has slept through it notices now.
        prompt, params = pair.handed_over()
        pair.check(prompt, pair.ask(prompt, params), ("", *LOST) if not is_used else ("",))
        pair.works()


@pytest.mark.chaos
@pytest.mark.parametrize(("seconds", "found"), [(1.0, ("",)), (10.0, LOST)], ids=["1", "10"])
def test_a_cable_that_is_out_for_some_seconds_before_the_cache_is_claimed(pair, seconds, found):
    prompt, params = pair.handed_over(LONG)
    with pair.lost(*BOTH):
        asked = pair.ask(prompt, params)
        time.sleep(seconds)
    pair.check(prompt, asked, found)


@pytest.mark.chaos
@pytest.mark.parametrize("seconds", [1.0, 10.0])
def test_a_cable_that_is_out_for_some_seconds_after_the_cache_has_landed(pair, seconds):
    prompt, params = pair.handed_over(LONG)
    asked = pair.ask(prompt, params)
    asked.began.wait(60.0)
    with pair.lost(*BOTH):
        time.sleep(seconds)
    pair.check(prompt, asked, ("",))


def test_engines_that_never_met(pair):
    """And meet later, though the cable was out when they should have met."""
    pair.decode.close()
    pair.decode.restart()
    prompt, params = pair.handed_over()
    with pair.lost("prefill", "decode"):
        pair.check(prompt, pair.ask(prompt, params), LOST)


def test_a_host_that_is_stopped(pair):
    with pair.reading() as (prompt, asked), pair.prefill.stopped():
        pair.check(prompt, asked, LOST)


def test_blocks_that_a_lost_source_was_writing_to_are_free_at_once(tmp_path, tiny_model):
    """Not only when it is back: over tcp it is refused then."""
    with started(tmp_path, tiny_model, "tcp", direction="push") as pair:
        pair.works()
        for away in (lambda: pair.lost(*BOTH), pair.prefill.stopped):
            with pair.reading() as (prompt, asked), away():
                pair.check(prompt, asked, LOST)
                pair.decode.until_free()
            pair.works()


@pytest.mark.chaos
def test_the_reading_host_is_stopped_for_longer_than_a_lease(pair):
    """Nobody waits for it but its client; when it goes on it knows that the cache is not good any more."""
    with pair.reading() as (prompt, asked):
        with pair.decode.stopped():
            pair.prefill.until_free()
        pair.check(prompt, asked, (*LOST, "expired"))


@pytest.mark.parametrize("num_bytes", [600, 1300])
def test_long_packets_that_nobody_sees_again(pair, num_bytes):
    """A tunnel on the way. A claim is longer than 600 bytes; what is read is longer than 1,300, and so are heartbeats
    while it does not come."""
    prompt, params = pair.handed_over(LONG)
    pair.network.drop_longer_than(num_bytes, "decode")
    try:
        pair.check(prompt, pair.ask(prompt, params), LOST)
    finally:
        pair.network.drop_longer_than(1500, "decode")


@pytest.mark.chaos
def test_long_packets_of_engines_that_never_met(pair):
    """Nothing is read yet: the limit of a handshake counts."""
    pair.decode.close()
    pair.decode.restart()
    prompt, params = pair.handed_over(LONG)
    pair.network.drop_longer_than(1300, "decode")
    try:
        pair.check(prompt, pair.ask(prompt, params), ("deadline",))
    finally:
        pair.network.drop_longer_than(1500, "decode")


def test_long_packets_that_ucx_does_not_see_again(tmp_path, tiny_model):
    """UCX says nothing of it, and a read would last a minute."""
    with started(tmp_path, tiny_model, "nixl") as pair:
        pair.works()
        prompt, params = pair.handed_over(LONG)
        pair.network.drop_longer_than(1300, "decode")
        try:
            pair.check(prompt, pair.ask(prompt, params), LOST)
        finally:
            pair.network.drop_longer_than(1500, "decode")


def test_an_engine_that_comes_back_with_another_address(hosts, tiny_model):
    hosts.prefill.close()
    hosts.network.move("prefill", "10.77.0.77")
    hosts.engines["prefill"] = engine(hosts.network, "prefill", hosts.folder, tiny_model, hosts.transport).wait()
    hosts.works()


def test_the_clock_of_one_host_may_be_an_hour_late(tmp_path, tiny_model):
    with started(tmp_path, tiny_model, "tcp", prefill=LATE) as pair:
        pair.works()
        pair.works()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_network_without_ipv4(tmp_path, tiny_model, transport):
    with started(tmp_path, tiny_model, transport, prefix="fd77::") as pair:
        pair.works()
        with pair.reading() as (prompt, asked):
            pair.check(prompt, asked, ("",))
