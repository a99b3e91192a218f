"""What fleets switch on beside a connector, together, on real vLLM servers; docs/vllm-combined.md has the table."""

from __future__ import annotations

import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
from answers import alone, check_equal, judge, prompts_of, wait_until_free
from proxy import REMOTE_DECODE, Answer, Question, ask, ask_disaggregated, open_request, post_body, prefill
from servers import PLAIN, Pair, PairSpec, Server, ServerSpec
from test_middleware_on_vllm import post

SIZES = (5, 128, 300, 1000)
FREE_S, SOON_S = 60.0, 60.0
PREEMPTED = "vllm:num_preemptions_total"
GUESSED, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"


def telling(name: str) -> tuple[str, ...]:
    """A server's word to those who route by what is cached where."""
    publisher = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events_of(name)}
    return "--kv-events-config", json.dumps(publisher)


def events_of(name: str) -> str:
    return f"ipc://{tempfile.gettempdir()}/kvferry-events-{os.getpid()}-{name}"


# A prompt is computed in up to four steps, together with what others decode; decode has room for a few requests only.
BUSY = ("--max-num-batched-tokens", "256", "--scheduling-policy", "priority")
FLEET = PairSpec(
    "llama",
    ServerSpec("kv_producer", flags=(*BUSY, *telling("kv_producer"))),
    ServerSpec(
        "kv_consumer",
        flags=(*BUSY, "--max-model-len", "2048", *telling("kv_consumer")),
        cache_bytes=24 << 20,
        speculator="ngram",
    ),
)
in_a_fleet = pytest.mark.parametrize("spec", [FLEET], ids=["fleet"])


