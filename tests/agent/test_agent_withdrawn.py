"""Blocks that an engine takes back while a peer reads them: what was read after that is never used."""

from __future__ import annotations

import pytest
from agent_support import SOURCE, TARGET, leased, wire_only

from kvferry.agent.cache import host_mover
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import BlocksReleased, FetchFailed, LeaseEnded
from kvferry.session.events import Staged, TicketEnded
from kvferry.session.target.read_strategy import StagingPolicy
from kvferry.wire.codec import decode
from kvferry.wire.messages import Landed

PACKED = StagingPolicy((Strategy.PACK,), 1 << 20)


class LastLook:
    """Keeps the target's question whether its bytes are good until the last time that a turn looks for messages, and
    has the engine take the blocks back just before the agent sees it."""

    def __init__(self, agent, take_back):
        self._take_back = take_back
        self._receive, self._progress = agent._event_loop.control.receive, agent._event_loop._progress
        self._is_last, self._kept = False, []
        agent._event_loop._progress, agent._event_loop.control.receive = self.progress, self.receive

    def progress(self):
        self._progress()
        self._is_last = True

    def receive(self, wait_s):
        arrivals = self._receive(wait_s)
        questions = [arrival for arrival in arrivals if isinstance(decode(arrival.frame), Landed)]
        self._kept += questions
        arrivals = [arrival for arrival in arrivals if arrival not in questions]
        if self._is_last and self._kept:
            self._take_back()
            arrivals, self._kept = [*self._kept, *arrivals], []
        self._is_last = False
        return arrivals


def take_back_before(kind, of):
    """Has the engine take the blocks back just before the agent sees such an event of the part of this name."""

    def meddle(agent, take_back):
        part = getattr(agent._event_loop, of)
        poll = part.poll

        def polled():
            events = poll()
            if any(isinstance(event, kind) for event in events):
                take_back()
            return events

        part.poll = polled

    return meddle


class LateEnd:
    """Shows the end of a gather into the target's own slot only while slots are handed out, and has the engine take the
    blocks back just before."""

    def __init__(self, agent, take_back):
        turns = agent._event_loop
        self._stager, self._take_back = turns.staging, take_back
        self._poll, self._move_slots = turns.staging.poll, turns._move_slots
        self._is_shown, self._kept = False, []
        turns.staging.poll, turns._move_slots = self.poll, self.move_slots

    def poll(self):
        events = self._poll()
        if self._is_shown:
            self._take_back()
            events, self._kept = [*self._kept, *events], []
            return events
        self._kept += [event for event in events if isinstance(event, Staged)]
        return [event for event in events if not isinstance(event, Staged)]

    def move_slots(self):
        if self._kept:
            self._is_shown = self._stager._is_changed = True
        self._move_slots()
        self._is_shown = False


def take_back_while_digesting(agent, take_back):
    """Has the engine take the blocks back while they are digested."""
    digester = agent._event_loop.digester
    run = digester.run

    def digested(max_bytes):
        events = run(max_bytes)
        if events:
            take_back()
        return events

    digester.run = digested


# While a transport of the agent's copies out of them, and while they are gathered into the target's own slots.
WHILE_COPYING, WHILE_GATHERING = take_back_before(TicketEnded, "transports"), take_back_before(Staged, "staging")
WAYS = {
    "read": ({}, LastLook, host_mover),
    "pushed": ({"direction": Direction.WRITE}, WHILE_COPYING, host_mover),
    "packed": ({"staging": PACKED}, WHILE_COPYING, wire_only),
    "packed in place": ({"staging": PACKED}, WHILE_GATHERING, host_mover),
    "packed in place, seen late": ({"staging": PACKED}, LateEnd, host_mover),
    "digested": ({"digest": DigestPolicy.FULL}, take_back_while_digesting, host_mover),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_may_have_been_read_later_is_refused_whenever_the_word_comes(make_rank, way, monkeypatch):
    """The engine says so before it writes over its blocks: so before a reader can say that it has read other bytes, and
    before a copy out of them ends. The order alone has to see to it, without a digest; and a digest of what has been
    written over is no sign of a transport that spoils bytes."""
    # Else it depends on the self-test's time whether something is packed in place.
    monkeypatch.setattr("kvferry.transport.selection.measurement.FAR_SLOWER", 1e9)
    monkeypatch.setattr("kvferry.transport.selection.diagnosis.FAR_SLOWER", 1e9)
    options, meddle, mover = WAYS[way]
    source = make_rank("p0", SOURCE, mover=mover)
    target = make_rank("d0", TARGET, **({"digest": DigestPolicy.OFF} | options))
    reference = leased(source)
    meddle(source.agent, lambda: source.agent.withdraw("r1"))
    target.fetch(source, reference)
    assert target.next_notice(FetchFailed).error.reason == "expired"
    target.next_notice(BlocksReleased)
    assert source.next_notice(LeaseEnded) == LeaseEnded("r1", "withdrawn")
