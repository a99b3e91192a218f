"""Sessions with one defect each in reads of which both sides move a part."""

from __future__ import annotations

from kvferry.plan.programs.copies import Direction
from kvferry.plan.programs.stretches import parted
from kvferry.session.commands import Command
from kvferry.session.events import FrameArrived, TicketEnded
from kvferry.session.keys import ClaimKey, ReadKey
from kvferry.session.source.direct_write import DirectWrite
from kvferry.session.source.session import SourceEvent, SourceSession
from kvferry.session.target.session import TargetEvent, TargetSession
from kvferry.wire.messages import Claim


class HalfThere(TargetSession):
    """What it has read itself is all there is."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        if isinstance(event, TicketEnded) and isinstance(event.key, ReadKey):
            fetch = self._fetches.get(event.key.claim_id)
            if fetch is not None and event.key.peer in fetch.reads:
                fetch.reads[event.key.peer].movers &= {Direction.READ}
        return super().handle(event, now)


class LateShare(SourceSession):
    """Writes what it has once granted, whatever has become of it."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        granted = {write.key: list(write.todo) for write, _ in self._writes._shares}
        commands = super().handle(event, now)
        for write, _ in self._writes._shares:
            if not write.is_open:
                write.todo, write.error = granted[write.key], ""
        return commands


class ShareAgain(SourceSession):
    """Writes its part whenever it is asked to."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        if isinstance(event, FrameArrived) and isinstance(event.message, Claim) and event.message.read_from:
            claim = event.message
            lease = self._leases.get(claim.reference.lease_id)
            write = lease.writes.get(ClaimKey(claim.reference.lease_id, claim.party, claim.claim_id)) if lease else None
            if lease and isinstance(write, DirectWrite) and lease.live and write.is_written:
                write.todo = [parted(claim.read_from)[0]]
                self._writes._shares.append((write, lease))
        return super().handle(event, now)
