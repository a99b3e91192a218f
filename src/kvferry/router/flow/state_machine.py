"""One request on its way through a prefill and a decode instance, without I/O: events in, commands out.

The last command of a batch is the one that is answered by the next event. Rules that the table cannot show:

* P (the prefill instance) gets one retry on another P per request, then the request is served by D alone;
* D (the decode instance) gets one retry on another D, only before its first byte, and with a fresh prefill: the cache
  of the first one may be half read and its lease spent;
* a 4xx is about the request, so nothing is tried again. One of P may only be about the prefill request that we made of
  it (a tool call does not fit one token): D is asked by itself, so that the client hears what an engine alone would
  say. A P that has too much to do (429) is replaced by another one if there is one: D alone would be worse off still;
* a D that answers that the cache did not arrive is not at fault alone: it stays, and P is another one, or none. One
  that fails without a word about that may be at fault or not: both are others, or D alone tries again;
* a computed cache that D will not answer from is released: P would keep it until its lease runs out;
* a P that is asked early promises the cache before it is computed. D is asked at once and answers when it has come. How
  P's own request ends is no event: should it fail, D's request has failed for want of a cache;
* when the time is over that the client has given the request, nothing is tried again and nobody is to blame;
* where D shall not compute prompts in place of P, what D alone would have served is refused. A request that cannot be
  divided is still D's alone: no P could help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from kvferry.errors import IllegalEventError
from kvferry.router import commands, events
from kvferry.router.commands import Command, Count, Counted
from kvferry.router.config import PrefillFallback
from kvferry.router.events import Event, Path
from kvferry.router.flow import refusals
from kvferry.router.flow.engine_response import can_be_released, kept_cache, lost_cache
from kvferry.router.policy.records import Instance, NoInstance, Overloaded, Role, SkipPrefill
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
        # Why the next request of a role is a second try; taken out when that request is sent.
        self._second_try: dict[Role, str] = {}
        # What the client gets when no decode instance is left.
        self._last_answer: Command = refusals.no_decode_instance()
        self._can_append = False
        # A P had too much to do: the client hears it if there is no other one.
        self._overloaded = False
        # A D that failed with another's cache: either may be at fault. It is chosen again if it is the only one.
        self._suspected: frozenset[Instance] = frozenset()
        # What P keeps for D, until D answers.
        self._kept = b""

    def handle(self, event: Event) -> list[Command]:
        """Take one event. Raises IllegalEventError, with the history, when the state does not allow it."""
        before = self.state
        self._history.append(f"{type(event).__name__} while {before}")
        action, targets = TRANSITIONS.get((before, type(event)), (None, ()))
        if action is None:
            raise self._illegal("an event that the state does not allow")
        batch = action(self, event)
        if self.state not in targets:
            raise self._illegal(f"a transition to {self.state} that the table does not have")
        return batch

    def begin(self, event: events.Began) -> list[Command]:
        """Pick D before P: a prefill that nobody can decode is wasted."""
        reason = self._request.undivided_reason
        return [*(self._fall_back(reason) if reason else []), *self._pick(Role.DECODE)]

    def take_decode(self, event: events.Picked) -> list[Command]:
        self._picked[Role.DECODE] = event.instance
        counts = self._count_retry(Role.DECODE)
        if self.path is Path.DECODE_ONLY:
            return [*counts, *self._send_decode(self._request.raw)]
        return [*counts, *self._pick(Role.PREFILL)]

    def give_up(self, event: NoInstance) -> list[Command]:
        if self._suspected:
            self._failed, self._suspected = self._failed - self._suspected, frozenset()
            return self._pick(Role.DECODE)
        return self._finish(self._last_answer)

    def turn_away(self, event: Overloaded) -> list[Command]:
        counts = [Count(Counted.TURNED_AWAY, Role.DECODE, event.reason)]
        return [*counts, *self._finish(refusals.overloaded(event))]

    def take_prefill(self, event: events.Picked) -> list[Command]:
        self.state = State.PREFILLING
        self._picked[Role.PREFILL] = event.instance
        send = commands.Send(event.instance, prefill_body(self._request, event.is_early))
        return [*self._count_retry(Role.PREFILL), send]

    def do_without_prefill(self, event: NoInstance) -> list[Command]:
        if self._overloaded:
            return self._finish(commands.Forward())
        failed = any(instance.role is Role.PREFILL for instance in self._failed)
        return self._decode_alone("prefill_failed" if failed else "no_prefill_instance")

    def skip_prefill(self, event: SkipPrefill) -> list[Command]:
        if self._refuses and event.reason in refusals.FOR_WANT_OF_PREFILL:
            return self._refuse(event.reason)
        return [*self._fall_back(event.reason, event.detail), *self._send_decode(self._request.raw)]

    def take_prefill_answer(self, event: events.Answered) -> list[Command]:
        self._overloaded = event.status == 429
        if self._overloaded and self._may_try_again(Role.PREFILL, "status_429"):
            return [Count(Counted.UPSTREAM_ERROR, Role.PREFILL, "status_429"), *self._pick(Role.PREFILL)]
        if self._overloaded:
            return self._finish(commands.Forward())
        if 400 <= event.status < 500:
            # P's word is all there is when D is not to be asked; most likely it is about the request.
            return self._finish(commands.Forward()) if self._refuses else self._decode_alone("prefill_refused")
        if not 200 <= event.status < 300:
            return self._lose_prefill(f"status_{event.status}")
        transfer = kept_cache(event.body)
        if not transfer:
            return self._lose_prefill("malformed")
        if not transfer.startswith(b"{"):
            return self._decode_alone("no_kv_transfer_params")
        self._kept = transfer
        return self._send_decode(decode_body(self._request, transfer))

    def take_promise(self, event: events.Promised) -> list[Command]:
        self._kept = event.transfer
        return self._send_decode(decode_body(self._request, event.transfer))

    def lose_prefill(self, event: events.Failed) -> list[Command]:
        if event.reason == events.TOO_LATE:
            return self._finish(refusals.too_late(event))
        return self._lose_prefill(event.reason)

    def take_decode_answer(self, event: events.Answered) -> list[Command]:
        if event.status < 500:
            return [*self._release("decode_refused"), *self._finish(commands.Forward())]
        if self.path is not Path.DISAGGREGATED:
            return self._lose_decode(f"status_{event.status}", commands.Forward())
        reason = lost_cache(event.body)
        if reason in (Reason.WRONG_PROMPT, Reason.UNNAMED_PROMPT):
            return self._compute_without(reason, reason, commands.Forward())
        if reason:
            return self._lose_decode(reason, commands.Forward(), self._picked[Role.PREFILL])
        self._failed |= {self._picked[Role.PREFILL]}
        self._suspected = frozenset((self._picked[Role.DECODE],))
        return self._lose_decode(f"status_{event.status}", commands.Forward())

    def lose_decode(self, event: events.Failed) -> list[Command]:
        if event.reason == events.TOO_LATE:
            return [*self._release(events.TOO_LATE), *self._finish(refusals.too_late(event))]
        if event.reason == events.PREFILL_LOST:
            return self._lose_promise(event)
        return self._lose_decode(event.reason, refusals.decode_failed(event))

    def relay(self, event: events.Opened) -> list[Command]:
        self.state = State.RELAYING
        self._kept = b""
        self._can_append = event.can_append
        return [commands.Relay()]

    def end(self, event: events.Ended) -> list[Command]:
        self.state = State.DONE
        return []

    def break_off(self, event: events.Failed) -> list[Command]:
        message = f"the answer was interrupted: {event.detail}"
        is_ours = event.reason == events.TOO_LATE
        code = "deadline_exceeded" if is_ours else "upstream_broke_off"
        last = commands.EndWithError(message, code, event.reason) if self._can_append else commands.Cut()
        counts = [] if is_ours else [Count(Counted.UPSTREAM_ERROR, Role.DECODE, event.reason)]
        return [*counts, *self._finish(last)]

    def abandon(self, event: events.ClientGone) -> list[Command]:
        if event.prefill_answer:
            self._kept = kept_cache(event.prefill_answer)
        return [*self._release("client_left"), *self._finish(commands.Cancel())]

    def _pick(self, role: Role) -> list[Command]:
        self.state = State.PICKING_DECODE if role is Role.DECODE else State.PICKING_PREFILL
        return [commands.Pick(role, self._failed)]

    def _send_decode(self, body: bytes) -> list[Command]:
        self.state = State.DECODING
        return [commands.Send(self._picked[Role.DECODE], body)]

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
        return [Count(Counted.REFUSED, Role.PREFILL, reason), *self._finish(refusals.no_prefill_instance(reason))]

    def _lose_prefill(self, reason: str) -> list[Command]:
        again = self._may_try_again(Role.PREFILL, reason)
        then = self._pick(Role.PREFILL) if again else self._decode_alone("prefill_failed")
        return [Count(Counted.UPSTREAM_ERROR, Role.PREFILL, reason), *then]

    def _lose_decode(self, reason: str, last_answer: Command, culprit: Instance | None = None) -> list[Command]:
        """`culprit` is who must not be chosen again, if it is not the decode instance."""
        self._last_answer = last_answer
        releases = self._release("decode_failed")
        again = self._may_try_again(Role.DECODE, reason, culprit)
        then = self._pick(Role.DECODE) if again else self._finish(last_answer)
        return [Count(Counted.UPSTREAM_ERROR, Role.DECODE, reason), *releases, *then]

    def _lose_promise(self, event: events.Failed) -> list[Command]:
        """P has failed after its promise, and D's request was ended by us: D can always do it alone."""
        last_answer = refusals.prefill_lost(event)
        if Role.DECODE in self._retried:
            return self._compute_without(event.reason, "prefill_failed", last_answer)
        return self._lose_decode(event.reason, last_answer, self._picked[Role.PREFILL])

    def _compute_without(self, reason: str, fallback: str, last_answer: Command) -> list[Command]:
        """No P is of use: D cannot compare its own tokens with P's, or they differ; or two of P have failed."""
        self._last_answer = last_answer
        self._failed |= {self._picked[Role.PREFILL]}
        counts = [Count(Counted.UPSTREAM_ERROR, Role.DECODE, reason), *self._release("decode_failed")]
        then = self._refuse(fallback) if self._refuses else [*self._fall_back(fallback), *self._pick(Role.DECODE)]
        return [*counts, *then]

    def _release(self, reason: str) -> list[Command]:
        kept, self._kept = self._kept, b""
        if not can_be_released(kept):
            return []
        return [commands.Release(self._picked[Role.PREFILL], b'{"kv_transfer_params": ' + kept + b"}", reason)]

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


