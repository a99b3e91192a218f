"""One request on its way through a prefill and a decode instance, without I/O: events in, commands out.

The last command of a batch is the one that is answered by the next event. Rules that the table cannot show:

* P (the prefill instance) gets one retry on another P per request, then the request is served by D alone;
* D (the decode instance) gets one retry on another D, only before its first byte, and with a fresh prefill: the cache
  of the first one may be half read and its lease spent. Where nobody was at D's address, nobody has read it: another D
  is asked with it;
* a 4xx is about the request, so nothing is tried again. One of P may only be about the prefill request made from it
  (a tool call does not fit one token): D is asked by itself, so that the client hears what an engine alone would
  say. A P that has too much to do (429) is replaced by another one if there is one: D alone would be worse off still;
* a D that answers that the cache did not arrive is not at fault alone: it stays, and P is another one, or none. One
  that fails without a word about that may be at fault or not: both are others, or D alone tries again;
* a computed cache that D will not answer from is released: P would keep it until its lease runs out;
* a P that is asked early promises the cache before it is computed. D is asked at once and answers when it has come. How
  P's own request ends is no event: should it fail, D's request has failed for want of a cache;
* P and D that find one another in a room are asked at once, each try in a room of its own. P answers beside D, one of
  SGLang not before D has read its cache, so how its request ends is no event either;
* a D that cannot compute prompts is never asked alone: another D is, if one can, or the client is told why not;
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
from kvferry.router.answers import refusals
from kvferry.router.answers.engine_response import can_be_released, kept_cache, lost_cache
from kvferry.router.commands import Command, Count, Counted
from kvferry.router.config import PrefillFallback
from kvferry.router.events import Event, Path, Room
from kvferry.router.flow.attempts import Attempts
from kvferry.router.policy.records import Instance, NoInstance, Overloaded, Role, SkipPrefill
from kvferry.router.request.client_request import (
    ClientRequest,
    decode_body,
    first_token_body,
    prefill_body,
    room_decode_body,
    room_prefill_body,
)
from kvferry.router.upstream.failures import GONE
from kvferry.wire.messages import Reason

NO_DECODE_INSTANCE = refusals.no_decode_instance()


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
        # Whether the picked D can compute prompts, and why it is to compute this one, if it is.
        self._computes = True
        self._alone_for = ""
        # The reason to tell where prefill instances are not asked again: they have failed, or a pair with one has.
        self._lost_for = ""
        self._attempts = Attempts()
        # What the client gets when no decode instance is left.
        self._last_answer: Command = NO_DECODE_INSTANCE
        self._can_append = False
        # A P had too much to do, and D has not been asked since: the client hears it if there is no other P.
        self._overloaded = False
        # What P keeps for D, until D answers.
        self._kept = b""
        # The same, if any other D could read it as well, since P and D did not meet in a room.
        self._transfer = b""

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
        self.reason = self._alone_for = self._request.undivided_reason
        return self._pick(Role.DECODE)

    def take_decode(self, event: events.Picked) -> list[Command]:
        self._picked[Role.DECODE], self._computes = event.instance, event.computes
        counts = self._attempts.count(Role.DECODE)
        if self._transfer:
            return [*counts, *self._hand_over(self._transfer)]
        return [*counts, *(self._serve_alone() if self._alone_for else self._pick(Role.PREFILL))]

    def give_up(self, event: NoInstance) -> list[Command]:
        if self._transfer:
            # No D can take what is computed, but with another P one may answer.
            return [*self._release("decode_failed"), *self._pick(Role.DECODE)]
        return self._pick(Role.DECODE) if self._attempts.acquit(Role.DECODE) else self._finish(self._last_answer)

    def turn_away(self, event: Overloaded) -> list[Command]:
        counts = [Count(Counted.TURNED_AWAY, Role.DECODE, event.reason)]
        return [*counts, *self._release("decode_failed"), *self._finish(refusals.overloaded(event))]

    def take_prefill(self, event: events.Picked) -> list[Command]:
        self._picked[Role.PREFILL] = event.instance
        counts = self._attempts.count(Role.PREFILL)
        if event.room is not None:
            return [*counts, *self._meet(event.instance, event.room)]
        self.state = State.PREFILLING
        return [*counts, commands.Send(event.instance, prefill_body(self._request, event.is_early))]

    def do_without_prefill(self, event: NoInstance) -> list[Command]:
        if self._overloaded:
            return self._finish(commands.Forward())
        if self._attempts.acquit(Role.PREFILL):
            return self._pick(Role.PREFILL)
        failed = any(instance.role is Role.PREFILL for instance in self._attempts.failed)
        reason = self._lost_for or "prefill_failed" if failed else event.reason or "no_prefill_instance"
        return self._decode_alone(reason)

    def skip_prefill(self, event: SkipPrefill) -> list[Command]:
        if self._refuses and event.reason in refusals.FOR_WANT_OF_PREFILL:
            return self._refuse(event.reason)
        return self._leave_to_decode(event.reason or "policy", event.detail)

    def take_prefill_answer(self, event: events.Answered) -> list[Command]:
        self._overloaded, prefill = event.status == 429, self._picked[Role.PREFILL]
        if self._overloaded and self._attempts.may_try_again(Role.PREFILL, "status_429", prefill):
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
        return self._hand_over(transfer)

    def take_promise(self, event: events.Promised) -> list[Command]:
        return self._hand_over(event.transfer)

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
        return self._lose_pair(event.status)

    def lose_decode(self, event: events.Failed) -> list[Command]:
        if event.reason == events.TOO_LATE:
            return [*self._release(events.TOO_LATE), *self._finish(refusals.too_late(event))]
        if event.reason == events.PREFILL_REFUSED:
            return self._hear_refusal()
        if event.reason in (events.PREFILL_LOST, events.PREFILL_GONE):
            return self._lose_promise(event)
        return self._lose_decode(event.reason, refusals.decode_failed(event), is_unread=event.reason in GONE)

    def relay(self, event: events.Opened) -> list[Command]:
        self.state, self._can_append = State.RELAYING, event.can_append
        # D could not read it, and may not have been able to tell P either.
        releases = self._release("recomputed") if event.is_recomputed else []
        self._kept = self._transfer = b""
        return [*releases, commands.Relay()]

    def end(self, event: events.Ended) -> list[Command]:
        self.state = State.DONE
        return []

    def break_off(self, event: events.Failed) -> list[Command]:
        is_ours = event.reason == events.TOO_LATE
        counts = [] if is_ours else [Count(Counted.UPSTREAM_ERROR, Role.DECODE, event.reason)]
        return [*counts, *self._finish(refusals.broken_off(event, self._can_append))]

    def abandon(self, event: events.ClientGone) -> list[Command]:
        match event.prefill_answer:
            case events.Answered(status, body) if 200 <= status < 300:
                self._kept = kept_cache(body)
            case events.Promised(transfer):
                self._kept = transfer
        return [*self._release("client_left"), *self._finish(commands.Cancel())]

    def _pick(self, role: Role) -> list[Command]:
        self.state = State.PICKING_DECODE if role is Role.DECODE else State.PICKING_PREFILL
        source = self._picked[Role.PREFILL] if self._transfer else None
        return [commands.Pick(role, self._attempts.failed, bool(self._alone_for), source)]

    def _meet(self, prefill: Instance, room: Room) -> list[Command]:
        self._kept = room.kept
        body = (first_token_body if room.kept else room_prefill_body)(self._request, room.prefill)
        return [commands.Start(prefill, body), *self._send_decode(room_decode_body(self._request, room.decode))]

    def _hear_refusal(self) -> list[Command]:
        """Take P's refusal of its request beside D's, which the router has ended. P keeps nothing to release."""
        self._kept = b""
        is_ps_word = self._refuses or not self._computes
        return self._finish(commands.Forward()) if is_ps_word else self._decode_alone("prefill_refused")

    def _hand_over(self, transfer: bytes) -> list[Command]:
        self._kept = self._transfer = transfer
        return self._send_decode(decode_body(self._request, transfer))

    def _send_decode(self, body: bytes) -> list[Command]:
        self.state, self._overloaded = State.DECODING, False
        return [commands.Send(self._picked[Role.DECODE], body)]

    def _finish(self, last: Command) -> list[Command]:
        self.state = State.DONE
        return [last]

    def _decode_alone(self, reason: str) -> list[Command]:
        return self._refuse(reason) if self._refuses else self._leave_to_decode(reason)

    def _leave_to_decode(self, reason: str, detail: str = "") -> list[Command]:
        self._alone_for, self.reason = reason, f"{reason}; {detail}" if detail else reason
        return self._serve_alone() if self._computes else self._pick(Role.DECODE)

    def _serve_alone(self) -> list[Command]:
        if not self._computes:
            return self._refuse(self._alone_for)
        is_first = self.path is not Path.DECODE_ONLY
        self.path = Path.DECODE_ONLY
        counts = [Count(Counted.FALLBACK, Role.PREFILL, self._alone_for)] if is_first else []
        return [*counts, *self._send_decode(self._request.raw)]

    def _refuse(self, reason: str) -> list[Command]:
        """Refuse the request, or give the answer of a failed try, which tells more than that nobody is left."""
        self.reason = reason
        if self._last_answer is not NO_DECODE_INSTANCE and not self._refuses:
            return self._finish(self._last_answer)
        is_divided = not self._request.undivided_reason
        last = refusals.no_prefill_instance(reason) if is_divided else refusals.undivided(reason)
        return [Count(Counted.REFUSED, Role.PREFILL, reason), *self._finish(last)]

    def _lose_prefill(self, reason: str) -> list[Command]:
        self._lost_for = "prefill_failed"
        again = self._attempts.may_try_again(Role.PREFILL, reason, self._picked[Role.PREFILL])
        then = self._pick(Role.PREFILL) if again else self._decode_alone("prefill_failed")
        return [Count(Counted.UPSTREAM_ERROR, Role.PREFILL, reason), *then]

    def _lose_decode(
        self, reason: str, last_answer: Command, culprit: Instance | None = None, is_unread: bool = False
    ) -> list[Command]:
        """Go on after a decode request failed. `culprit` is who must not be chosen again, if it is not D. `is_unread`
        says that nobody was there to read what P has computed."""
        self._last_answer = last_answer
        self._lost_for = "prefill_failed" if culprit is not None else self._lost_for
        again = self._attempts.may_try_again(Role.DECODE, reason, culprit or self._picked[Role.DECODE])
        releases = [] if again and is_unread and self._transfer else self._release("decode_failed")
        then = self._pick(Role.DECODE) if again else self._finish(last_answer)
        return [Count(Counted.UPSTREAM_ERROR, Role.DECODE, reason), *releases, *then]

    def _lose_pair(self, status: int) -> list[Command]:
        """Go on after an error for which P or D may be at fault. A D that can do without P does so, rather than have
        the same P compute again. The error of one that cannot is not passed on, since it may name internal hosts."""
        self._lost_for = self._lost_for or "pair_failed"
        self._attempts.lose(self._picked[Role.PREFILL])
        self._attempts.suspect(*(self._picked[role] for role in ((Role.DECODE,) if self._computes else Role)))
        last_answer = commands.Forward() if self._computes else refusals.pair_failed(status)
        return self._lose_decode(f"status_{status}", last_answer)

    def _lose_promise(self, event: events.Failed) -> list[Command]:
        """Go on after P has failed beside D, whose request the router has ended."""
        self._lost_for = "prefill_failed"
        last_answer, prefill = refusals.prefill_lost(event), self._picked[Role.PREFILL]
        is_gone = event.reason == events.PREFILL_GONE
        if is_gone:
            # It keeps nothing, and is no suspect.
            self._kept = b""
        if not self._attempts.may_try_again(Role.DECODE, event.reason, prefill):
            return self._compute_without(event.reason, "prefill_failed", last_answer)
        if not self._computes and not is_gone:
            self._attempts.suspect(prefill)
        self._last_answer = last_answer
        releases = self._release("decode_failed")
        return [Count(Counted.UPSTREAM_ERROR, Role.DECODE, event.reason), *releases, *self._pick(Role.DECODE)]

    def _compute_without(self, reason: str, fallback: str, last_answer: Command) -> list[Command]:
        """Go on without P: D cannot compare its own tokens with P's, or they differ, or two Ps have failed."""
        self._last_answer = last_answer
        self._attempts.lose(self._picked[Role.PREFILL])
        counts = [Count(Counted.UPSTREAM_ERROR, Role.DECODE, reason), *self._release("decode_failed")]
        if self._refuses:
            return [*counts, *self._refuse(fallback)]
        self.reason = self._alone_for = fallback
        return [*counts, *self._pick(Role.DECODE)]

    def _release(self, reason: str) -> list[Command]:
        kept, self._kept, self._transfer = self._kept, b"", b""
        if not can_be_released(kept):
            return []
        return [commands.Release(self._picked[Role.PREFILL], b'{"kv_transfer_params": ' + kept + b"}", reason)]

    def _illegal(self, what: str) -> IllegalEventError:
        return IllegalEventError(f"the flow of a request met {what}", found="; ".join(self._history))


