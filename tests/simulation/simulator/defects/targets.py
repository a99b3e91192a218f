"""Target sessions with one defect each."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from kvferry.session.commands import BlocksReleased, Command, Count, Fetched, FetchFailed, Send
from kvferry.session.events import AnswerArrived, Digested, TicketEnded
from kvferry.session.keys import ReadKey
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.session import TargetEvent, TargetSession
from kvferry.session.timing import Timing
from kvferry.wire.messages import Landed, Offer, Party, Reached, Renew, Valid, Welcome
from simulator.state.naming import attempt_of, request_of

FOREVER_S = 1e9
ANY_VALUE = bytes(8)


class NoFence(TargetSession):
    """`FetchFailed` is followed by `BlocksReleased` at once, and never again."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        commands = [command for command in super().handle(event, now) if not isinstance(command, BlocksReleased)]
        failed = [command.request_id for command in commands if isinstance(command, FetchFailed)]
        return commands + [BlocksReleased(request_id) for request_id in failed]


class NoWord(TargetSession):
    """Where the source writes, does not wait for its word that it has stopped."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        for command in [each for each in commands if isinstance(each, FetchFailed)]:
            fetch = self._fetches.get(attempt_of(command.request_id))
            if fetch is not None and any(read.is_exposed for read in fetch.reads.values()):
                del self._fetches[fetch.request.claim_id]
                commands.append(BlocksReleased(command.request_id))
        return commands


class SilenceEnds(TargetSession):
    """Takes a source that says nothing for long for one that has ended."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        for pending in self._aborts._open.values():
            if now - pending.first_sent >= self._timing.silence_s:
                pending.fence(0.0, now)
        return super().handle(event, now)


class NoGrace(TargetSession):
    """Forgets what was under way when a source ended."""

    def __init__(self, identity: TargetIdentity, timing: Timing) -> None:
        super().__init__(identity, replace(timing, fence_s=0.0))


class AnyTransport(TargetSession):
    """Takes every transport for one by which a source can be refused."""

    def __init__(self, identity: TargetIdentity, timing: Timing) -> None:
        super().__init__(replace(identity, revocable=frozenset({"simulated"})), timing)


class NearSlots(TargetSession):
    """Forgets that a source which gathers into our slots itself cannot be refused."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        if isinstance(event, AnswerArrived) and isinstance(event.message, Reached):
            commands = super().handle(event, now)
            for peer in self._peers:
                peer.is_revocable |= peer.key == event.peer and "simulated" in self._peers._ours.revocable
            return commands
        return super().handle(event, now)


class FirstError(TargetSession):
    """The first ticket that fails frees the blocks, whatever the others do."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        if not (isinstance(event, TicketEnded) and isinstance(event.key, ReadKey) and event.error):
            return commands
        freed = self._fetches.pop(event.key.claim_id, None) is not None
        return [*commands, BlocksReleased(request_of(event.key.claim_id))] if freed else commands


class SkipValid(TargetSession):
    """What the source would answer is not waited for."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        for command in list(commands):
            if isinstance(command, Send) and isinstance(command.message, Landed):
                answer = AnswerArrived(command.peer, Valid(command.message.claim_id))
                commands += super().handle(answer, now)
        return commands


class IgnoreError(TargetSession):
    """Every ticket ends well."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        return super().handle(replace(event, error="") if isinstance(event, TicketEnded) else event, now)


class NoHeartbeat(TargetSession):
    """Never renews a lease."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        return [each for each in commands if not (isinstance(each, Send) and isinstance(each.message, Renew))]


class NoDeadline(TargetSession):
    """Waits for bytes as long as it takes."""

    def __init__(self, identity: TargetIdentity, timing: Timing) -> None:
        super().__init__(identity, replace(timing, transfer_s=FOREVER_S))


class TwiceFetched(TargetSession):
    """Tells its engine of every `Valid`."""

    _last: tuple[Fetched, ...] = ()

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        if isinstance(event, AnswerArrived) and isinstance(event.message, Valid) and not commands:
            commands += [last for last in self._last if last.request_id == request_of(event.message.claim_id)]
        self._last = tuple(each for each in commands if isinstance(each, Fetched)) or self._last
        return commands


class NoCompare(TargetSession):
    """All digests are alike."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        if isinstance(event, Digested):
            event = replace(event, values=(ANY_VALUE,) * len(event.values))
        if isinstance(event, AnswerArrived) and isinstance(event.message, Valid):
            digests = (ANY_VALUE,) * len(event.message.digests)
            event = replace(event, message=structs.replace(event.message, digests=digests))
        return super().handle(event, now)


class Uncounted(TargetSession):
    """Fails in silence."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        return [each for each in commands if not (isinstance(each, Count) and each.what == "fetches_failed")]


class NoEpoch(TargetSession):
    """Takes whoever answers for who was addressed."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        if isinstance(event, AnswerArrived) and isinstance(event.message, Welcome | Offer):
            message, key = event.message, event.peer
            claimed = Party(key.engine_id, key.epoch, message.party.rank)
            event = replace(event, message=structs.replace(message, party=claimed))
        return super().handle(event, now)
