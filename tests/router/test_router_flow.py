"""Playbooks of one request: the events that happen, the commands that must follow."""

from __future__ import annotations

import json

import pytest

from kvferry.errors import IllegalEventError
from kvferry.router.answers.engine_response import lost_cache
from kvferry.router.commands import (
    Cancel,
    Count,
    Counted,
    Cut,
    EndWithError,
    Forward,
    Pick,
    Refuse,
    Relay,
    Release,
    Send,
)
from kvferry.router.config import PrefillFallback
from kvferry.router.events import (
    TOO_LATE,
    Answered,
    Began,
    ClientGone,
    Ended,
    Failed,
    Opened,
    Path,
    Picked,
    Promised,
)
from kvferry.router.flow.attempts import MAX_GONE
from kvferry.router.flow.state_machine import TRANSITIONS, Flow, State
from kvferry.router.policy.records import Instance, NoInstance, Overloaded, Role, SkipPrefill
from kvferry.router.request.client_request import Endpoint, decode_body, parse_request, prefill_body

P0, P1, P2 = (Instance(f"http://p{i}", Role.PREFILL) for i in range(3))
D0, D1, D2 = (Instance(f"http://d{i}", Role.DECODE) for i in range(3))
RAW = b'{"model": "m", "prompt": "hello", "max_tokens": 20, "stream": true}'
REQUEST = parse_request(RAW, Endpoint.COMPLETIONS)
PREFILL_BODY = prefill_body(REQUEST)
PARAMS = b'{"remote_block_ids": [[1, 2]], "remote_num_tokens": 1e2}'
PREFILLED = Answered(200, b'{"id": "x", "kv_transfer_params": ' + PARAMS + b"}")
DIVIDED = decode_body(REQUEST, PARAMS)
RESET, BUSY = Failed("reset", ""), Answered(429, b"{}")
BROKEN = [(Failed("refused", ""), "refused"), (RESET, "reset"), (Failed("deadline", ""), "deadline")]


def retry(role, reason):
    return Count(Counted.RETRY, role, reason)


def fallback(reason):
    return Count(Counted.FALLBACK, Role.PREFILL, reason)


def failed(role, reason):
    return Count(Counted.UPSTREAM_ERROR, role, reason)


def pick(role, *excluded):
    return Pick(role, frozenset(excluded))


def pick_alone(*excluded):
    """A decode instance that computes prompts."""
    return Pick(Role.DECODE, frozenset(excluded), alone=True)


def play(flow: Flow, *steps) -> None:
    """Each step is an event and the commands that it must lead to."""
    for event, commands in steps:
        assert flow.handle(event) == commands


def to_prefilling(p=P0, d=D0):
    return (
        (Began(), [pick(Role.DECODE)]),
        (Picked(d), [pick(Role.PREFILL)]),
        (Picked(p), [Send(p, PREFILL_BODY)]),
    )


def to_second_prefill(event=RESET, reason="reset"):
    """The first one has failed so, and the other one is asked."""
    return (
        *to_prefilling(),
        (event, [failed(Role.PREFILL, reason), pick(Role.PREFILL, P0)]),
        (Picked(P1), [retry(Role.PREFILL, reason), Send(P1, PREFILL_BODY)]),
    )


def to_decoding():
    return (*to_prefilling(), (PREFILLED, [Send(D0, DIVIDED)]))


def to_decode_alone():
    """There is no prefill instance."""
    return (*to_prefilling()[:2], (NoInstance(), [fallback("no_prefill_instance"), Send(D0, RAW)]))


def to_second_decode(event=RESET, reason="reset"):
    """The first one has failed so, and a prefill for the other one is asked."""
    return (
        *to_decoding(),
        (event, [failed(Role.DECODE, reason), pick(Role.DECODE, D0)]),
        (Picked(D1), [retry(Role.DECODE, reason), pick(Role.PREFILL, D0)]),
        (Picked(P0), [Send(P0, PREFILL_BODY)]),
    )


