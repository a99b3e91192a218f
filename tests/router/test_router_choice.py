"""Laws of the default policy: work in tokens, homes, admission, and when a prefill does not pay."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvferry.errors import ConfigurationError
from kvferry.router.policy import balanced as module
from kvferry.router.policy.admission import first_token_s
from kvferry.router.policy.balanced import balanced
from kvferry.router.policy.least_work import choose, homes
from kvferry.router.policy.plugins import policy_named
from kvferry.router.policy.prefill_threshold import MAX_THRESHOLD_TOKENS, threshold_tokens
from kvferry.router.policy.records import (
    Instance,
    Limits,
    Load,
    NoInstance,
    Overloaded,
    RequestCost,
    Role,
    RoutingQuery,
    SkipPrefill,
    UseInstance,
)

P = tuple(Instance(f"http://p{i}", Role.PREFILL) for i in range(5))
D = tuple(Instance(f"http://d{i}", Role.DECODE) for i in range(3))
TASK = RequestCost(prompt_tokens=1000, new_tokens=100)


def load(instance, tokens=0, **facts) -> Load:
    return Load(instance, True, min(tokens, 1), 0, outstanding_tokens=tokens, **facts)


def question(role=Role.DECODE, prefill=(), decode=(), cost=TASK, **facts) -> RoutingQuery:
    return RoutingQuery(role, cost, tuple(prefill), tuple(decode), **facts)


def test_tokens_count_and_not_requests():
    few_long = Load(P[0], True, 1, 0, outstanding_tokens=9000)
    many_short = Load(P[1], True, 8, 0, outstanding_tokens=800)
    assert choose([few_long, many_short], TASK) == P[1]


def test_what_is_cached_is_no_work():
    warm, idle = load(P[0], 300, cached_tokens=900), load(P[1], 0)
    assert choose([warm, idle], TASK) == P[0]
    assert choose([structs.replace(warm, cached_tokens=200), idle], TASK) == P[1]


def test_a_decode_instance_with_no_partner_is_the_last_choice():
    lonely, busy = load(D[0], 0, num_partners=0), load(D[1], 9999)
    assert choose([lonely, busy], TASK) == D[1]
    assert choose([lonely, busy], dataclasses.replace(TASK, is_divisible=False)) == D[0]
    assert choose([lonely], TASK) == D[0]


@given(st.integers(0, 2**64 - 1), st.integers(2, 5), st.data())
def test_an_instance_that_leaves_takes_only_its_own_prompts_along(prefix, num, data):
    instances = list(P[:num])
    gone = data.draw(st.sampled_from(instances))
    left = [instance for instance in instances if instance != gone]
    before = homes(prefix, instances)[0]
    assert homes(prefix, left)[0] == before or before == gone


def test_homes_are_spread_evenly():
    counts = {instance: 0 for instance in P}
    for prefix in range(5000):
        counts[homes(prefix, P)[0]] += 1
    assert min(counts.values()) > 850


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 4000), min_size=2, max_size=5))
def test_home_is_left_only_when_it_is_more_than_this_request_behind(prefix, tokens):
    task = dataclasses.replace(TASK, prefixes=(prefix,), prefix_tokens=256)
    loads = [load(instance, backlog) for instance, backlog in zip(P, tokens, strict=False)]
    near = [one.instance for one in loads if one.outstanding_tokens <= min(tokens) + task.prompt_tokens]
    assert choose(loads, task) == homes(prefix, near)[0]


def test_where_a_prompt_was_sent_before_is_better_than_home():
    task = dataclasses.replace(TASK, prefixes=(7, 8), prefix_tokens=256)
    elsewhere = homes(7, P)[-1]
    loads = [load(one, cached_tokens=512 if one == elsewhere else 0) for one in P]
    assert choose(loads, task) == elsewhere


def test_everything_is_taken_where_there_are_no_limits_and_nobody_is_nobody():
    assert balanced(question(decode=[load(D[0], 10**9)])) == UseInstance(D[0])
    assert balanced(question()) == NoInstance()
    assert balanced(question(Role.PREFILL, prefill=[load(P[0], 10**9)], decode=[load(D[0])])) == UseInstance(P[0])


def test_a_full_decode_side_turns_requests_away():
    limits = Limits(max_requests=2)
    full = Load(D[0], True, 2, 0)
    assert balanced(question(decode=[full], limits=limits)) == Overloaded("decode_full", 1)
    assert balanced(question(decode=[full, load(D[1])], limits=limits)) == UseInstance(D[1])
    assert balanced(question(decode=[full], limits=limits, is_retry=True)) == UseInstance(D[0])
    assert balanced(question(limits=limits)) == NoInstance()


def test_a_full_instance_takes_nothing_while_another_has_room():
    """However much work the other one has, and whatever is cached here."""
    limits = Limits(max_requests=2)
    warm = Load(D[0], True, 2, 0, outstanding_tokens=20, cached_tokens=512)
    busy, down = load(D[1], 10**6), Load(D[2], False, 0, 0)
    task = dataclasses.replace(TASK, prefixes=(7,), prefix_tokens=256)
    assert balanced(question(decode=[warm, busy], cost=task, limits=limits)) == UseInstance(D[1])
    assert balanced(question(decode=[warm, busy], cost=task)) == UseInstance(D[0])
    assert balanced(question(decode=[warm, down], cost=task, limits=limits, is_retry=True)) == UseInstance(D[0])


def test_an_instance_in_no_pair_is_no_room():
    """Amid a rollout, say: it would answer with an error, or compute what others are there for."""
    limits = Limits(max_requests=1)
    full, unpaired = Load(D[0], True, 1, 0), Load(D[1], True, 0, 0, num_partners=0, computes_prompts=False)
    assert balanced(question(decode=[full, unpaired], limits=limits)) == Overloaded("decode_full", 1)
    assert balanced(question(decode=[full, unpaired], limits=limits, is_retry=True)) == UseInstance(D[0])
    # Of what cannot be divided, all that computes is room.
    whole = dataclasses.replace(TASK, is_divisible=False)
    alone = Load(D[1], True, 0, 0, num_partners=0)
    assert balanced(question(decode=[full, alone], cost=whole, limits=limits)) == UseInstance(D[1])


def test_the_first_token_is_estimated_from_the_queue_the_speed_and_the_handover():
    slow = load(P[0], 4000, tokens_per_s=1000.0)
    fast = load(P[1], 20000, tokens_per_s=10000.0)
    asked = question(prefill=[slow, fast], decode=[load(D[0])], handover_s=0.25)
    assert first_token_s(asked) == pytest.approx((20000 + 1000) / 10000 + 0.25)
    alone = question(prefill=[slow], decode=[load(D[0], 500, tokens_per_s=500.0)])
    assert first_token_s(alone) == pytest.approx(2.0)
    assert first_token_s(question(decode=[load(D[0])])) == 0.0


def test_a_request_that_would_be_late_is_turned_away_with_the_time_to_wait():
    queue = [load(P[0], 9000, tokens_per_s=1000.0)]
    limits = Limits(ttft_s=4.0)
    assert balanced(question(prefill=queue, decode=[load(D[0])], limits=limits)) == Overloaded("ttft", 6)
    assert balanced(question(prefill=queue, decode=[load(D[0])], limits=Limits(ttft_s=10.0))) == UseInstance(D[0])
    assert balanced(question(prefill=[load(P[0], 10**9)], decode=[load(D[0])], limits=limits)) == UseInstance(D[0])


def test_an_idle_instance_takes_what_it_seems_too_slow_for():
    """Its speed comes from short prompts, say; nobody would ever learn better."""
    limits, busy = Limits(ttft_s=0.1), load(D[0], 100, tokens_per_s=500.0)
    slow = load(P[0], tokens_per_s=1000.0)
    assert balanced(question(prefill=[slow], decode=[busy], limits=limits)) == UseInstance(D[0])
    assert balanced(question(decode=[load(D[0], tokens_per_s=500.0)], limits=limits)) == UseInstance(D[0])
    whole = dataclasses.replace(TASK, is_divisible=False)
    assert balanced(question(prefill=[slow], decode=[busy], cost=whole, limits=limits)) == Overloaded("ttft", 2)


def test_it_is_the_instance_that_gets_the_request_that_has_to_be_idle():
    limits, speed = Limits(ttft_s=5.0), {"tokens_per_s": 1000.0}
    task = dataclasses.replace(TASK, prompt_tokens=10000, prefixes=(1,), prefix_tokens=32)
    warm, idle = load(P[1], 9000, cached_tokens=32, **speed), load(P[0], **speed)
    decode = [load(D[0], 30, num_partners=2)]
    assert balanced(question(prefill=[idle, warm], decode=decode, cost=task, limits=limits)) == Overloaded("ttft", 5)
    lonely = [load(D[0], 30, num_partners=0, **speed)]
    assert balanced(question(prefill=[idle], decode=lonely, cost=task, limits=limits)) == Overloaded("ttft", 5)


def test_a_decode_instance_that_keeps_the_time_is_used_when_prefill_cannot():
    queue, fast = [load(P[0], 9000, tokens_per_s=1000.0)], [load(D[0], tokens_per_s=1000.0)]
    limits = Limits(ttft_s=4.0)
    assert balanced(question(prefill=queue, decode=fast, limits=limits)) == UseInstance(D[0])
    assert balanced(question(Role.PREFILL, prefill=queue, decode=fast, limits=limits)) == SkipPrefill("ttft")


def test_short_and_cached_prompts_stay_on_the_decode_instance():
    def asked(tokens, cached=0):
        task = dataclasses.replace(TASK, prompt_tokens=tokens)
        decode = [load(D[0], cached_tokens=cached)]
        limits = Limits(skip_below_tokens=64)
        return balanced(question(Role.PREFILL, [load(P[0])], decode, task, limits=limits))

    assert asked(63) == SkipPrefill("short_prompt", "tokens=63; threshold=64")
    assert asked(64) == UseInstance(P[0])
    assert asked(1000, cached=937) == SkipPrefill("cached_prompt", "tokens=1000; cached=937; threshold=64")
    assert asked(1000, cached=936) == UseInstance(P[0])


def test_the_threshold_is_what_decode_computes_during_a_handover():
    def threshold(p_speed, d_speed, handover_s):
        prefill, decode = [load(P[0], tokens_per_s=p_speed)], [load(D[0], tokens_per_s=d_speed)]
        asked = question(Role.PREFILL, prefill, decode, limits=Limits(skip_by_cost=True), handover_s=handover_s)
        return threshold_tokens(asked)

    assert threshold(2000.0, 4000.0, 0.05) == 200
    assert threshold(2000.0, 0.0, 0.05) == 100
    assert threshold(0.0, 0.0, 0.05) == 0
    assert threshold(2000.0, 4000.0, 0.0) == 0
    assert threshold(2000.0, 1e9, 1.0) == MAX_THRESHOLD_TOKENS


def test_policies_are_found_by_name():
    assert policy_named("balanced") is balanced
    assert policy_named("kvferry.router.policy.balanced:balanced") is module.balanced


@pytest.mark.parametrize(
    "name",
    [
        "unknown",
        "kvferry.router.policy.balanced:nothing",
        "no.such.module:f",
        ":f",
        "kvferry.router.policy.balanced:__name__",
        "shutil:copyfile",
    ],
)
def test_a_policy_that_cannot_be_found_is_said_to_be_so(name):
    with pytest.raises(ConfigurationError, match="polic"):
        policy_named(name)