AGAIN_OR_DONE = (State.PICKING_DECODE, State.DONE)
# D is asked alone, or another one is picked that can compute, or there is none.
ALONE = (State.DECODING, *AGAIN_OR_DONE)

# What an event does in a state, and the states that this may lead to.
TRANSITIONS: Mapping[tuple[State, type[Event]], tuple[Callable[[Flow, Any], list[Command]], tuple[State, ...]]] = {
    (State.NEW, events.Began): (Flow.begin, (State.PICKING_DECODE,)),
    (State.PICKING_DECODE, events.Picked): (Flow.take_decode, (State.PICKING_PREFILL, State.DECODING, State.DONE)),
    (State.PICKING_DECODE, NoInstance): (Flow.give_up, AGAIN_OR_DONE),
    (State.PICKING_DECODE, Overloaded): (Flow.turn_away, (State.DONE,)),
    (State.PICKING_PREFILL, events.Picked): (Flow.take_prefill, (State.PREFILLING, State.DECODING)),
    (State.PICKING_PREFILL, NoInstance): (Flow.do_without_prefill, (State.PICKING_PREFILL, *ALONE)),
    (State.PICKING_PREFILL, SkipPrefill): (Flow.skip_prefill, ALONE),
    (State.PICKING_PREFILL, Overloaded): (Flow.turn_away, (State.DONE,)),
    (State.PREFILLING, events.Answered): (Flow.take_prefill_answer, (State.PICKING_PREFILL, *ALONE)),
    (State.PREFILLING, events.Promised): (Flow.take_promise, (State.DECODING,)),
    (State.PREFILLING, events.Failed): (Flow.lose_prefill, (State.PICKING_PREFILL, *ALONE)),
    (State.PREFILLING, events.ClientGone): (Flow.abandon, (State.DONE,)),
    (State.DECODING, events.Opened): (Flow.relay, (State.RELAYING,)),
    (State.DECODING, events.Answered): (Flow.take_decode_answer, AGAIN_OR_DONE),
    (State.DECODING, events.Failed): (Flow.lose_decode, ALONE),
    (State.DECODING, events.ClientGone): (Flow.abandon, (State.DONE,)),
    (State.RELAYING, events.Ended): (Flow.end, (State.DONE,)),
    (State.RELAYING, events.Failed): (Flow.break_off, (State.DONE,)),
    (State.RELAYING, events.ClientGone): (Flow.abandon, (State.DONE,)),
}
