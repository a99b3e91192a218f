"""The check of a restart, with answers that a fleet may give; tests/e2e has real ones."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kvferry.cli.qualify import restart
from kvferry.errors import RequestError
from kvferry.qualify.outcome import Result
from kvferry.testing.output_check import Answer

MOVED = Answer("x", (1, 2), 290, {"tokens_received": 289}, {"x-kvferry-path": "disaggregated"})
ALONE = Answer("x", (1, 2), 290, {}, {"x-kvferry-path": "decode-only"})
WRONG = Answer("y", (1, 3), 290, {"tokens_received": 289}, {"x-kvferry-path": "disaggregated"})


@contextmanager
def fleet():
    """With a process that may be killed."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield SimpleNamespace(
            model="tiny", url="http://nowhere", pids={"prefill-0": process.pid}, restart_and_wait=lambda: None
        )
    finally:
        process.kill()
        # It was killed before, without mercy.
        assert process.wait(30) == -9


def checked(monkeypatch, *answers):
    left = iter(answers)
    monkeypatch.setattr(restart, "ask", lambda *_, **__: next(left))
    with fleet() as found:
        return restart.check(found)


def test_equal_answers_and_caches_that_are_moved_again_pass(monkeypatch):
    assert checked(monkeypatch, MOVED, ALONE, ALONE, MOVED, MOVED).result is Result.PASSED
    assert checked(monkeypatch, MOVED, ALONE, *[ALONE] * 59, MOVED, MOVED).result is Result.PASSED


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ((ALONE,), "nothing was moved to begin with"),
        ((MOVED, WRONG, MOVED, MOVED, MOVED), "other tokens while it was dead"),
        ((MOVED, ALONE, ALONE, MOVED, WRONG), "other tokens after its restart"),
        ((MOVED, *[ALONE] * 62), "nothing is moved from it"),
        ((MOVED, ALONE, MOVED, ALONE), "nothing is moved from it"),
    ],
)
def test_what_a_restart_must_not_do_is_a_failure(monkeypatch, answers, words):
    found = checked(monkeypatch, *answers)
    assert (found.result, words in found.words) == (Result.FAILED, True), found.words


def test_an_answer_that_does_not_come_is_an_error_of_the_check(monkeypatch):
    def gone(*_, **__):
        raise RequestError("no answer from http://nowhere")

    monkeypatch.setattr(restart, "ask", gone)
    with fleet() as found, pytest.raises(RequestError, match="no answer"):
        restart.check(found)
