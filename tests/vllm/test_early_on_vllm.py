"""Early prefills of real vLLM servers: what is computed leaves while the rest is, and the answer is that of one server.

The two servers fetch in different ways; each is the prefill side once.
"""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from answers import alone, judge, prompts_of, wait_until_free
from crossing import get, metric, post, route
from proxy import Answer, Question, RefusedError, ask, ask_disaggregated, decode, open_request
from servers import DEVICE, Pair, PairSpec, Server, ServerSpec

STEP_TOKENS = 256
CHUNKED = ("--max-num-batched-tokens", str(STEP_TOKENS))
# It has an endpoint that preempts all running requests.
DEVELOPING = (("VLLM_SERVER_DEV_MODE", "1"),)
PUSHED = (("strategy", "direct"), ("transfer_direction", "push"))
BOTH = PairSpec(
    "llama",
    ServerSpec("kv_both", flags=CHUNKED, extra=PUSHED, environment=DEVELOPING),
    ServerSpec("kv_both", flags=CHUNKED, extra=(("strategy", "pack"),), environment=DEVELOPING),
    lease_s=15,
)
EARLY = {"do_remote_decode": True, "do_remote_prefill": False, "kvferry": {"early": True}}
NUM_ROWS = "vllm:nixl_num_descriptors_sum"
MOVED, DONE = "vllm:kvferry_agent_moved_bytes_total", "vllm:request_success_total"
# Half a stretch and more is not computed yet when the first one has moved.
LONG, VERY_LONG = 4000, 7000
SOON_S = 60.0
# Long before the leases of these servers end.
FREE_S = 10.0

WAYS = pytest.mark.parametrize("way", ["packed", "pushed"])
ON_BOTH = pytest.mark.parametrize("spec", [BOTH], ids=["both"])


class Stream:
    """An early prefill, read event by event; `params` are those of its first event."""

    def __init__(self, server: Server, question: Question) -> None:
        self._connection = open_request(server, question, question.body(1, EARLY) | {"stream": True})
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()
        first = next(self)
        assert first["choices"] == []
        self.params: dict[str, Any] = first["kv_transfer_params"]

    def __next__(self) -> Any:
        line = self._response.readline().removeprefix(b"data: ").strip()
        assert self._response.readline() == b"\n"
        return line.decode() if line == b"[DONE]" else json.loads(line)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def tokens(self) -> list[int]:
        """Those of the rest, which ends well."""
        found: list[int] = []
        while (event := next(self)) != "[DONE]":
            found += [token for choice in event["choices"] for token in choice["token_ids"]]
        return found

    def leave(self) -> None:
        self._response.close()
        self._connection.close()


def sides(pair: Pair, way: str) -> tuple[Server, Server]:
    """Source and target, which have met: a first negotiation takes longer than a prompt."""
    both = (pair.prefill, pair.decode) if way == "packed" else (pair.decode, pair.prefill)
    ask_disaggregated(*both, prompts_of((10,))[0])
    return both


