"""One request on its way through a prefill and a decode instance, without I/O: events in, commands out.

The last command of a batch is the one that is answered by the next event. Rules that the table cannot show:

* P gets one retry on another P per request, then the request is served by D alone;
* D gets one retry on another D, only before its first byte, and with a fresh prefill: the cache of the first
  one may be half read and its lease spent;
* a 4xx is about the request, so nothing is tried again. One of P may only be about the leg that we made of it (a tool
  call does not fit one token): D is asked by itself, so that the client hears what an engine alone would say. A P that
  has too much to do (429) is replaced by another one if there is one: D alone would be worse off still;
* a D that answers that the cache did not arrive is not at fault alone: it stays, and P is another one, or none. One
  that fails without a word about that may be at fault or not: both are others, or D alone tries again;
* a computed cache that D will not answer from is released: P would keep it until its lease runs out;
* a P that is asked early promises the cache before it is computed. D is asked at once and answers when it has come. How
  P's own leg ends is no event: should it fail, D's leg has failed for want of a cache;
* when the time is over that the client has given the request, nothing is tried again and nobody is to blame;
* where D shall not compute prompts in place of P, what D alone would have served is refused. A request that cannot be
  divided is still D's alone: no P could help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvferry.errors import IllegalEventError
from kvferry.http.openai import SERVER_ERROR, error_body
from kvferry.router.events import (
    PREFILL_LOST,
    TOO_LATE,
    Answered,
    Began,
    Cancel,
    ClientGone,
    Command,
    Count,
    Counted,
    Cut,
    Ended,
    EndWithError,
    Event,
    Failed,
    Forward,
    Opened,
    Path,
    Pick,
    Picked,
    Promised,
    Refuse,
    Relay,
    Release,
    Send,
)
from kvferry.router.flow.engine_response import can_be_released, kept_cache, lost_cache
from kvferry.router.flow.fallback import is_wanted, refusal
from kvferry.router.policy.records import Instance, NoInstance, Overloaded, Role, SkipPrefill
from kvferry.router.policy.settings import PrefillFallback
from kvferry.router.request.client_request import ClientRequest, decode_body, prefill_body
from kvferry.wire.messages import Reason


class State(StrEnum):
    """What the flow waits for."""

    NEW = "new"
    PICKING_DECODE = "picking decode"
    PICKING_PREFILL = "picking prefill"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    RELAYING = "relaying"
    DONE = "done"


class Flow:
    """The state of one request. `path` is how it is being served so far, `reason` why not by two instances."""

    def __init__(self, request: ClientRequest, fallback: PrefillFallback = PrefillFallback.DECODE) -> None:
        self.state = State.NEW
        self.path = Path.DISAGGREGATED
        self.reason = ""
        self._request = request
        self._refuses = fallback is PrefillFallback.REFUSE
        self._history: list[str] = []
        self._picked: dict[Role, Instance] = {}
        self._failed: frozenset[Instance] = frozenset()
        self._retried: set[Role] = set()
        # Why the next leg of a role is a second try; taken out when that leg starts.
        self._second_try: dict[Role, str] = {}
        # What the client gets when no decode instance is left.
        nobody = "no decode instance is healthy; hint: the router's log and its /kvferry/members say why"
        self._last_word: Command = _refusal(503, "no_decode_instance", nobody, "no_decode_instance")
        self._can_append = False
        # A P had too much to do: the client hears it if there is no other one.
        self._overloaded = False
        # A D that failed with another's cache: either may be at fault. It is chosen again if it is the only one.
        self._suspected: frozenset[Instance] = frozenset()
        # What P keeps for D, until D answers.
        self._kept: tuple[bytes, ...] = ()

    def handle(self, event: Event) -> list[Command]:
        """Take one event. Raises IllegalEventError, with the history, when the state does not allow it."""
        before = self.state
        self._history.append(f"{type(event).__name__} while {before}")
        transition = TRANSITIONS.get((before, type(event)))
        if transition is None:
            raise self._illegal("an event that the state does not allow")
        commands = transition.action(self, event)
        if self.state not in transition.targets:
            raise self._illegal(f"a transition to {self.state} that the table does not have")
        return commands

    def begin(self, event: Began) -> list[Command]:
        """Pick D before P: a prefill that nobody can decode is wasted."""
        reason = self._request.undivided_reason
        counts = self._fall_back(reason) if reason else []
        return [*counts, *self._pick(Role.DECODE)]

    def take_decode(self, event: Picked) -> list[Command]:
        self._picked[Role.DECODE] = event.instance
        counts = self._count_retry(Role.DECODE)
        if self.path is Path.DECODE_ONLY:
            return [*counts, *self._send_decode(self._request.raw)]
        return [*counts, *self._pick(Role.PREFILL)]

    def give_up(self, event: NoInstance) -> list[Command]:
        if self._suspected:
            self._failed, self._suspected = self._failed - self._suspected, frozenset()
            return self._pick(Role.DECODE)
        return self._finish(self._last_word)

    def turn_away(self, event: Overloaded) -> list[Command]:
        words = f"the service is overloaded; hint: retry in {event.retry_after_s} s"
        body = error_body(words, "rate_limit_error", "overloaded", None)
        body["error"]["reason"] = event.reason
        counts = [Count(Counted.TURNED_AWAY, Role.DECODE, event.reason)]
        return [*counts, *self._finish(Refuse(429, body, event.retry_after_s))]

    def take_prefill(self, event: Picked) -> list[Command]:
        self.state = State.PREFILLING
        self._picked[Role.PREFILL] = event.instance
        return [*self._count_retry(Role.PREFILL), Send(event.instance, prefill_body(self._request, event.is_early))]

    def do_without_prefill(self, event: NoInstance) -> list[Command]:
        if self._overloaded:
            return self._finish(Forward())
        failed = any(instance.role is Role.PREFILL for instance in self._failed)
        return self._decode_alone("prefill_failed" if failed else "no_prefill_instance")

    def skip_prefill(self, event: SkipPrefill) -> list[Command]:
        if self._refuses and not is_wanted(event.reason):
            return self._refuse(event.reason)
        return [*self._fall_back(event.reason, event.detail), *self._send_decode(self._request.raw)]

    def take_prefill_answer(self, event: Answered) -> list[Command]:
        self._overloaded = event.status == 429
        if self._overloaded and self._may_try_again(Role.PREFILL, "status_429"):
            return [Count(Counted.UPSTREAM_ERROR, Role.PREFILL, "status_429"), *self._pick(Role.PREFILL)]
        if self._overloaded:
            return self._finish(Forward())
        if 400 <= event.status < 500:
            # P's word is all there is when D is not to be asked; most likely it is about the request.
            return self._finish(Forward()) if self._refuses else self._decode_alone("prefill_refused")
        if not 200 <= event.status < 300:
            return self._lose_prefill(f"status_{event.status}")
        transfer = kept_cache(event.body)
        if not transfer:
            return self._lose_prefill("malformed")
        if not transfer.startswith(b"{"):
            return self._decode_alone("no_kv_transfer_params")
        self._kept = (transfer,)
        return self._send_decode(decode_body(self._request, transfer))

    def take_promise(self, event: Promised) -> list[Command]:
        self._kept = (event.transfer,)
        return self._send_decode(decode_body(self._request, event.transfer))

    def lose_prefill(self, event: Failed) -> list[Command]:
        if event.reason == TOO_LATE:
            return self._finish(_too_late(event))
        return self._lose_prefill(event.reason)

    def take_decode_answer(self, event: Answered) -> list[Command]:
        if event.status < 500:
            return [*self._release("decode_refused"), *self._finish(Forward())]
        if self.path is not Path.DISAGGREGATED:
            return self._lose_decode(f"status_{event.status}", Forward())
        reason = lost_cache(event.body)
        if reason in (Reason.WRONG_PROMPT, Reason.UNNAMED_PROMPT):
            return self._compute_without(reason, reason, Forward())
        if reason:
            return self._lose_decode(reason, Forward(), self._picked[Role.PREFILL])
        self._failed |= {self._picked[Role.PREFILL]}
        self._suspected = frozenset((self._picked[Role.DECODE],))
        return self._lose_decode(f"status_{event.status}", Forward())

    def lose_decode(self, event: Failed) -> list[Command]:
        if event.reason == TOO_LATE:
            return [*self._release(TOO_LATE), *self._finish(_too_late(event))]
        if event.reason == PREFILL_LOST:
            return self._lose_promise(event)
        late = event.reason == "deadline"
        status, code = (504, "upstream_timeout") if late else (502, "upstream_unavailable")
        message = f"the decode instance did not answer: {event.detail}"
        return self._lose_decode(event.reason, _refusal(status, code, message, event.reason))

    def relay(self, event: Opened) -> list[Command]:
        self.state = State.RELAYING
        self._kept = ()
        self._can_append = event.can_append
        return [Relay()]

    def end(self, event: Ended) -> list[Command]:
        self.state = State.DONE
        return []

    def break_off(self, event: Failed) -> list[Command]:
        message = f"the answer was interrupted: {event.detail}"
        is_ours = event.reason == TOO_LATE
        code = "deadline_exceeded" if is_ours else "upstream_broke_off"
        last = EndWithError(message, code, event.reason) if self._can_append else Cut()
        counts = [] if is_ours else [Count(Counted.UPSTREAM_ERROR, Role.DECODE, event.reason)]
        return [*counts, *self._finish(last)]

    def abandon(self, event: ClientGone) -> list[Command]:
        if event.last_word:
            self._kept = (kept_cache(event.last_word),)
        return [*self._release("client_left"), *self._finish(Cancel())]

    def _pick(self, role: Role) -> list[Command]:
        self.state = State.PICKING_DECODE if role is Role.DECODE else State.PICKING_PREFILL
        return [Pick(role, self._failed)]

    def _send_decode(self, body: bytes) -> list[Command]:
        self.state = State.DECODING
        return [Send(self._picked[Role.DECODE], body)]

    def _finish(self, last: Command) -> list[Command]:
        self.state = State.DONE
        return [last]

    def _fall_back(self, reason: str, detail: str = "") -> list[Command]:
        self.path = Path.DECODE_ONLY
        self.reason = f"{reason}; {detail}" if detail else reason
        return [Count(Counted.FALLBACK, Role.PREFILL, reason)]

    def _decode_alone(self, reason: str) -> list[Command]:
        if self._refuses:
            return self._refuse(reason)
        return [*self._fall_back(reason), *self._send_decode(self._request.raw)]

    def _refuse(self, reason: str) -> list[Command]:
        self.reason = reason
        return [Count(Counted.REFUSED, Role.PREFILL, reason), *self._finish(refusal(reason))]

    def _lose_prefill(self, reason: str) -> list[Command]:
        again = self._may_try_again(Role.PREFILL, reason)
        then = self._pick(Role.PREFILL) if again else self._decode_alone("prefill_failed")
        return [Count(Counted.UPSTREAM_ERROR, Role.PREFILL, reason), *then]

    def _lose_decode(self, reason: str, last_word: Command, culprit: Instance | None = None) -> list[Command]:
        """`culprit` is who must not be chosen again, if it is not the decode instance."""
        self._last_word = last_word
        releases = self._release("decode_failed")
        again = self._may_try_again(Role.DECODE, reason, culprit)
        then = self._pick(Role.DECODE) if again else self._finish(last_word)
        return [Count(Counted.UPSTREAM_ERROR, Role.DECODE, reason), *releases, *then]

    def _lose_promise(self, event: Failed) -> list[Command]:
        """P has failed after its promise, and D's leg was ended by us: D can always do it alone."""
        last_word = _refusal(502, "prefill_failed", f"the cache did not arrive: {event.detail}", event.reason)
        if Role.DECODE in self._retried:
            return self._compute_without(event.reason, "prefill_failed", last_word)
        return self._lose_decode(event.reason, last_word, self._picked[Role.PREFILL])

    def _compute_without(self, reason: str, fallback: str, last_word: Command) -> list[Command]:
        """No P is of use: D cannot compare its own tokens with P's, or they differ; or two of P have failed."""
        self._last_word = last_word
        self._failed |= {self._picked[Role.PREFILL]}
        counts = [Count(Counted.UPSTREAM_ERROR, Role.DECODE, reason), *self._release("decode_failed")]
        if self._refuses:
            return [*counts, *self._refuse(fallback)]
        return [*counts, *self._fall_back(fallback), *self._pick(Role.DECODE)]

    def _release(self, reason: str) -> list[Command]:
        kept, self._kept = self._kept, ()
        return [
            Release(self._picked[Role.PREFILL], b'{"kv_transfer_params": ' + transfer + b"}", reason)
            for transfer in kept
            if can_be_released(transfer)
        ]

    def _may_try_again(self, role: Role, reason: str, culprit: Instance | None = None) -> bool:
        self._failed |= {culprit or self._picked[role]}
        if role in self._retried:
            return False
        self._retried.add(role)
        self._second_try[role] = reason
        return True

    def _count_retry(self, role: Role) -> list[Command]:
        reason = self._second_try.pop(role, "")
        return [Count(Counted.RETRY, role, reason)] if reason else []

    def _illegal(self, what: str) -> IllegalEventError:
        return IllegalEventError(f"the flow of a request met {what}", found="; ".join(self._history))


