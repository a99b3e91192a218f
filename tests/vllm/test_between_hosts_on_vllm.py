"""vLLM to vLLM, vLLM to transformers and the reverse between hosts: the right tokens, also when a cable is cut.

Each engine and the client are on a host of their own, in namespaces that share nothing but a network.
"""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from answers import EXTERNAL_HITS, FIRST_PLAIN_TOKEN
from crossing import NUM_BLOCKS, READY_S, VLLM_ARGUMENTS, Engine, Prompt, across, alone, body, metric, post
from hosts import WHY_NOT, Network
from proxy import REMOTE_DECODE
from servers import ENVIRONMENT
from tiny_models import MODELS, VOCAB_SIZE, model_folder

from kvferry.cli.child_processes import Child

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

MODEL = "llama"
SIZES = (2, 64, 65, 129, 700)
# The same blocks nowhere.
BLOCKS = {"first": ("vllm", 64), "second": ("vllm", 128), "third": ("transformers", 16)}
WAYS = (("first", "second"), ("second", "first"), ("first", "third"), ("third", "first"))
FAILED = "vllm:nixl_num_failed_transfers_total"
numbers = itertools.count()


@dataclass(frozen=True)
class Fleet:
    """Engines by the names of their hosts. `do` asks them as the client does, from a host of its own."""

    network: Network
    engines: dict[str, Engine]

    def do(self, work) -> Any:
        return self.network.hosts["client"].do(work)

    def moves(self, source: str, target: str, num_tokens: int) -> None:
        """A cache gets from one to the other, all of it, and the answer is the one that the target gives by itself."""
        prompt = a_prompt(num_tokens)
        one, other = self.engines[source], self.engines[target]
        before = self.counted(other)
        answer = self.do(lambda: across(one, other, prompt))
        assert answer["choices"][0]["token_ids"] == self.own(other, prompt)
        if other.kind == "transformers":
            told = answer["kvferry"]
            assert (told["recomputed"], told["tokens_received"]) == ("", num_tokens - 1)
            # Memory is not shared between hosts.
            assert told["transport"] in ("tcp", "nixl")
        else:
            # What was asked since has let vLLM count all of it.
            hits, failed = (now - then for now, then in zip(self.counted(other), before, strict=True))
            assert (hits, failed) == (num_tokens - 1, 0)

    def counted(self, engine: Engine) -> tuple[float, float]:
        """Tokens that vLLM has got from others, and transfers that have failed."""
        return self.do(lambda: (metric(engine.url, EXTERNAL_HITS), metric(engine.url, FAILED)))

    def own(self, engine: Engine, prompt: Prompt) -> list[int]:
        return self.do(lambda: alone(engine, prompt))["choices"][0]["token_ids"]


def a_prompt(num_tokens: int) -> Prompt:
    number = next(numbers)
    chooser = random.Random(number)
    return Prompt(tuple(chooser.randrange(FIRST_PLAIN_TOKEN, VOCAB_SIZE) for _ in range(num_tokens)), f"hosts-{number}")


@pytest.fixture(scope="module")
def fleet(running, tmp_path_factory) -> Iterator[Fleet]:
    running.stop()
    folder = tmp_path_factory.mktemp("hosts")
    token = folder / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    with ExitStack() as started:
        network = Network("client", *BLOCKS)
        started.callback(network.close)
        children = {}
        for name, (kind, block_tokens) in BLOCKS.items():
            host = network.hosts[name]
            words = ("serve", "--engine", kind, "--engine-id", name, "--block-tokens", str(block_tokens))
            words += ("--model", str(model_folder(MODEL)), "--served-name", "tiny", "--dtype", "float32")
            words += ("--host", host.address, "--transfer-host", host.address, "--token-file", str(token))
            own = ("--", *VLLM_ARGUMENTS, *MODELS[MODEL].cpu_flags) if kind == "vllm" else ()
            words += own or ("--num-blocks", str(NUM_BLOCKS))
            with pytest.MonkeyPatch.context() as patch:
                for variable, value in (ENVIRONMENT | {"VLLM_HOST_IP": host.address}).items():
                    patch.setenv(variable, value)
                child = host.do(lambda words=words, name=name: Child(name, words, folder / f"{name}.log", 0))
            children[name] = child
            started.callback(child.stop)
        deadline = time.monotonic() + READY_S
        urls = {name: str(child.wait_until_ready(deadline)["url"]) for name, child in children.items()}
        yield Fleet(network, {name: Engine(BLOCKS[name][0], url) for name, url in urls.items()})
        for child in children.values():
            child.terminate()


@pytest.mark.parametrize(("source", "target"), WAYS, ids=[f"{one} to {other}" for one, other in WAYS])
def test_a_cache_moves_between_hosts(fleet, source, target):
    for num_tokens in SIZES:
        fleet.moves(source, target, num_tokens)


def test_a_router_on_a_host_of_its_own_sends_requests_through_both(fleet, tmp_path):
    urls = {name: engine.url for name, engine in fleet.engines.items()}
    words = ("route", "--prefill", urls["first"], "--decode", urls["second"])
    router = fleet.do(lambda: Child("router", words, tmp_path / "router.log", 0))
    try:
        url = router.wait_until_ready(time.monotonic() + READY_S)["url"]
        prompt = a_prompt(200)
        answer = fleet.do(lambda: post(url, body(prompt, prompt.num_tokens)))
        assert answer["path"] == "disaggregated"
        assert answer["choices"][0]["token_ids"] == fleet.own(fleet.engines["second"], prompt)
    finally:
        router.stop()


@contextmanager
def unplugged(network: Network, source: str, _: str) -> Iterator[None]:
    network.unplug(source)
    try:
        yield
    finally:
        network.plug_in(source)


@contextmanager
def tunnelled(network: Network, _: str, target: str) -> Iterator[None]:
    """Longer packets than a claim's vanish on their way to `target`."""
    network.drop_longer_than(1300, target)
    try:
        yield
    finally:
        network.drop_longer_than(1500, target)


FAULTS = [*((*way, unplugged) for way in WAYS[1:]), ("first", "second", tunnelled), ("first", "third", tunnelled)]


@pytest.mark.parametrize(
    ("source", "target", "fault"), FAULTS, ids=[f"{one} to {other} {fault.__name__}" for one, other, fault in FAULTS]
)
def test_a_cable_that_is_cut_or_narrow_costs_the_cache_and_not_the_answer(fleet, source, target, fault):
    """What the client waits for is printed: heartbeats, or three attempts to connect where a rank computes; and the
    prompt's own computation."""
    fleet.moves(source, target, 129)
    prompt = a_prompt(300)
    one, other = fleet.engines[source], fleet.engines[target]
    first = fleet.do(lambda: post(one.url, body(prompt, 1) | {"kv_transfer_params": REMOTE_DECODE}))
    wanted = body(prompt, prompt.num_tokens) | {"kv_transfer_params": first["kv_transfer_params"]}
    expected = fleet.own(other, prompt)
    with fault(fleet.network, source, target):
        began = time.monotonic()
        answer = fleet.do(lambda: post(other.url, wanted))
        print(f"waited {time.monotonic() - began:.1f} s")
    assert answer["choices"][0]["token_ids"] == expected
    fleet.moves(source, target, 129)
