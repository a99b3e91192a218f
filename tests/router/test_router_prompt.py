"""What the router makes of a prompt: tokens, prefixes, speeds, phases, and who may be paired."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_harness import cluster, decode_engine, hanging

from kvferry.http.asgi import server_timing
from kvferry.router.fleet.engine_info import UNKNOWN_ENGINE, EngineInfo, differences
from kvferry.router.fleet.prefill_speed import Mean, PrefillSpeed
from kvferry.router.policy.prefix_affinity import PrefixIndex
from kvferry.router.policy.records import Instance, Role
from kvferry.router.request.client_request import Endpoint, parse_request
from kvferry.router.request.prompt_cost import (
    DEFAULT_NEW_TOKENS,
    MAX_NEW_TOKENS,
    MAX_PREFIXES,
    PREFIX_BYTES,
    TOKENS_OF_EMBEDDED,
    cost_of,
)
from kvferry.router.telemetry.request_timing import phases_of, told_phases

D0, D1 = (Instance(f"http://d{i}", Role.DECODE) for i in range(2))


def task(endpoint=Endpoint.COMPLETIONS, **fields):
    return cost_of(parse_request(json.dumps(fields).encode(), endpoint))


@pytest.mark.parametrize(
    ("before", "after", "endpoint"),
    [
        (b'{"prompt":[', b'"hello"]}', Endpoint.COMPLETIONS),
        (b'{"prompt":[[', b"1]]}", Endpoint.COMPLETIONS),
        (b'{"messages":[{"role":"user","content":[{"data":', b"1}]}]}", Endpoint.CHAT),
        (b'{"messages":[{"role":"user","content":[{"data":[', b"1]}]}]}", Endpoint.CHAT),
        (b'{"messages":[{"role":"user","content":[{"data"', b":1}]}]}", Endpoint.CHAT),
    ],
)
@pytest.mark.timeout(60)
def test_a_body_of_blanks_takes_no_longer_than_others(before, after, endpoint):
    """Were it looked at anew from each blank on, it would take days."""
    found = cost_of(parse_request(before + b" " * (8 << 20) + after, endpoint))
    assert found.prompt_tokens <= (8 << 20) // 4 + 20


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [([1, 2, 3], 3), ([[1, 2, 3]], 3), ("x" * 400, 100), ("", 1), (["x" * 400], 101), ([-1], 1)],
)
def test_token_ids_are_counted_and_text_is_guessed(prompt, tokens):
    assert task(prompt=prompt).prompt_tokens == tokens


EMBEDDED = {
    "an image": lambda held: {"type": "image_url", "image_url": {"url": "data:image/png;base64," + held}},
    "a sound": lambda held: {"type": "input_audio", "input_audio": {"data": held, "format": "wav"}},
    "an image's embeddings": lambda held: {"type": "image_embeds", "image_embeds": held},
    "several tensors": lambda held: {"type": "image_embeds", "image_embeds": {"image_embeds": held}},
    "embeddings": lambda held: {"type": "prompt_embeds", "data": held},
}


@pytest.mark.parametrize("part", EMBEDDED.values(), ids=EMBEDDED)
def test_a_file_counts_the_same_whatever_it_weighs(part):
    def num_tokens(num_bytes):
        content = [{"type": "text", "text": "what is this?"}, part("A" * num_bytes)]
        return task(Endpoint.CHAT, messages=[{"role": "user", "content": content}]).prompt_tokens

    assert TOKENS_OF_EMBEDDED < num_tokens(1000) == num_tokens(2_000_000) < TOKENS_OF_EMBEDDED + 100


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES])
def test_tools_are_a_part_of_the_prompt_and_come_first(endpoint):
    def cost(question, *tools):
        said = [{"role": "user", "content": question}]
        asked = {"input": said} if endpoint is Endpoint.RESPONSES else {"messages": said}
        return task(endpoint, **asked, **({"tools": [{"name": name * 4000} for name in tools]} if tools else {}))

    plain, one, other = cost("x" * 4000), cost("x" * 4000, "a"), cost("x" * 4000, "b")
    assert one.prompt_tokens - plain.prompt_tokens == pytest.approx(1000, abs=10)
    assert one.prefixes == cost("x" * 4000, "a").prefixes
    assert not set(one.prefixes) & {*other.prefixes, *plain.prefixes}
    # What is shared of the text stands for the tools as well.
    assert one.prefix_tokens > 1.9 * plain.prefix_tokens


@pytest.mark.parametrize("more", [{}, {"prompt": None}])
def test_a_prompt_of_embeddings_counts_like_a_file(more):
    for embeddings in ("A" * 1000, ["A" * 2_000_000]):
        assert task(prompt_embeds=embeddings, **more).prompt_tokens == TOKENS_OF_EMBEDDED + 1
    one, other = (task(prompt_embeds=letter * 4000, **more).prefixes for letter in "AB")
    assert len(one) == 3
    assert not set(one) & set(other)


@pytest.mark.parametrize("value", [b'"abc"', b"[1]", b'{"a":1}', b"-1000000000", b"0", b"1e999", b"1" * 5000, b"null"])
@pytest.mark.parametrize("field", [b"n", b"cache_salt"])
def test_fields_that_an_api_does_not_have_cost_nothing(field, value):
    """Nor less than nothing: everybody's requests would go to whoever has this one."""
    asked = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":4,"%b":%b}' % (field, value)
    assert cost_of(parse_request(asked, Endpoint.MESSAGES)).new_tokens == 4
    asked = b'{"input":"x","max_output_tokens":4,"%b":%b}' % (field, value)
    assert cost_of(parse_request(asked, Endpoint.RESPONSES)).new_tokens == 4