PREFILL_OR_DECODE = (State.PICKING_PREFILL, State.DECODING)
AGAIN_OR_DONE = (State.PICKING_DECODE, State.DONE)

# What an event does in a state, and the states that this may lead to.
TRANSITIONS: Mapping[tuple[State, type[Event]], tuple[Callable[[Flow, Any], list[Command]], tuple[State, ...]]] = {
    (State.NEW, events.Began): (Flow.begin, (State.PICKING_DECODE,)),
    (State.PICKING_DECODE, events.Picked): (Flow.take_decode, PREFILL_OR_DECODE),
    (State.PICKING_DECODE, NoInstance): (Flow.give_up, AGAIN_OR_DONE),
    (State.PICKING_DECODE, Overloaded): (Flow.turn_away, (State.DONE,)),
    (State.PICKING_PREFILL, events.Picked): (Flow.take_prefill, (State.PREFILLING,)),
    (State.PICKING_PREFILL, NoInstance): (Flow.do_without_prefill, (State.DECODING, State.DONE)),
    (State.PICKING_PREFILL, SkipPrefill): (Flow.skip_prefill, (State.DECODING, State.DONE)),
    (State.PICKING_PREFILL, Overloaded): (Flow.turn_away, (State.DONE,)),
    (State.PREFILLING, events.Answered): (Flow.take_prefill_answer, (*PREFILL_OR_DECODE, State.DONE)),
    (State.PREFILLING, events.Promised): (Flow.take_promise, (State.DECODING,)),
    (State.PREFILLING, events.Failed): (Flow.lose_prefill, (*PREFILL_OR_DECODE, State.DONE)),
    (State.PREFILLING, events.ClientGone): (Flow.abandon, (State.DONE,)),
    (State.DECODING, events.Opened): (Flow.relay, (State.RELAYING,)),
    (State.DECODING, events.Answered): (Flow.take_decode_answer, AGAIN_OR_DONE),
    (State.DECODING, events.Failed): (Flow.lose_decode, AGAIN_OR_DONE),
    (State.DECODING, events.ClientGone): (Flow.abandon, (State.DONE,)),
    (State.RELAYING, events.Ended): (Flow.end, (State.DONE,)),
    (State.RELAYING, events.Failed): (Flow.break_off, (State.DONE,)),
    (State.RELAYING, events.ClientGone): (Flow.abandon, (State.DONE,)),
}