def wait_for(server: Server, metric: str, is_right: Callable[[float], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not is_right(server.metric(metric)):
        assert time.monotonic() < deadline, f"{metric} is {server.metric(metric)}"


def wait_until_moved(server: Server, before: float) -> None:
    wait_for(server, MOVED, lambda moved: moved > before)


@contextmanager
def moving(source: Server, target: Server) -> Iterator[tuple[Stream, Future[Answer]]]:
    """An early prefill, and the decode request that some of its cache has come for already."""
    (question,) = prompts_of((VERY_LONG,))
    # An answer says why it has failed where a caller gives it an id.
    question = replace(question, request_id=question.salt)
    before = source.metric(MOVED)
    with Stream(source, question) as stream, ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(decode, target, question, stream.params)
        wait_until_moved(source, before)
        yield stream, decoding


def refusal(decoding: Future[Any]) -> str:
    """Why the decode request had no cache."""
    with pytest.raises(RefusedError) as caught:
        decoding.result()
    return str(json.loads(str(caught.value).split(":", 1)[1])["error"]["code"])


def outcome(decoding: Future[Answer]) -> Answer | RefusedError:
    try:
        return decoding.result()
    except RefusedError as refused:
        return refused


def preempt(server: Server) -> None:
    """All requests that run lose their blocks, and begin anew."""
    url = f"{server.url}/reset_prefix_cache?reset_running_requests=true"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=SOON_S) as answer:
        assert answer.status == 200


@WAYS
@ON_BOTH
def test_what_is_computed_leaves_while_the_rest_is(pair, spec, way):
    source, target = sides(pair, way)
    (question,) = prompts_of((LONG,))
    moved, done, seen = source.metric(MOVED), source.metric(DONE), 0.0
    with Stream(source, question) as stream, ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(decode, target, question, stream.params)
        while source.metric(DONE) == done:
            seen = max(seen, source.metric(MOVED) - moved)
        assert stream.tokens() == list(decoding.result().tokens[:1])
        assert not judge(source, target, question, decoding.result()).problem
    assert seen > 0
    wait_until_free(pair.servers, FREE_S)


@WAYS
@ON_BOTH
def test_prompts_of_any_size_and_several_at_once(pair, spec, way):
    """One step and several; what P has cached is there from the start; two that share it."""
    source, target = sides(pair, way)
    cached, *others = prompts_of((1000, 1, 5, 128, 700))
    ask(source, replace(cached, num_tokens=1))
    questions = [cached, replace(cached, prompt=cached.prompt[:900]), *others]
    streams = [Stream(source, question) for question in questions]
    with ThreadPoolExecutor(len(streams)) as pool:
        params = [stream.params for stream in streams]
        answers = list(pool.map(lambda both: decode(target, both[0], both[1]), zip(questions, params, strict=True)))
    for question, answer, stream in zip(questions, answers, streams, strict=True):
        assert stream.tokens() == list(answer.tokens[:1])
        assert not judge(source, target, question, answer).problem
        stream.leave()
    wait_until_free(pair.servers, FREE_S)


@WAYS
@ON_BOTH
def test_a_client_that_leaves_takes_the_promise_back(pair, spec, way):
    with moving(*sides(pair, way)) as (stream, decoding):
        stream.leave()
        assert refusal(decoding) == "expired"
    wait_until_free(pair.servers, FREE_S)


@WAYS
@ON_BOTH
def test_a_decode_request_that_leaves_costs_the_prefill_nothing(pair, spec, way):
    source, target = sides(pair, way)
    (question,) = prompts_of((LONG,))
    before = source.metric(MOVED)
    with Stream(source, question) as stream:
        decoding = open_request(target, question, question.body(12, stream.params))
        wait_until_moved(source, before)
        decoding.close()
        assert stream.tokens() == list(ask(source, alone(replace(question, num_tokens=1))).tokens)
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.skipif(DEVICE != "cpu", reason="vLLM preempts on demand only while no step runs on the device")
@WAYS
@ON_BOTH
def test_blocks_that_vllm_takes_away_are_never_used(pair, spec, way):
    """All requests that run are preempted: their blocks are free at once, and the prompt is computed from the start."""
    source, target = sides(pair, way)
    with moving(source, target) as (stream, decoding):
        preempt(source)
        assert refusal(decoding) == "expired"
        assert len(stream.tokens()) == 1
    wait_until_free(pair.servers, FREE_S)


@ON_BOTH
def test_nobody_asks_for_a_promise_that_was_made(pair, spec):
    """It ends with its lease. That it is promised at all is told to routers."""
    assert get(f"{pair.prefill.url}/kvferry/info")["early"] is True
    (question,) = prompts_of((300,))
    with Stream(pair.prefill, question) as stream:
        assert len(stream.tokens()) == 1
        release = json.dumps({"kv_transfer_params": stream.params}).encode()
    asked = urllib.request.Request(f"{pair.prefill.url}/kvferry/release", release, method="POST")
    with urllib.request.urlopen(asked, timeout=SOON_S) as answer:
        assert json.loads(answer.read()) == {"released": True}
    wait_until_free(pair.servers, FREE_S)


@WAYS
@ON_BOTH
def test_our_router_asks_for_both_requests_at_once(pair, spec, way, tmp_path):
    source, target = sides(pair, way)
    (question,) = prompts_of((LONG,))
    expected = ask(target, alone(question))
    with route(source.url, target.url, tmp_path / "log", "--early-decode-from", "1") as url:
        answer = post(url, question.body(question.num_tokens, None))
        early = metric(url, "kvferry_router_early_decodes_total")
    assert (answer["path"], answer["cache"]) == ("disaggregated", "received")
    assert tuple(answer["choices"][0]["token_ids"]) == expected.tokens
    assert early == 1
    wait_until_free(pair.servers, FREE_S)


# Steps of 16 MiB, which are worth taking apart.
LAYERED = replace(
    BOTH,
    prefill=ServerSpec("kv_both", flags=("--max-num-batched-tokens", "2048"), extra=(("layer_wise", True),)),
    decode=ServerSpec("kv_both", flags=("--max-num-batched-tokens", "2048"), extra=PUSHED),
)


@pytest.mark.parametrize("spec", [LAYERED], ids=["layered"])
def test_layers_leave_one_by_one(pair, spec):
    """All tokens of a step are written at once then, in bundles of layers. Their blocks follow one another on servers
    that are new, so that is fewer rows than stretches of tokens would be: 4 MiB each, a row for each of four layers."""
    source, target = sides(pair, "packed")
    before, num_stretches = target.metric(NUM_ROWS), -(-LONG // 512)
    first, *others = prompts_of((LONG, 300, VERY_LONG))
    for question in (first, *others):
        with Stream(source, question) as stream:
            answer = decode(target, question, stream.params)
            assert stream.tokens() == list(answer.tokens[:1])
        if question.prompt == first.prompt:
            assert target.metric(NUM_ROWS) - before < num_stretches * 4
        assert not judge(source, target, question, answer).problem
    wait_until_free(pair.servers, FREE_S)


# One prompt leaves so little room that the next one has to take its blocks; nothing but the lease tells whose they are.
TIGHT = replace(
    BOTH,
    prefill=replace(BOTH.prefill, cache_bytes=70 << 20),
    decode=replace(BOTH.decode, cache_bytes=70 << 20),
    extra=(("digest", "off"),),
)
NUM_RESETS = 10
OTHERS = ("mistral", "gemma3", "deepseek_v3", "nemotron_h")
OTHER = ServerSpec("kv_both")


@pytest.mark.full
@WAYS
@pytest.mark.parametrize("spec", [TIGHT], ids=["tight"])
def test_no_answer_is_wrong_however_often_blocks_are_taken_away(pair, spec, way):
    """At moments that are spread over the prefill; other prompts take the blocks in the same step or soon after."""
    source, target = sides(pair, way)
    chooser, refused = random.Random(way), 0
    with ThreadPoolExecutor(2) as pool:
        for number in range(NUM_RESETS):
            question, other = (
                replace(one, salt=f"{way}-{number}-{one.salt}") for one in prompts_of((5000, 3000), seed=number)
            )
            with Stream(source, replace(question, request_id=question.salt)) as stream:
                decoding = pool.submit(decode, target, replace(question, request_id=question.salt), stream.params)
                behind = pool.submit(ask, source, replace(other, num_tokens=1))
                threading.Event().wait(chooser.uniform(0.0, 1.0))
                preempt(source)
                behind.result()
                stream.tokens()
            found = outcome(decoding)
            refused += isinstance(found, RefusedError)
            assert '"expired"' in str(found) or not judge(source, target, question, found).problem
    print(f"\n{way}: {refused} of {NUM_RESETS} refused")
    assert refused > 0
    wait_until_free(pair.servers, SOON_S)


WIDE = PairSpec(
    "llama",
    ServerSpec("kv_both", tp=2, block_tokens=64, flags=CHUNKED, extra=PUSHED),
    ServerSpec("kv_both", flags=CHUNKED, extra=(("strategy", "pack"),)),
    lease_s=60,
)


@pytest.mark.full
@WAYS
@pytest.mark.parametrize(
    "spec", [WIDE, *(replace(WIDE, model=model, prefill=OTHER, decode=OTHER) for model in OTHERS)], ids=str
)
def test_ranks_and_kinds_of_cache(pair, spec, way):
    """Of what is written over later everything is told at the end."""
    source, target = sides(pair, way)
    for question in prompts_of((1, 300, 2500)):
        with Stream(source, question) as stream:
            answer = decode(target, question, stream.params)
            assert len(stream.tokens()) == 1
        assert not judge(source, target, question, answer).problem
    wait_until_free(pair.servers, SOON_S)