@dataclass(frozen=True, slots=True)
class Transition:
    """What an event does in a state, and the states that this may lead to."""

    action: Callable[[Flow, Any], list[Command]]
    targets: frozenset[State]


def _to(action: Callable[[Flow, Any], list[Command]], *targets: State) -> Transition:
    return Transition(action, frozenset(targets))


PICKED = (State.PICKING_PREFILL, State.DECODING)
AFTER_LOST_PREFILL = (State.PICKING_PREFILL, State.DECODING)
AFTER_LOST_DECODE = (State.PICKING_DECODE, State.DONE)

TRANSITIONS: Mapping[tuple[State, type[Event]], Transition] = {
    (State.NEW, Began): _to(Flow.begin, State.PICKING_DECODE),
    (State.PICKING_DECODE, Picked): _to(Flow.take_decode, *PICKED),
    (State.PICKING_DECODE, NoInstance): _to(Flow.give_up, State.PICKING_DECODE, State.DONE),
    (State.PICKING_DECODE, Overloaded): _to(Flow.turn_away, State.DONE),
    (State.PICKING_PREFILL, Picked): _to(Flow.take_prefill, State.PREFILLING),
    (State.PICKING_PREFILL, NoInstance): _to(Flow.do_without_prefill, State.DECODING, State.DONE),
    (State.PICKING_PREFILL, SkipPrefill): _to(Flow.skip_prefill, State.DECODING, State.DONE),
    (State.PICKING_PREFILL, Overloaded): _to(Flow.turn_away, State.DONE),
    (State.PREFILLING, Answered): _to(Flow.take_prefill_answer, *AFTER_LOST_PREFILL, State.DONE),
    (State.PREFILLING, Promised): _to(Flow.take_promise, State.DECODING),
    (State.PREFILLING, Failed): _to(Flow.lose_prefill, *AFTER_LOST_PREFILL, State.DONE),
    (State.PREFILLING, ClientGone): _to(Flow.abandon, State.DONE),
    (State.DECODING, Opened): _to(Flow.relay, State.RELAYING),
    (State.DECODING, Answered): _to(Flow.take_decode_answer, *AFTER_LOST_DECODE),
    (State.DECODING, Failed): _to(Flow.lose_decode, *AFTER_LOST_DECODE),
    (State.DECODING, ClientGone): _to(Flow.abandon, State.DONE),
    (State.RELAYING, Ended): _to(Flow.end, State.DONE),
    (State.RELAYING, Failed): _to(Flow.break_off, State.DONE),
    (State.RELAYING, ClientGone): _to(Flow.abandon, State.DONE),
}


def _too_late(event: Failed) -> Refuse:
    return _refusal(504, "deadline_exceeded", f"there is no answer: {event.detail}", event.reason)


def _refusal(status: int, code: str, message: str, reason: str) -> Refuse:
    """`reason` is the label of the counter that the failure moves."""
    body = error_body(message, SERVER_ERROR, code, None)
    body["error"]["reason"] = reason
    return Refuse(status, body)