def to_relaying(can_append=True):
    return (*to_decoding(), (Opened(can_append), [Relay()]))


def new_flow(raw: bytes = RAW) -> Flow:
    return Flow(parse_request(raw, Endpoint.COMPLETIONS))


def test_a_request_passes_prefill_and_decode():
    flow = new_flow()
    play(flow, *to_relaying(), (Ended(), []))
    assert flow.state is State.DONE
    assert flow.path is Path.DISAGGREGATED


def test_the_transfer_parameters_reach_decode_as_the_bytes_that_prefill_wrote():
    assert RAW[:-1] + b',"kv_transfer_params":' + PARAMS + b"}" == DIVIDED


def test_nothing_is_prefilled_without_a_decode_instance():
    flow = new_flow()
    play(flow, (Began(), [pick(Role.DECODE)]))
    [command] = flow.handle(NoInstance())
    assert isinstance(command, Refuse)
    assert (command.status, command.body["error"]["code"]) == (503, "no_decode_instance")
    assert flow.state is State.DONE


def test_without_a_prefill_instance_decode_serves_alone():
    flow = new_flow()
    play(flow, *to_decode_alone(), (Opened(True), [Relay()]), (Ended(), []))
    assert flow.path is Path.DECODE_ONLY


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        *BROKEN,
        (BUSY, "status_429"),
        (Answered(500, b"{}"), "status_500"),
        (Answered(503, b""), "status_503"),
        (Answered(302, b""), "status_302"),
        (Answered(200, b"no json"), "malformed"),
        (Answered(200, b"[]"), "malformed"),
    ],
)
def test_a_failed_prefill_is_tried_once_on_another_instance(event, reason):
    flow = new_flow()
    play(
        flow,
        *to_second_prefill(event, reason),
        (PREFILLED, [Send(D0, DIVIDED)]),
    )
    assert flow.path is Path.DISAGGREGATED


def test_after_two_failed_prefills_decode_serves_alone():
    flow = new_flow()
    play(
        flow,
        *to_second_prefill(),
        (
            Answered(500, b""),
            [failed(Role.PREFILL, "status_500"), fallback("prefill_failed"), Send(D0, RAW)],
        ),
    )
    assert flow.path is Path.DECODE_ONLY


def test_a_failed_prefill_with_no_other_instance_falls_back_without_a_retry():
    flow = new_flow()
    play(
        flow,
        *to_prefilling(),
        (Failed("refused", ""), [failed(Role.PREFILL, "refused"), pick(Role.PREFILL, P0)]),
        (NoInstance(), [fallback("prefill_failed"), Send(D0, RAW)]),
    )


@pytest.mark.parametrize("reason", ["refused", "unreachable", "connect_timeout"])
def test_instances_at_which_nobody_is_do_not_use_up_the_second_try(reason):
    """A rack is gone at once. But somebody must be found in the end, or the client be told."""
    flow, gone = new_flow(), Failed(reason, "")
    lost = [Instance(f"http://lost{i}", Role.PREFILL) for i in range(MAX_GONE)]
    play(flow, *to_prefilling(lost[0]))
    for number in range(1, MAX_GONE):
        play(
            flow,
            (gone, [failed(Role.PREFILL, reason), pick(Role.PREFILL, *lost[:number])]),
            (Picked(lost[number]), [retry(Role.PREFILL, reason), Send(lost[number], PREFILL_BODY)]),
        )
    play(
        flow,
        (gone, [failed(Role.PREFILL, reason), pick(Role.PREFILL, *lost)]),
        (Picked(P0), [retry(Role.PREFILL, reason), Send(P0, PREFILL_BODY)]),
        (RESET, [failed(Role.PREFILL, "reset"), pick(Role.PREFILL, *lost, P0)]),
        (Picked(P1), [retry(Role.PREFILL, "reset"), Send(P1, PREFILL_BODY)]),
        (gone, [failed(Role.PREFILL, reason), fallback("prefill_failed"), Send(D0, RAW)]),
    )