def test_new_tokens_are_those_that_were_asked_for():
    assert task(prompt="x", max_tokens=7).new_tokens == 7
    assert task(prompt="x", max_tokens=7, n=3).new_tokens == 21
    assert task(prompt="x", max_tokens=None).new_tokens == DEFAULT_NEW_TOKENS
    chat = task(Endpoint.CHAT, messages=[{}], max_tokens=9, max_completion_tokens=5)
    assert chat.new_tokens == 5


@pytest.mark.parametrize("fields", [{"max_tokens": 10**400}, {"n": 10**400}, {"max_tokens": 10**12, "n": 10**12}])
async def test_an_absurd_number_of_tokens_counts_as_very_many(fields):
    """The metrics show the sum of all requests as a float, and the members as an integer of 64 bits."""
    assert task(prompt="x", **fields).new_tokens == MAX_NEW_TOKENS
    d = decode_engine(behave=hanging)
    async with cluster([], [d]) as c:
        asking = asyncio.create_task(c.complete({"prompt": "x", **fields}))
        await d.arrived.wait()
        assert d.seen[0].body == {"prompt": "x", **fields}
        (member,) = (await c.members())["members"]
        assert member["in_flight_tokens"] == MAX_NEW_TOKENS
        tokens = f'kvferry_router_in_flight_tokens{{instance="{d.url}",role="decode"}}'
        assert await c.metric(tokens) == MAX_NEW_TOKENS
        asking.cancel()
        await d.left.wait()


def test_what_cannot_be_divided_says_so():
    assert task(prompt="x").is_divisible
    assert not task(prompt="x", n=2).is_divisible


@given(st.integers(0, 5000), st.integers(0, 3000), st.integers(0, 3000))
def test_prompts_share_the_names_of_what_they_share(common, left, right):
    shared = "s" * common
    one, other = task(prompt=shared + "l" * left).prefixes, task(prompt=shared + "r" * right).prefixes
    # The quotation mark belongs to what is read.
    num_shared = (1 + common) // PREFIX_BYTES
    assert one[:num_shared] == other[:num_shared]
    if left and right:
        assert not set(one[num_shared:]) & set(other[num_shared:])


def test_prefixes_of_other_models_and_salts_are_others_and_their_number_is_bounded():
    prompt = "x" * 4096
    names = [task(prompt=prompt, **more).prefixes for more in ({}, {"model": "m"}, {"cache_salt": "s"})]
    assert len({name for one in names for name in one}) == 12
    assert len(task(prompt="x" * 10**6).prefixes) == MAX_PREFIXES


def test_who_has_seen_the_longest_known_beginning_is_found_without_asking_all():
    index, instances = PrefixIndex(max_names=3), [Instance(f"http://p{n}", Role.PREFILL) for n in range(3)]
    for instance, prefixes in zip(instances, ((1, 2), (1, 2, 3), (1,)), strict=True):
        index.remember(instance, prefixes)
    found = [list(index.holders(prefixes)) for prefixes in ((1, 2, 3, 4), (1, 2), (1,), (9,), ())]
    assert found == [[instances[1]], instances[:2], instances, [], []]
    index.forget(instances[1])
    assert list(index.holders((1, 2, 3))) == [instances[0]]
    # What is pushed out is not held any more.
    index.remember(instances[0], (7, 8, 9))
    assert [list(index.holders((name,))) for name in (1, 2, 9)] == [[instances[2]], [], [instances[0]]]
    index.forget(instances[0])
    index.forget(instances[2])
    assert not index._holders


def test_an_index_knows_the_shortest_prefixes_longest_and_forgets():
    index = PrefixIndex(max_names=3)
    index.remember(D0, (1, 2, 3))
    assert index.num_known(D0, (1, 2, 9)) == 2
    assert index.num_known(D0, (9, 2, 3)) == 0
    assert index.num_known(D1, (1,)) == 0
    index.remember(D0, (4,))
    assert index.num_known(D0, (1, 2, 3)) == 2
    index.forget(D0)
    assert index.num_known(D0, (1,)) == 0


