"""When an engine whose transfers fail says that it is not ready, and when it is let try again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.embedded.transfer.readiness import TELLING, Readiness
from kvferry.wire.messages import Reason

LOST = Reason.PEER_LOST
events = st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["succeeded", LOST, Reason.TRANSPORT])), max_size=40)


def failing(times: list[float]) -> Readiness:
    readiness = Readiness(num_failures=5, quiet_s=60.0)
    for now in times:
        readiness.failed(LOST, now)
    return readiness


def test_five_failures_in_a_row_within_a_minute() -> None:
    assert failing([0, 10, 20, 30]).problem(30) == ""
    assert failing([0, 10, 20, 30, 60]).problem(60) == "the last 5 transfers failed (peer_lost)"
    assert failing([0, 10, 20, 30, 61]).problem(61) == ""


def test_a_success_mends_it_at_once() -> None:
    readiness = failing([0, 1, 2, 3, 4])
    readiness.succeeded()
    assert readiness.problem(4) == ""
    for now in (5, 6, 7, 8):
        readiness.failed(LOST, now)
    assert readiness.problem(8) == ""
    readiness.failed(LOST, 9)
    assert readiness.problem(9) != ""


def test_after_a_quiet_minute_one_failure_is_enough() -> None:
    readiness = failing([0, 1, 2, 3, 4])
    assert readiness.problem(63.9) != ""
    assert readiness.problem(64) == ""
    readiness.failed(LOST, 100)
    assert readiness.problem(100) != ""
    assert readiness.problem(159.9) != ""
    assert readiness.problem(160) == ""
    readiness.succeeded()
    readiness.failed(LOST, 161)
    assert readiness.problem(161) == ""


@pytest.mark.parametrize("reason", sorted(set(Reason) - TELLING))
def test_what_a_client_can_cause_closes_nobody(reason: Reason) -> None:
    readiness = Readiness(num_failures=1, quiet_s=60.0)
    readiness.failed(reason, 0)
    assert readiness.problem(0) == ""


@given(events)
def test_it_is_blown_by_nothing_but_a_run_of_failures_and_always_comes_back(steps: list[tuple[int, str]]) -> None:
    readiness, now, run = Readiness(num_failures=5, quiet_s=60.0), 0, 0
    for wait_s, what in steps:
        now += wait_s
        if what == "succeeded":
            readiness.succeeded()
            run = 0
        else:
            readiness.failed(what, now)
            run += 1
        assert readiness.problem(now) == "" or run >= 5
        assert readiness.problem(now + 60) == ""