def repeating(size: int, num_tokens: int = 40, seed: int = 0) -> Question:
    """A prompt that says the same again and again, so that a speculator finds something to guess."""
    (question,) = prompts_of((20,), num_tokens, seed)
    return replace(question, prompt=(question.prompt * (-(-size // 20)))[:size])


@in_a_fleet
def test_answers_equal_a_single_servers_which_guesses_nothing(pair: Pair, spec):
    before = pair.decode.metric(GUESSED)
    check_equal(pair, [repeating(size, seed=size) for size in SIZES])
    check_equal(pair, prompts_of(SIZES))
    check_equal(pair, prompts_of(SIZES, num_tokens=1, seed=1))
    assert pair.decode.metric(GUESSED) > before
    wait_until_free(pair.servers, FREE_S)


@in_a_fleet
def test_steps_that_decode_fetched_prompts_and_compute_others_in_chunks(pair: Pair, spec):
    """Both servers compute prompts of their own all the while, whose chunks share steps with what is transferred."""
    with ThreadPoolExecutor(4) as pool:
        computed = [
            pool.submit(ask, server, alone(question))
            for server in pair.servers
            for question in prompts_of((1500, 1500), num_tokens=10, seed=2)
        ]
        check_equal(pair, prompts_of((300, 500, 700, 900), num_tokens=20, seed=3), at_once=4)
        assert all(len(one.result().tokens) == 10 for one in computed)
    wait_until_free(pair.servers, FREE_S)


@in_a_fleet
def test_what_is_urgent_takes_the_blocks_of_what_is_not(pair: Pair, spec):
    """Four of five blocks each, which all grow by a sixth: there are 23. Who is preempted has lost what it had fetched,
    and computes it."""
    preempted = pair.decode.metric(PREEMPTED)
    questions = prompts_of((630,) * 4, num_tokens=20, seed=4)
    params = [prefill(pair.prefill, question).params for question in questions]
    bodies = [
        question.body(question.num_tokens, each) | {"priority": -number}
        for number, (question, each) in enumerate(zip(questions, params, strict=True))
    ]
    with ThreadPoolExecutor(len(questions)) as pool:
        documents = list(pool.map(lambda both: post_body(pair.decode, *both), zip(questions, bodies, strict=True)))
    for question, document in zip(questions, documents, strict=True):
        assert not judge(pair.prefill, pair.decode, question, answer_of(document)).problem
    assert pair.decode.metric(PREEMPTED) > preempted
    wait_until_free(pair.servers, FREE_S)


def answer_of(document: dict[str, Any]) -> Answer:
    (choice,) = document["choices"]
    logprobs = tuple(choice["logprobs"]["token_logprobs"])
    return Answer(tuple(choice["token_ids"]), logprobs, str(choice["finish_reason"]), None)


NUM_LEAVING, LEAVE_WITHIN_S = 40, 0.5


@in_a_fleet
def test_many_clients_leave_at_once(pair: Pair, spec):
    """At any moment of either request, while others stay."""
    with ThreadPoolExecutor(16) as pool:
        gone = list(pool.map(lambda number: leave(pair, number), range(NUM_LEAVING)))
    assert set(gone) == {"prefill", "decode"}
    check_equal(pair, prompts_of(SIZES, seed=5), at_once=4)
    wait_until_free(pair.servers, FREE_S)


def leave(pair: Pair, number: int) -> str:
    """Ask, and close the connection a while later; where it was."""
    chooser = random.Random(number)
    (question,) = prompts_of((chooser.choice((64, 300, 900)),), num_tokens=200, seed=number)
    question = replace(question, request_id=f"storm-{number}")
    if number % 2:
        server, body, where = pair.prefill, question.body(1, REMOTE_DECODE), "prefill"
    else:
        server, body, where = pair.decode, question.body(200, prefill(pair.prefill, question).params), "decode"
    connection = open_request(server, question, body)
    threading.Event().wait(chooser.uniform(0.0, LEAVE_WITHIN_S))
    connection.close()
    return where


@in_a_fleet
def test_both_servers_say_which_blocks_they_have(pair: Pair, spec):
    """Of the decode server those that it has fetched as well: who routes by prefixes sends the next turn there."""
    (question,) = prompts_of((300,), seed=6)
    with heard(pair.prefill) as there, heard(pair.decode) as here:
        ask_disaggregated(pair.prefill, pair.decode, question)
        for events in (there, here):
            assert blocks_of(question, events) == list(question.prompt[:256])


@contextmanager
def heard(server: Server) -> Iterator[Iterator[dict[str, Any]]]:
    """The events that a server publishes from now on; fails when it says nothing for long."""
    socket = zmq.Context.instance().socket(zmq.SUB)
    try:
        socket.connect(events_of(server.spec.role))
        socket.subscribe(b"")
        deadline = time.monotonic() + SOON_S
        while not socket.poll(500):
            # Whoever subscribes is heard a moment later, and until then hears nothing.
            assert time.monotonic() < deadline
            ask(server, prompts_of((200,), num_tokens=1)[0])
        yield events(socket)
    finally:
        socket.close(0)


def events(socket: zmq.Socket[bytes]) -> Iterator[dict[str, Any]]:
    while socket.poll(SOON_S * 1000):
        _, _, payload = socket.recv_multipart()
        yield from msgspec.msgpack.decode(payload)[1]
    raise TimeoutError(f"no event in {SOON_S:.0f} s")


def blocks_of(question: Question, told: Iterator[dict[str, Any]]) -> list[int]:
    """The tokens of this question's two blocks, in the order in which they are told. Its salt is a key of the first."""
    found: list[int] = []
    for event in told:
        if event["type"] == "BlockStored" and (found or question.salt in str(event.get("extra_keys"))):
            found += event["token_ids"]
        if len(found) >= 256:
            break
    return found


# --- servers that cannot exchange a cache ---


def drafting(role: str, **more: Any) -> ServerSpec:
    """A server with a draft model, which keeps as much as the model itself."""
    return ServerSpec(role, cache_bytes=256 << 20, speculator="llama", **more)


# Eight bits, which fleets have there, need a CPU with AVX-512: test_vllm_description.py has them.
UNLIKE = replace(PLAIN, decode=drafting("kv_consumer", flags=("--dtype", "bfloat16")))


@pytest.mark.parametrize("spec", [UNLIKE], ids=["unlike"])
def test_servers_that_keep_different_things_say_which(pair: Pair, spec):
    """The numbers' format, and layers of a speculator that the other server has not: callers get the reason, and who
    operates the server finds every difference in its log."""
    (question,) = prompts_of((300,))
    body = question.body(4, prefill(pair.prefill, question).params)
    status, _, text = post(pair.decode.url, "/v1/completions", body, "unlike")
    error = json.loads(text)["error"]
    assert (status, error["code"]) == (502, "incompatible")
    for words in ("draft.layers.0.k: only the target has it", "dtype float32 at the source, bfloat16 at the target"):
        assert words in pair.decode.log.read_text()
    assert "the two engines do not hold the same cache" in error["message"]
    wait_until_free(pair.servers, FREE_S)


# --- positions that longrope extends ---

ORIGINAL, HALF_HEAD = 1024, 32


def extended(role: str, max_tokens: int) -> ServerSpec:
    """A server of a model that was made for ORIGINAL tokens. With more, it turns all its keys by the long factors."""
    factors = {"short_factor": [1.0] * HALF_HEAD, "long_factor": [1.0 + 3 * at for at in range(HALF_HEAD)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL, **factors}
    config = {"max_position_embeddings": 8 * ORIGINAL, "rope_parameters": rope}
    return ServerSpec(role, flags=("--max-model-len", str(max_tokens), "--hf-overrides", json.dumps(config)))


def longrope(num_prefill: int, num_decode: int) -> PairSpec:
    return replace(PLAIN, prefill=extended("kv_producer", num_prefill), decode=extended("kv_consumer", num_decode))


@pytest.mark.parametrize("spec", [longrope(ORIGINAL, 2 * ORIGINAL)], ids=["one of them longrope"])
def test_keys_that_only_one_server_turns_by_long_factors_are_refused(pair: Pair, spec):
    (question,) = prompts_of((300,))
    body = question.body(4, prefill(pair.prefill, question).params)
    status, _, text = post(pair.decode.url, "/v1/completions", body, "longrope")
    assert (status, json.loads(text)["error"]["code"]) == (502, "incompatible")
    assert "model.layers.0.long.k: only the target has it" in pair.decode.log.read_text()
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [longrope(2 * ORIGINAL, 4 * ORIGINAL)], ids=["both longrope"])
def test_keys_that_both_turn_by_long_factors_move(pair: Pair, spec):
    check_equal(pair, prompts_of(SIZES))
    check_equal(pair, prompts_of((1500,), seed=1))
    wait_until_free(pair.servers, FREE_S)


# --- speculators with a cache of their own ---

LEFT = (("transfer_draft_layers", False),)
IF_BOTH = (("transfer_draft_layers", "if_both"),)
SPECULATING = {
    "on decode alone, if both": replace(PLAIN, decode=drafting("kv_consumer", extra=IF_BOTH)),
    "on prefill alone, if both": replace(PLAIN, prefill=drafting("kv_producer", extra=IF_BOTH)),
    "on both, if both": replace(
        PLAIN, prefill=drafting("kv_producer", extra=IF_BOTH), decode=drafting("kv_consumer", extra=IF_BOTH)
    ),
    "on decode alone": replace(PLAIN, decode=drafting("kv_consumer", extra=LEFT)),
    "on prefill alone": replace(PLAIN, prefill=drafting("kv_producer", extra=LEFT)),
    "on both": replace(PLAIN, prefill=drafting("kv_producer"), decode=drafting("kv_consumer")),
    "ngram on both": replace(
        PLAIN,
        prefill=ServerSpec("kv_producer", speculator="ngram"),
        decode=ServerSpec("kv_consumer", speculator="ngram"),
    ),
}


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, id=name, marks=() if name == "on decode alone, if both" else pytest.mark.full)
        for name, spec in SPECULATING.items()
    ],
)
def test_speculators_change_no_answer(pair: Pair, spec):
    check_equal(pair, prompts_of(SIZES))
    check_equal(pair, prompts_of(SIZES * 2, num_tokens=20, seed=1), at_once=4)
    wait_until_free(pair.servers, FREE_S)


# --- long answers ---

NUM_STREAMED = 20_000
# Both are told of as many positions, past which vLLM's CPU back end crashes: they have to serve the same model.
ENDLESS = ("--max-model-len", "24000", "--hf-overrides", '{"max_position_embeddings": 24000}')
# With windows, so that a step does not become slower, and what has been fetched is given back on the way.
LONG = replace(
    PLAIN,
    model="mistral",
    prefill=ServerSpec("kv_producer", flags=ENDLESS),
    decode=ServerSpec("kv_consumer", flags=ENDLESS),
)


@pytest.mark.full
@pytest.mark.parametrize("spec", [LONG], ids=["long"])
def test_twenty_thousand_tokens_are_streamed(pair: Pair, spec):
    """Long after the source has forgotten the prompt; the first ones are those of the prefill server alone."""
    (question,) = prompts_of((300,), num_tokens=200)
    expected = ask(pair.prefill, alone(question)).tokens
    body = question.body(NUM_STREAMED, prefill(pair.prefill, question).params) | {"stream": True}
    connection = open_request(pair.decode, question, body)
    try:
        lines = [line.removeprefix(b"data: ").strip() for line in connection.getresponse()]
    finally:
        connection.close()
    told = [line for line in lines if line]
    assert told.pop() == b"[DONE]"
    tokens = [token for line in told for choice in json.loads(line)["choices"] for token in choice["token_ids"]]
    assert len(tokens) == NUM_STREAMED
    assert tuple(tokens[:200]) == expected
    wait_until_free(pair.servers, FREE_S)
