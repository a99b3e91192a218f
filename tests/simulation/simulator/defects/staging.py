"""Sessions with one defect each in what they do with staging memory."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from kvferry.session.commands import Cancel, Command, FetchFailed, Post, Release, Reply, Stage
from kvferry.session.events import Acquired, AnswerArrived, FrameArrived, Staged
from kvferry.session.keys import ClaimKey, ReadKey, SlotKey
from kvferry.session.slot import SlotState
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.source.packed_write import PackedWrite
from kvferry.session.source.session import SourceEvent, SourceSession
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.session import TargetEvent, TargetSession
from kvferry.session.timing import Timing
from kvferry.wire.messages import Aborted, Pack, Packed
from simulator.state.naming import attempt_of


class CancelEnds(TargetSession):
    """Gives a slot back when it loses interest in what fills it."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        return _with_cancel_as_end(super().handle(event, now))


class SourceCancelEnds(SourceSession):
    """Gives a slot back when it loses interest in its write."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        return _with_cancel_as_end(super().handle(event, now))


def _with_cancel_as_end(commands: list[Command]) -> list[Command]:
    """The release that follows in time finds nothing to give back."""
    cancelled = [command.key for command in commands if isinstance(command, Cancel)]
    return commands + [Release(key) for key in cancelled if isinstance(key, SlotKey)]


class ForgetSlots(TargetSession):
    """Only its blocks wait for the word of a source that may still write: its slots do not."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        for command in [each for each in commands if isinstance(each, FetchFailed)]:
            fetch = self._fetches.get(attempt_of(command.request_id))
            for key, read in fetch.reads.items() if fetch is not None else ():
                for pipeline in read.pipeline:
                    commands += pipeline.fenced()
                commands += self._quarantine.drained(ReadKey(attempt_of(command.request_id), key))
        return commands


class ScatterAgain(TargetSession):
    """Scatters a slot whenever it hears that it is written."""

    def __init__(self, identity: TargetIdentity, timing: Timing) -> None:
        super().__init__(identity, timing)
        self._stages: dict[SlotKey, Stage] = {}

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        self._stages |= {command.key: command for command in commands if isinstance(command, Stage)}
        if isinstance(event, AnswerArrived) and isinstance(event.message, Packed):
            packed = event.message
            key = SlotKey(ReadKey(packed.claim_id, event.peer), packed.stretch, packed.number)
            if key in self._stages and self._stages[key] not in commands:
                commands.append(self._stages[key])
        return commands


class LostRelease(TargetSession):
    """Forgets to give back a slot whose scatter has failed."""

    def handle(self, event: TargetEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        if isinstance(event, Staged) and event.error:
            return [command for command in commands if command != Release(event.key)]
        return commands


class KeepRequest(SourceSession):
    """Stays in line for slots that are not wanted any more."""

    def __init__(self, identity: SourceIdentity, timing: Timing) -> None:
        super().__init__(identity, timing)
        self._acquired: set[SlotKey] = set()

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        if isinstance(event, Acquired):
            self._acquired.add(event.key)
        commands = super().handle(event, now)
        return [each for each in commands if not isinstance(each, Release) or each.key in self._acquired]


class LatePack(SourceSession):
    """Writes a slot that it is asked for, though the claim or the lease has ended."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        found = _packing_of(self, event)
        for packing in found:
            packing.error = ""
        commands = super().handle(event, now)
        if isinstance(event, FrameArrived) and isinstance(event.message, Pack) and found:
            lease = self._leases.get(event.message.lease_id)
            if lease is None:
                return commands
            if not lease.live or (event.message.party, event.message.claim_id) in self._aborted:
                commands += self._writes.pack(event.peer, event.message, lease, now)
        return commands


class PackAgain(SourceSession):
    """Writes a slot whenever it is asked for."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        for packing in _packing_of(self, event):
            packing.done.clear()
        return super().handle(event, now)


def _packing_of(session: SourceSession, event: SourceEvent) -> list[PackedWrite]:
    """What a slot is asked of."""
    if not isinstance(event, FrameArrived) or not isinstance(event.message, Pack):
        return []
    pack = event.message
    lease = session._leases.get(pack.lease_id)
    write = lease.writes.get(ClaimKey(pack.lease_id, pack.party, pack.claim_id)) if lease is not None else None
    return [write] if isinstance(write, PackedWrite) else []


class NoGather(SourceSession):
    """Writes a slot while it is still being gathered."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        for stage in [command for command in commands if isinstance(command, Stage)]:
            commands += super().handle(Staged(stage.key, ""), now)
        if isinstance(event, Staged):
            # Already told.
            return [command for command in commands if not isinstance(command, Post)]
        return commands


class FarAtOnce(SourceSession):
    """Has done with a target's slot when it loses interest in what is gathered into it."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        commands = super().handle(event, now)
        packings = [
            write for lease in self._leases for write in lease.writes.values() if isinstance(write, PackedWrite)
        ]
        for packing in packings:
            for use in [use for use in packing.uses.values() if use.is_peer_slot and use.state is SlotState.DRAINING]:
                del packing.uses[use.key]
                commands.append(Release(use.key))
        return commands


class AlwaysClean(SourceSession):
    """Says that nothing is under way any more, however a write of it has ended."""

    def handle(self, event: SourceEvent, now: float) -> list[Command]:
        return [_clean(command) for command in super().handle(event, now)]


def _clean(command: Command) -> Command:
    if isinstance(command, Reply) and isinstance(command.message, Aborted):
        return replace(command, message=structs.replace(command.message, is_clean=True))
    return command
