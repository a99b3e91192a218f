"""Whether requests are answered, and rightly, while the prefill engine is dead and after it has come back."""

from __future__ import annotations

import os
import select
import signal
from typing import Final

from kvferry.cli import environment
from kvferry.cli.qualify.engines import fleet_on
from kvferry.cli.up.fleet import Fleet
from kvferry.errors import TransportError
from kvferry.qualify.outcome import Outcome, failed, passed
from kvferry.testing.output_check import Answer, Question, ask

NAME: Final = "restart"
PROMPT: Final = list(range(10, 300))
NUM_TOKENS: Final = 16
KILLED: Final = "prefill-0"
MOST_ASKED: Final = 60
KILL_S: Final = 30.0


def run(kind: str) -> Outcome:
    """Check a fleet on this kind of device. Raises what `fleet_on` and `check` do."""
    with fleet_on(kind) as fleet:
        return check(fleet)


def check(fleet: Fleet) -> Outcome:
    """Kill the prefill engine without warning, ask, start it again and ask. Raises RequestError when an answer does not
    come."""
    before = _asked(fleet, "before")
    if not _is_moved(before):
        return failed(NAME, "nothing was moved to begin with: the decode engine computed the prompt")
    _kill(fleet.pids[KILLED])
    while_dead = _asked(fleet, "dead")
    fleet.restart_and_wait()
    again: list[Answer] = []
    # The router has to hear of it, which takes a moment.
    while not again or (not _is_moved(again[-1]) and len(again) < MOST_ASKED):
        again.append(_asked(fleet, f"again-{len(again)}"))
    again.append(_asked(fleet, "at-last"))
    if while_dead.token_ids != before.token_ids:
        return failed(NAME, "other tokens while it was dead")
    if any(each.token_ids != before.token_ids for each in again):
        return failed(NAME, "other tokens after its restart")
    if not _is_moved(again[-1]):
        return failed(NAME, "the prefill engine is back, but nothing is moved from it")
    return passed(NAME, "kill -9 of the prefill engine: equal tokens while it was dead, and moved again afterwards")


def _kill(pid: int) -> None:
    """Kill a process and wait for its end. Raises TransportError when the system does not end it."""
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        if not select.select([process], [], [], KILL_S)[0]:
            raise TransportError("the system does not end a process that was killed", expected=f"within {KILL_S:g} s")
    finally:
        os.close(process)


def _asked(fleet: Fleet, salt: str) -> Answer:
    question = Question(fleet.model, PROMPT, NUM_TOKENS, f"kvferry-{salt}")
    return ask(fleet.url, question, api_keys=environment.api_keys())


def _is_moved(answer: Answer) -> bool:
    return bool(answer.report.get("tokens_received"))