def test_an_engine_that_calls_another_one_unreachable_uses_up_the_second_try():
    """It has waited for that, and P has computed."""
    flow, unreachable = new_flow(), Answered(503, b'{"error": {"code": "unreachable"}}')
    play(flow, *to_prefilling(), (PREFILLED, [Send(D0, DIVIDED)]))
    assert pick(Role.DECODE, P0) in flow.handle(unreachable)
    play(flow, (Picked(D1), [retry(Role.DECODE, "unreachable"), pick(Role.PREFILL, P0)]))
    play(flow, (Picked(P1), [Send(P1, PREFILL_BODY)]), (PREFILLED, [Send(D1, DIVIDED)]))
    assert flow.handle(unreachable)[-1] == Forward()
    assert flow.state is State.DONE


def test_why_there_is_nobody_is_told_unless_a_prefill_has_failed():
    unknown = NoInstance("unknown_model")
    play(new_flow(), *to_prefilling()[:2], (unknown, [fallback("unknown_model"), Send(D0, RAW)]))
    gone = (Failed("refused", ""), [failed(Role.PREFILL, "refused"), pick(Role.PREFILL, P0)])
    play(new_flow(), *to_prefilling(), gone, (unknown, [fallback("prefill_failed"), Send(D0, RAW)]))
    flow = new_flow()
    play(flow, *to_prefilling(), (BUSY, [failed(Role.PREFILL, "status_429"), pick(Role.PREFILL, P0)]))
    assert flow.handle(unknown) == [Forward()]


def test_an_unknown_model_is_refused_where_decode_is_not_to_compute():
    flow = Flow(REQUEST, PrefillFallback.REFUSE)
    play(flow, *to_prefilling()[:2])
    counted, refusal = flow.handle(NoInstance("unknown_model"))
    assert (counted.reason, refusal.status) == ("unknown_model", 503)


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_after_a_4xx_of_prefill_decode_has_the_word(status):
    flow = new_flow()
    play(
        flow,
        *to_prefilling(),
        (Answered(status, b"{}"), [fallback("prefill_refused"), Send(D0, RAW)]),
        (Answered(status, b"{}"), [Forward()]),
    )
    assert flow.state is State.DONE


