"""A target that may switch direction: where reading is far slower than writing, the source writes, if it can."""

import pytest
from playbook import play
from session_cases import OFFER, PEER, PROBE, TARGET_LAYOUTS, TRANSPORTS, answer
from session_cases import TARGET as US
from test_target_push import CLAIM, GRANT, HANDSHAKE, OURS, TIMING, VALID, WRITTEN

from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Connect, Count, Fetched, Send
from kvferry.session.events import PeerConnected, Tick
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.session import TargetSession
from kvferry.wire import messages as m

SLOW, FAST = PeerConnected(PEER, "nixl", "reads crawl", is_slow=True), PeerConnected(PEER, "nixl", "reads fly")
MET = [*HANDSHAKE[:2], (0.2, answer(OFFER), [Connect(PEER, OFFER)])]


def session(**ours) -> TargetSession:
    return TargetSession(
        TargetIdentity(US, "0.1.0", TARGET_LAYOUTS, transports=TRANSPORTS, probe=PROBE, **ours), TIMING
    )


def claimed(steps, target) -> Direction:
    (claim,) = [each.message for each in play(target, steps) if isinstance(each, Send)]
    return claim.direction


@pytest.fixture
def switching() -> TargetSession:
    return session(may_switch_direction=True)


def test_where_reading_is_far_slower_the_source_writes(switching):
    play(switching, [*MET, (0.3, SLOW, [OURS])])
    assert switching.may_be_written()
    (fetched,) = play(
        switching,
        [
            (0.4, answer(m.Reached("nixl", "writes fly")), [CLAIM]),
            (0.5, GRANT, []),
            (0.6, WRITTEN, []),
            (0.7, VALID, [Fetched]),
        ],
    )
    assert (fetched.report.transport, fetched.report.choice) == ("nixl", "writes fly")
    assert not switching.may_be_written()


def test_where_it_is_not_it_reads(switching):
    assert claimed([*MET, (0.3, FAST, [Send])], switching) is Direction.READ


def test_who_was_told_to_pull_pulls():
    assert claimed([*MET, (0.3, SLOW, [Send])], session()) is Direction.READ


def test_a_source_that_cannot_connect_is_read_from_slowly(switching):
    play(switching, [*MET, (0.3, SLOW, [OURS])])
    refusal = m.Refusal(m.Reason.UNREACHABLE, "no transport reaches the target", "other host", "", "")
    assert claimed([(0.4, answer(refusal), [Count, Send])], switching) is Direction.READ


def test_so_is_one_that_does_not_answer(switching):
    play(switching, [*MET, (0.3, SLOW, [OURS])])
    commands = switching.handle(Tick(), 0.3 + TIMING.handshake_s)
    assert [type(command) for command in commands] == [Count, Send]
    assert commands[1].message.direction is Direction.READ