def test_many_instances_share_the_room_of_an_index():
    index, instances = (
        PrefixIndex(max_names=8, max_in_all=20),
        [Instance(f"http://p{n}", Role.PREFILL) for n in range(5)],
    )
    for number, instance in enumerate(instances * 3):
        index.remember(instance, range(100 * number, 100 * number + 8))
    # A fifth of it for each.
    assert [len(names) for names in index._names.values()] == [4] * 5
    assert len(index._holders) == 20
    assert index.num_known(instances[0], range(1000, 1008)) == 4


def test_an_instance_that_is_given_nothing_any_more_makes_room_as_well():
    index, instances = (
        PrefixIndex(max_names=8, max_in_all=20),
        [Instance(f"http://p{n}", Role.PREFILL) for n in range(5)],
    )
    for number, instance in enumerate([*instances, *[instances[4]] * 5]):
        index.remember(instance, range(100 * number, 100 * number + 8))
    assert [len(names) for names in index._names.values()] == [4] * 5


def test_speed_is_measured_while_there_is_work():
    speed = PrefillSpeed()
    assert speed.tokens_per_s == 0
    speed.began(0.0)
    speed.ended(2.0, 1000)
    assert speed.tokens_per_s == pytest.approx(500, rel=0.1)
    speed.began(1000.0)
    speed.began(1000.5)
    speed.ended(1001.0, 500)
    speed.ended(1002.0, 500)
    assert speed.tokens_per_s == pytest.approx(500, rel=0.1)


def test_speed_forgets_what_is_long_ago():
    speed = PrefillSpeed()
    for i in range(100):
        speed.began(i * 10.0)
        speed.ended(i * 10.0 + 10, 1000)
    for i in range(100, 120):
        speed.began(i * 10.0)
        speed.ended(i * 10.0 + 10, 10_000)
    assert speed.tokens_per_s == pytest.approx(1000, rel=0.05)


def test_a_mean_begins_with_its_first_value():
    mean = Mean()
    mean.add(4.0)
    assert mean.value == 4.0
    mean.add(2.0)
    assert mean.value == pytest.approx(3.0)
    for _ in range(200):
        mean.add(1.0)
    assert mean.value == pytest.approx(1.0)


def test_an_engine_tells_its_phases():
    headers = [(b"Server-Timing", b"queue;dur=1.5, handshake;dur=80, db;dur=3"), (b"server-timing", b"wire;dur=0.25")]
    assert told_phases(headers) == {"queue": 0.0015, "handshake": 0.08, "wire": 0.00025}


@pytest.mark.parametrize("value", [b"", b"wire", b"wire;dur=x", b"wire;dur=-1", b"wire;dur=1e9", b"wire;desc=a;dur=1"])
def test_what_cannot_be_understood_is_not_told(value):
    assert told_phases([(b"server-timing", value)]) == {}


@given(*[st.floats(0, 100)] * 5)
def test_phases_add_up_to_the_time_to_the_first_token(queue_s, prefill_s, rest_s, wire_s, verify_s):
    told = {"queue": 0.5, "wire": wire_s, "verify": verify_s}
    decode_s = 0.5 + wire_s + verify_s + rest_s
    phases = phases_of(queue_s, prefill_s, decode_s, told)
    assert sum(phases.values()) == pytest.approx(queue_s + prefill_s + decode_s)
    assert next(iter(phases)) == "queue"
    assert list(phases)[-1] == "first_decode"
    assert set(told_phases([(b"server-timing", server_timing(phases).encode())])) == {"queue", "wire", "verify"}


OURS = EngineInfo("kvferry", "0.1.0", "1", "e1", ("tiny",), "c1")


@pytest.mark.parametrize(
    ("decode", "named"),
    [
        (OURS, []),
        (UNKNOWN_ENGINE, []),
        (EngineInfo("kvferry", "0.2.0", "1", "e2", ("tiny", "more"), "c1"), []),
        (EngineInfo("kvferry", "0.1.0", "2", "e2", ("tiny",), "c1"), ["wire_version"]),
        (EngineInfo("kvferry", "0.1.0", "1", "e2", ("other",), "c2"), ["model", "cache"]),
        (EngineInfo("vllm", "0.32.0", models=("tiny",)), []),
    ],
)
def test_only_what_both_tell_and_differs_keeps_them_apart(decode, named):
    assert [text.partition(":")[0] for text in differences(OURS, decode)] == named
    assert [text.partition(":")[0] for text in differences(decode, OURS)] == named


def test_engines_of_others_are_paired_within_one_release():
    old, new = EngineInfo("vllm", "0.32.0"), EngineInfo("vllm", "0.33.0")
    assert differences(old, old) == ()
    assert differences(old, new) == ("version: 0.32.0 and 0.33.0",)