@pytest.mark.parametrize("body", [b"{}", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": [1]}'])
def test_a_prefill_without_parameters_leaves_decode_alone(body):
    flow = new_flow()
    play(flow, *to_prefilling(), (Answered(200, body), [fallback("no_kv_transfer_params"), Send(D0, RAW)]))
    assert flow.path is Path.DECODE_ONLY


@pytest.mark.parametrize(("event", "reason"), BROKEN[1:])
def test_a_failed_decode_is_tried_once_elsewhere_with_a_fresh_prefill(event, reason):
    flow = new_flow()
    fresh = b'{"lease": 2}'
    play(
        flow,
        *to_second_decode(event, reason),
        (Answered(200, b'{"kv_transfer_params":' + fresh + b"}"), [Send(D1, decode_body(REQUEST, fresh))]),
        (Opened(True), [Relay()]),
        (Ended(), []),
    )


def test_a_decode_retry_still_has_its_prefill_retry():
    flow = new_flow()
    play(
        flow,
        *to_second_decode(),
        (RESET, [failed(Role.PREFILL, "reset"), pick(Role.PREFILL, D0, P0)]),
        (NoInstance(), [fallback("prefill_failed"), Send(D1, RAW)]),
    )


def test_a_decode_only_request_is_tried_elsewhere_without_a_prefill():
    flow = new_flow()
    play(
        flow,
        *to_decode_alone(),
        (RESET, [failed(Role.DECODE, "reset"), pick_alone(D0)]),
        (Picked(D1), [retry(Role.DECODE, "reset"), Send(D1, RAW)]),
    )


@pytest.mark.parametrize(
    ("event", "status", "code"),
    [
        (Failed("reset", "its connection broke"), 502, "upstream_unavailable"),
        (Failed("deadline", "it took too long"), 504, "upstream_timeout"),
    ],
)
def test_a_failed_decode_with_no_other_instance_is_told_to_the_client(event, status, code):
    flow = new_flow()
    play(flow, *to_decoding(), (event, [failed(Role.DECODE, event.reason), pick(Role.DECODE, D0)]))
    [refusal] = flow.handle(NoInstance())
    assert isinstance(refusal, Refuse)
    assert (refusal.status, refusal.body["error"]["code"]) == (status, code)
    assert event.detail in refusal.body["error"]["message"]


def test_a_5xx_of_the_only_decode_instance_goes_to_the_client_as_it_is():
    flow = new_flow()
    play(
        flow,
        *to_decoding(),
        (Answered(507, b""), [failed(Role.DECODE, "status_507"), pick(Role.DECODE, D0, P0)]),
        (NoInstance(), [pick(Role.DECODE, P0)]),
        (NoInstance(), [Forward()]),
    )


def test_a_decode_that_fails_with_anothers_cache_and_no_word_of_that_is_replaced_with_its_prefill():
    flow = new_flow()
    play(
        flow,
        *to_decoding(),
        (Answered(500, b"{}"), [failed(Role.DECODE, "status_500"), pick(Role.DECODE, D0, P0)]),
        (Picked(D1), [retry(Role.DECODE, "status_500"), pick(Role.PREFILL, D0, P0)]),
        (Picked(P1), [Send(P1, PREFILL_BODY)]),
        (PREFILLED, [Send(D1, DIVIDED)]),
        (Opened(True), [Relay()]),
        (Ended(), []),
    )


def test_the_only_decode_that_fails_with_anothers_cache_tries_without_that():
    flow = new_flow()
    play(
        flow,
        *to_decoding(),
        (Answered(500, b"{}"), [failed(Role.DECODE, "status_500"), pick(Role.DECODE, D0, P0)]),
        (NoInstance(), [pick(Role.DECODE, P0)]),
        (Picked(D0), [retry(Role.DECODE, "status_500"), pick(Role.PREFILL, P0)]),
        # No P has failed: an alarm would send its operator to the wrong machine.
        (NoInstance(), [fallback("pair_failed"), Send(D0, RAW)]),
        (Answered(500, b""), [failed(Role.DECODE, "status_500"), Forward()]),
    )


def test_a_second_failed_decode_ends_the_request():
    flow = new_flow()
    play(
        flow,
        *to_second_decode(),
        (PREFILLED, [Send(D1, DIVIDED)]),
        (Answered(500, b""), [failed(Role.DECODE, "status_500"), Forward()]),
    )
    assert flow.state is State.DONE


@pytest.mark.parametrize("status", [400, 404, 429])
def test_a_4xx_of_decode_goes_to_the_client(status):
    flow = new_flow()
    play(flow, *to_decoding(), (Answered(status, b""), [Forward()]))


def test_after_the_first_byte_nothing_is_tried_again():
    flow = new_flow()
    play(flow, *to_relaying())
    count, last = flow.handle(Failed("reset", "its connection broke"))
    assert count == failed(Role.DECODE, "reset")
    assert isinstance(last, EndWithError)
    assert "its connection broke" in last.message
    assert flow.state is State.DONE


def test_a_broken_answer_that_takes_no_frame_is_cut():
    flow = new_flow()
    play(flow, *to_relaying(can_append=False), (Failed("stall", ""), [failed(Role.DECODE, "stall"), Cut()]))


@pytest.mark.parametrize(
    ("reason", "counts", "status", "code"),
    [
        ("stall", [failed(Role.DECODE, "stall")], 502, "upstream_unavailable"),
        (TOO_LATE, [], 504, "deadline_exceeded"),
    ],
)
def test_a_broken_answer_that_is_withheld_is_refused(reason, counts, status, code):
    flow = new_flow()
    play(flow, *to_relaying(can_append=False))
    *found, refusal = flow.handle(Failed(reason, "why", is_withheld=True))
    assert found == counts
    assert (refusal.status, refusal.body["error"]["code"]) == (status, code)


def test_a_prefill_for_which_the_client_has_no_more_time_is_the_end():
    flow = new_flow()
    play(flow, *to_prefilling())
    [refusal] = flow.handle(Failed(TOO_LATE, "the time is over"))
    assert (refusal.status, refusal.body["error"]["code"]) == (504, "deadline_exceeded")
    assert "the time is over" in refusal.body["error"]["message"]


def test_a_decode_for_which_the_client_has_no_more_time_releases_the_cache_and_is_the_end():
    flow = new_flow()
    params = b'{"kvferry": {"lease_id": "l"}}'
    play(
        flow,
        *to_prefilling(),
        (Answered(200, b'{"kv_transfer_params":' + params + b"}"), [Send(D0, decode_body(REQUEST, params))]),
    )
    release, refusal = flow.handle(Failed(TOO_LATE, "the time is over"))
    assert release == Release(P0, b'{"kv_transfer_params": ' + params + b"}", TOO_LATE)
    assert (refusal.status, refusal.body["error"]["code"]) == (504, "deadline_exceeded")


def test_an_answer_for_which_the_client_has_no_more_time_is_broken_off_without_blame():
    flow = new_flow()
    play(flow, *to_relaying())
    [last] = flow.handle(Failed(TOO_LATE, "the time is over"))
    assert isinstance(last, EndWithError)
    assert last.code == "deadline_exceeded"


@pytest.mark.parametrize("way", [to_prefilling, to_decoding, to_relaying])
def test_a_client_that_leaves_ends_the_request_in_flight(way):
    flow = new_flow()
    play(flow, *way(), (ClientGone(), [Cancel()]))
    assert flow.state is State.DONE


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (b'"n": 2', "several_sequences"),
        (b'"best_of": 3', "several_sequences"),
        (b'"use_beam_search": true', "several_sequences"),
        (b'"prompt": ["a", "b"]', "several_sequences"),
        (b'"prompt": [[1, 2], [3]]', "several_sequences"),
        (b'"prompt_logprobs": 1', "prompt_logprobs"),
        (b'"echo": true, "logprobs": 2', "prompt_logprobs"),
    ],
)
def test_what_one_prefill_cannot_stand_for_is_served_by_decode_alone(extra, reason):
    raw = b'{"prompt": "a", ' + extra + b"}"
    flow = new_flow(raw)
    play(flow, (Began(), [pick_alone()]), (Picked(D0), [fallback(reason), Send(D0, raw)]))
    assert flow.path is Path.DECODE_ONLY


