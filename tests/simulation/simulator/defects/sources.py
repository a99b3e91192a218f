"""Source sessions with one defect each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from msgspec import structs

from kvferry.session.commands import Command, DropDigest, LeaseEnded, Reply
from kvferry.session.events import FrameArrived, LeaseProgress
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.source.session import SourceEvent, SourceSession
from kvferry.session.timing import Timing
from kvferry.wire.messages import Abort, Aborted, Claim, Hello, Landed, Message, Party, Valid

FOREVER_S = 1e9


class CountReaders(SourceSession):
    """A lease with n readers is done after n messages."""

    def __init__(self, identity: SourceIdentity, timing: Timing) -> None:
        super().__init__(identity, timing)
        self._landed_of: Counter[str] = Counter()

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        if isinstance(event, FrameArrived) and isinstance(event.message, Landed):
            lease_id = event.message.lease_id
            self._landed_of[lease_id] += 1
            lease = self._leases.get(lease_id)
            if lease is not None and lease.live and lease.claims and self._landed_of[lease_id] >= len(lease.readers):
                commands += self._leases.end(lease, "all readers valid", "done", now)
        return commands


class HastyStates(SourceSession):
    """Takes a state for all of them."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        if isinstance(event, LeaseProgress) and event.ahead.num_states:
            every = len(self._identity.layout.states)
            event = replace(event, ahead=replace(event.ahead, num_states=every))
        return super().handle(event, now)


class IgnoreExpiry(SourceSession):
    """Says valid to everybody whose claim was granted."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        if isinstance(event, FrameArrived) and isinstance(event.message, Landed):
            landed = event.message
            lease = self._leases.get(landed.lease_id)
            if lease is not None and lease.has_granted(landed.party, landed.claim_id) and not lease.live:
                return [Reply(event.peer, Valid(landed.claim_id))]
        return super().handle(event, now)


class NoEpoch(SourceSession):
    """Takes every greeting and every reference for one that means this incarnation."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        if isinstance(event, FrameArrived):
            event = replace(event, message=self._meant(event.message))
        return super().handle(event, now)

    def _meant(self, message: Message) -> Message:
        ours = self._identity.party
        if isinstance(message, Hello):
            return structs.replace(message, expects_engine_id=ours.engine_id, expects_epoch=ours.epoch)
        if isinstance(message, Claim):
            reference = structs.replace(message.reference, engine_id=ours.engine_id, epoch=ours.epoch)
            return structs.replace(message, reference=reference)
        return message


class ByRequest(SourceSession):
    """Grants whatever lease the request's id has at the moment."""

    def __init__(self, identity: SourceIdentity, timing: Timing) -> None:
        super().__init__(identity, timing)
        self._meant: dict[str, str] = {}

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        if isinstance(event, FrameArrived) and isinstance(event.message, Claim):
            reference = event.message.reference
            lease = self._leases.of_request(reference.request_id)
            if lease is not None:
                self._meant[event.message.claim_id] = lease.request.lease_id
                meant = structs.replace(reference, lease_id=lease.request.lease_id)
                event = replace(event, message=structs.replace(event.message, reference=meant))
        if isinstance(event, FrameArrived) and isinstance(event.message, Landed):
            lease_id = self._meant.get(event.message.claim_id, event.message.lease_id)
            event = replace(event, message=structs.replace(event.message, lease_id=lease_id))
        return super().handle(event, now)


class ByLease(SourceSession):
    """Does not look at the request's id."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        if isinstance(event, FrameArrived) and isinstance(event.message, Claim):
            reference = event.message.reference
            lease = self._leases.get(reference.lease_id)
            if lease is not None:
                meant = structs.replace(reference, request_id=lease.request.request_id)
                event = replace(event, message=structs.replace(event.message, reference=meant))
        return super().handle(event, now)


class AnyCount(SourceSession):
    """Does not look at how many tokens are asked for."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        if isinstance(event, FrameArrived) and isinstance(event.message, Claim):
            lease = self._leases.get(event.message.reference.lease_id)
            if lease is not None and event.message.num_tokens:
                message = structs.replace(event.message, num_tokens=lease.request.num_tokens)
                event = replace(event, message=message)
        return super().handle(event, now)


class AnyClaim(SourceSession):
    """The last claim is the one that counts."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        if isinstance(event, FrameArrived) and isinstance(event.message, Claim):
            lease = self._leases.get(event.message.reference.lease_id)
            if lease is not None and lease.live:
                others = [party for party in lease.claims if party != event.message.party]
                lease.claims = {party: lease.claims[party] for party in others if _same_engine(party, event.message)}
        return super().handle(event, now)


class TwiceFreed(SourceSession):
    """Frees the blocks for every message that says that a reader is done."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        if isinstance(event, FrameArrived) and isinstance(event.message, Landed):
            lease = self._leases.get(event.message.lease_id)
            freed = any(isinstance(command, LeaseEnded) for command in commands)
            if lease is not None and not lease.live and not freed:
                commands.append(LeaseEnded(lease.request.request_id, "done"))
        return commands


class EarlyFree(SourceSession):
    """Gives the blocks back when a lease ends, though it writes out of them."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        for lease in self._leases:
            writes, lease.writes = lease.writes, {}
            commands += self._leases.free_when_drained(lease)
            lease.writes = writes
        return commands


class EarlyWord(SourceSession):
    """Acknowledges an abort at once, though it still writes."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        if isinstance(event, FrameArrived) and isinstance(event.message, Abort):
            commands.append(Reply(event.peer, Aborted(event.message.claim_id, self._identity.party.epoch)))
        return commands


class NoExpiry(SourceSession):
    """Keeps leases until somebody ends them."""

    def __init__(self, identity: SourceIdentity, timing: Timing) -> None:
        super().__init__(identity, replace(timing, lease_s=FOREVER_S))


class KeepDigest(SourceSession):
    """Never loses interest in a digest."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        return [command for command in super().handle(event, now) if not isinstance(command, DropDigest)]


class KeepRecords(SourceSession):
    """Keeps every lease that has ended."""

    def __init__(self, identity: SourceIdentity, timing: Timing) -> None:
        super().__init__(identity, replace(timing, tombstone_s=FOREVER_S))


def _same_engine(party: Party, claim: Claim) -> bool:
    return (party.engine_id, party.epoch) == (claim.party.engine_id, claim.party.epoch)