@pytest.mark.parametrize(
    "extra", [b'"n": 1', b'"n": null', b'"prompt": ["a"]', b'"prompt": [1, 2, 3]', b'"echo": true']
)
def test_one_sequence_is_divided(extra):
    flow = new_flow(b'{"prompt": "a", ' + extra + b"}")
    play(flow, (Began(), [pick(Role.DECODE)]), (Picked(D0), [pick(Role.PREFILL)]))


EVENTS = {
    Began: Began(),
    Picked: Picked(P0),
    NoInstance: NoInstance(),
    Answered: PREFILLED,
    Opened: Opened(True),
    Ended: Ended(),
    Failed: RESET,
    ClientGone: ClientGone(),
}
WAYS = {
    State.NEW: (),
    State.PICKING_DECODE: to_prefilling()[:1],
    State.PICKING_PREFILL: to_prefilling()[:2],
    State.PREFILLING: to_prefilling(),
    State.DECODING: to_decoding(),
    State.RELAYING: to_relaying(),
    State.DONE: (*to_relaying(), (Ended(), [])),
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", EVENTS)
def test_the_table_is_the_whole_truth(state, kind):
    flow = new_flow()
    play(flow, *WAYS[state])
    assert flow.state is state
    if (state, kind) in TRANSITIONS:
        flow.handle(EVENTS[kind])
        assert flow.state in TRANSITIONS[state, kind][1]
        return
    with pytest.raises(IllegalEventError) as caught:
        flow.handle(EVENTS[kind])
    assert caught.value.found.endswith(f"{kind.__name__} while {state}")
    assert caught.value.found.count("while") == len(WAYS[state]) + 1


def test_the_prefill_body_asks_for_one_token_and_no_stream():
    request = parse_request(
        b'{"messages": [{"role": "user", "content": "h\\u00e9"}], "max_tokens": 50, "max_completion_tokens": 60,'
        b' "stream": true, "stream_options": {"include_usage": true}, "min_tokens": 3, "temperature": 1.10}',
        Endpoint.CHAT,
    )
    raw = prefill_body(request)
    assert b'"temperature":1.10' in raw
    assert json.loads(raw) == {
        "messages": [{"role": "user", "content": "hé"}],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "temperature": 1.1,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    assert b"max_completion_tokens" not in PREFILL_BODY


def test_where_every_prefill_has_too_much_to_do_the_client_hears_it():
    flow = new_flow()
    play(flow, *to_second_prefill(BUSY, "status_429")[:-1], (NoInstance(), [Forward()]))
    assert flow.state is State.DONE
    flow = new_flow()
    play(flow, *to_second_prefill(BUSY, "status_429"), (BUSY, [Forward()]))


def test_a_busy_prefill_and_a_broken_one_leave_decode_alone():
    flow = new_flow()
    then = [failed(Role.PREFILL, "reset"), fallback("prefill_failed"), Send(D0, RAW)]
    play(flow, *to_second_prefill(BUSY, "status_429"), (RESET, then))


def to_broken_decode_behind_a_busy_prefill(computes):
    """A decode instance fails, and no prefill instance is left for the next one: the first one was busy."""
    return (
        *to_second_prefill(BUSY, "status_429"),
        (PREFILLED, [Send(D0, DIVIDED)]),
        (RESET, [failed(Role.DECODE, "reset"), pick(Role.DECODE, P0, D0)]),
        (Picked(D1, computes=computes), [retry(Role.DECODE, "reset"), pick(Role.PREFILL, P0, D0)]),
    )


def test_a_busy_prefill_is_a_reason_for_decode_alone():
    flow = new_flow()
    then = [fallback("prefill_failed"), Send(D1, RAW)]
    play(flow, *to_broken_decode_behind_a_busy_prefill(computes=True), (NoInstance(), then))
    assert flow.reason == "prefill_failed"


def test_behind_a_busy_prefill_no_decode_that_computes_nothing_is_picked_again_and_again():
    flow = new_flow()
    play(
        flow,
        *to_broken_decode_behind_a_busy_prefill(computes=False),
        (NoInstance(), [pick_alone(P0, D0)]),
    )
    [refusal] = flow.handle(Picked(D1, computes=False))
    assert isinstance(refusal, Refuse)
    assert flow.state is State.DONE


@pytest.mark.parametrize(
    "to_decode",
    [
        (Promised(PARAMS), [Send(D0, DIVIDED)]),
        (PREFILLED, [Send(D0, DIVIDED)]),
    ],
    ids=["early", "whole"],
)
def test_a_prefill_that_was_busy_is_forgotten_when_another_one_has_computed(to_decode):
    """Decode's own error is not told where decode alone would answer."""
    flow = new_flow()
    play(
        flow,
        *to_second_prefill(BUSY, "status_429"),
        to_decode,
        (Answered(500, b"{}"), [failed(Role.DECODE, "status_500"), pick(Role.DECODE, D0, P0, P1)]),
        (NoInstance(), [pick(Role.DECODE, P0, P1)]),
        (Picked(D0), [retry(Role.DECODE, "status_500"), pick(Role.PREFILL, P0, P1)]),
        (NoInstance(), [fallback("pair_failed"), Send(D0, RAW)]),
    )


def test_a_policy_that_skips_prefill_without_a_reason_has_one():
    flow = new_flow()
    skipped = (SkipPrefill("", "its own words"), [fallback("policy"), Send(D0, RAW)])
    play(flow, *to_prefilling()[:2], skipped)
    assert flow.reason == "policy; its own words"


def test_a_policy_that_skips_prefill_without_a_reason_asks_no_decode_again_and_again():
    flow = new_flow()
    picking = (Picked(D0, computes=False), [pick(Role.PREFILL)])
    play(flow, (Began(), [pick(Role.DECODE)]), picking, (SkipPrefill(""), [pick_alone()]))
    assert isinstance(flow.handle(Picked(D0, computes=False))[-1], Refuse)


def test_a_policy_may_skip_prefill_and_the_client_is_told_why():
    flow = new_flow()
    skipped = SkipPrefill("short_prompt", "tokens=3; threshold=9")
    picking = (Picked(D0), [pick(Role.PREFILL)])
    play(flow, (Began(), [pick(Role.DECODE)]), picking, (skipped, [fallback("short_prompt"), Send(D0, RAW)]))
    assert flow.path is Path.DECODE_ONLY
    assert flow.reason == "short_prompt; tokens=3; threshold=9"


@pytest.mark.parametrize("steps", [1, 2], ids=["decode", "prefill"])
def test_a_policy_may_turn_a_request_away(steps):
    flow = new_flow()
    play(flow, *to_prefilling()[:steps])
    counted, refusal = flow.handle(Overloaded("ttft", 7))
    assert counted == Count(Counted.TURNED_AWAY, Role.DECODE, "ttft")
    assert (refusal.status, refusal.retry_after_s) == (429, 7)
    assert refusal.body["error"]["reason"] == "ttft"
    assert flow.state is State.DONE


LOST = Answered(502, b'{"error": {"message": "x", "code": "peer_lost"}}')


def to_lost_cache():
    """It has not arrived, and is to be computed by another prefill for the same decode instance."""
    return (
        *to_decoding(),
        (LOST, [failed(Role.DECODE, "peer_lost"), pick(Role.DECODE, P0)]),
        (Picked(D0), [retry(Role.DECODE, "peer_lost"), pick(Role.PREFILL, P0)]),
    )


def test_a_cache_that_did_not_arrive_is_computed_anew_elsewhere_for_the_same_decode_instance():
    flow = new_flow()
    play(
        flow,
        *to_lost_cache(),
        (Picked(P1), [Send(P1, PREFILL_BODY)]),
        (PREFILLED, [Send(D0, DIVIDED)]),
    )


@pytest.mark.parametrize("reason", ["wrong_prompt", "unnamed_prompt"])
def test_a_prompt_that_was_read_differently_is_computed_by_the_decode_instance_alone(reason):
    """A second prefill instance would read the same as the first one."""
    flow = new_flow()
    differs = Answered(502, b'{"error": {"message": "x", "code": "%s"}}' % reason.encode())
    play(
        flow,
        *to_decoding(),
        (differs, [failed(Role.DECODE, reason), pick_alone(P0)]),
        (Picked(D0), [fallback(reason), Send(D0, RAW)]),
    )
    assert flow.reason == reason


def test_a_cache_that_did_not_arrive_and_no_other_prefill_leaves_decode_alone():
    flow = new_flow()
    play(
        flow,
        *to_lost_cache(),
        (NoInstance(), [fallback("prefill_failed"), Send(D0, RAW)]),
    )


def test_a_cache_that_is_lost_twice_ends_the_request():
    flow = new_flow()
    play(
        flow,
        *to_lost_cache(),
        (Picked(P1), [Send(P1, PREFILL_BODY)]),
        (PREFILLED, [Send(D0, DIVIDED)]),
        (LOST, [failed(Role.DECODE, "peer_lost"), Forward()]),
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": {"code": "digest"}}', "digest"),
        (b'{"error": {"code": "internal_error"}}', ""),
        (b'{"error": {"code": 500}}', ""),
        (b'{"error": {}}', ""),
        (b'{"error": "x"}', ""),
        (b"no json", ""),
        (b"[" * 100_000, ""),
    ],
)
def test_only_the_reason_of_a_transfer_is_one(body, reason):
    assert lost_cache(body) == reason
