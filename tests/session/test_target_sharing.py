"""The target of a read that is shared: it reads a part, its source writes the other, and both must have ended."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from playbook import play
from session_cases import (
    ABORT,
    LANDED,
    MODEL,
    OFFER,
    OURS,
    PEER,
    PROBE,
    REFERENCE,
    RENEW,
    SOURCE_LAYOUT,
    TRANSPORTS,
    WELCOME,
    answer,
    phases,
)
from session_cases import TARGET as US
from session_cases import TARGET_LAYOUTS as LAYOUTS

from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Direction
from kvferry.plan.programs.program import bind, region_starts
from kvferry.plan.programs.request import copies_for
from kvferry.plan.programs.stretches import parted
from kvferry.plan.routing.route import route
from kvferry.plan.strategy.calibration import TYPICAL_HOST
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import (
    Acquire,
    BlocksReleased,
    Cancel,
    CheckLiveness,
    Connect,
    Count,
    Disconnect,
    Fetched,
    FetchFailed,
    Post,
    Send,
)
from kvferry.session.events import AbortRequest, FetchRequest, PeerConnected, Tick, TicketEnded
from kvferry.session.keys import ReadKey
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.read_strategy import AUTO, NO_STAGING, StagingPolicy
from kvferry.session.target.session import TargetSession
from kvferry.session.timing import Timing
from kvferry.wire import messages as m

TIMING = Timing(heartbeat_s=1.0, missed_heartbeats=3, resend_s=0.5, handshake_s=5.0, transfer_s=20.0, fence_s=4.0)
SOURCE_TABLES, TABLES, RANGES = ((3, 5, 6),), ((0, 2),), (TokenRange(0, 12),)
WANTED, KEY = FetchRequest("q1", REFERENCE, (PEER.address,), TABLES, RANGES), ReadKey("q1", PEER)
READ_FROM = 8
"""Half of 12 tokens, rounded to whole blocks of the source."""
CLAIM = Send(PEER, m.Claim(US, "q1", REFERENCE, 12, (0,), Direction.READ, TABLES, RANGES, read_from=READ_FROM))
PLAIN_CLAIM = Send(PEER, m.Claim(US, "q1", REFERENCE, 12, (0,)))
COSTS = replace(TYPICAL_HOST, row_s=1.0, sharing_s=1e-3)


GRANT, VALID = answer(m.Grant("q1", SOURCE_TABLES)), answer(m.Valid("q1"))
WRITTEN, READ = answer(m.Written("q1", 1024, 16)), TicketEnded(KEY, "")
CLEAN = answer(m.Aborted("q1", "epoch-1"))
REFUSED = answer(m.Refusal(m.Reason.TRANSPORT, "the write failed", "peer reset", "", "q1"))
FAILED = [Count, FetchFailed, ABORT]


def target(*, costs=COSTS, wanted=WANTED, may_switch_direction=True, staging=NO_STAGING, revocable=frozenset()):
    """One that has met its source, up to what it says then."""
    moving = {
        "transports": TRANSPORTS,
        "probe": PROBE,
        "staging": staging,
        "may_switch_direction": may_switch_direction,
        "revocable": revocable,
    }
    ours = TargetIdentity(US, "0.1.0", LAYOUTS, **moving)
    session = TargetSession(ours, TIMING)
    play(session, [(0.0, wanted, [Send]), (0.1, answer(WELCOME), [Send]), (0.2, answer(OFFER), [Connect])])
    return session, session.handle(PeerConnected(PEER, "cma", "cma 9 GB/s", costs), 0.3)


def claimed():
    session, said = target()
    assert said == [OURS]
    play(session, [(0.4, answer(m.Reached("cma", "cma 8 GB/s")), [CLAIM])])
    return session


def moving():
    session = claimed()
    play(session, [(0.5, GRANT, [Post])])
    return session


def test_a_part_is_read_and_the_other_is_written():
    session = claimed()
    (post,) = play(session, [(0.5, GRANT, [Post])])
    program = session._reads.bindings.to((PEER,), session._peers).programs[PEER]
    wanted = copies_for(program, SOURCE_TABLES, TABLES, RANGES, parted(READ_FROM)[1])
    assert (post.key, post.direction, post.copies.num_bytes) == (KEY, Direction.READ, wanted.num_bytes)
    assert post.copies.target.tolist() == wanted.target.tolist()
    (fetched,) = play(session, [(0.6, READ, []), (0.8, WRITTEN, [LANDED]), (0.9, VALID, [Fetched])])
    report = fetched.report
    assert report.num_bytes == 12 * MODEL.bytes_per_token == wanted.num_bytes + 1024
    assert (report.num_rows, report.strategy) == (len(wanted) + 16, "direct")
    assert (session.num_open(), session.may_be_written()) == (0, False)


ORDERS = [order for order in permutations(["grant", "read", "written"]) if order.index("grant") < order.index("read")]


@pytest.mark.parametrize("order", ORDERS)
def test_it_has_landed_when_both_have_ended_in_any_order(order):
    events = {"grant": (GRANT, [Post]), "read": (READ, []), "written": (WRITTEN, [])}
    steps = [(0.5, *events[name]) for name in order]
    steps[-1] = (0.5, steps[-1][1], [LANDED])
    (fetched,) = play(claimed(), [*steps, (0.6, WRITTEN, []), (0.7, VALID, [Fetched])])
    assert (fetched.report.num_bytes, fetched.report.num_rows) == (12 * MODEL.bytes_per_token, 48)


def test_the_wire_begins_with_the_first_word():
    (fetched,) = play(
        claimed(), [(0.5, WRITTEN, []), (0.7, GRANT, [Post]), (0.8, READ, [LANDED]), (1, VALID, [Fetched])]
    )
    assert phases(fetched) == {"handshake": 0.4, "claim": 0.1, "wire": 0.3, "verify": 0.2}


def test_what_is_said_twice_counts_once():
    steps = [(0.5, WRITTEN, []), (0.5, WRITTEN, []), (0.5, GRANT, [Post]), (0.5, GRANT, []), (0.5, WRITTEN, [])]
    (fetched,) = play(claimed(), [*steps, (0.6, READ, [LANDED]), (0.7, VALID, [Fetched])])
    assert (fetched.report.num_bytes, fetched.report.num_rows) == (12 * MODEL.bytes_per_token, 48)


def test_what_is_read_alone_is_not_priced_as_if_it_were_shared():
    """In between there are rows that are worth a scatter, unless the source writes half of them."""
    policy = StagingPolicy((Strategy.DIRECT, Strategy.SCATTER), 1 << 20)
    tables, starts = ((3, 4, 5),), region_starts(SOURCE_LAYOUT, LAYOUTS[0])
    copies = copies_for(
        bind(route((SOURCE_LAYOUT,), LAYOUTS).between(0, 0), SOURCE_LAYOUT, LAYOUTS[0]), tables, TABLES, RANGES
    )
    dearer = [replace(TYPICAL_HOST, row_s=row_s) for row_s in np.geomspace(1e-9, 1.0, 400).tolist()]
    costs = next(each for each in dearer if policy.before_read(copies, each, starts) is Strategy.SCATTER)
    both = replace(costs, sharing_s=1e-12)
    assert policy.before_read(copies, both, starts) is Strategy.DIRECT
    session, said = target(costs=both, may_switch_direction=False, staging=policy)
    assert said == [PLAIN_CLAIM]
    play(session, [(0.4, answer(m.Grant("q1", tables)), [Acquire])])


def test_our_part_goes_straight_however_few_runs_it_has_at_the_source():
    """Blocks that are neighbours there would be worth a scatter, if we read all."""
    policy = StagingPolicy((Strategy.DIRECT, Strategy.SCATTER), 1 << 20)
    alone, _ = target(staging=policy, may_switch_direction=False)
    grant = answer(m.Grant("q1", ((3, 4, 5),)))
    play(alone, [(0.4, grant, [Acquire])])
    session, said = target(staging=policy)
    assert said == [OURS]
    play(session, [(0.4, answer(m.Reached("cma", "")), [CLAIM]), (0.5, grant, [Post])])


def test_valid_before_it_has_landed_says_nothing():
    play(moving(), [(0.6, VALID, []), (0.7, READ, []), (0.8, VALID, []), (0.9, WRITTEN, [LANDED])])


def test_asked_again_the_source_says_its_grant_and_how_far_it_is():
    """Either word may be lost."""
    session = claimed()
    play(session, [(0.5, WRITTEN, []), (1.0, Tick(), [CLAIM]), (1.1, GRANT, [Post])])
    play(session, [(1.7, Tick(), []), (1.8, READ, [LANDED])])
    session = moving()
    play(session, [(1.0, Tick(), [CLAIM, RENEW]), (1.1, GRANT, []), (1.2, READ, []), (1.6, Tick(), [CLAIM])])
    play(session, [(1.7, GRANT, []), (1.7, WRITTEN, [LANDED])])


def test_one_that_is_not_granted_waits_for_the_source_alone():
    session = claimed()
    play(session, [(0.5, AbortRequest("q1"), FAILED), (0.6, GRANT, []), (0.6, WRITTEN, [])])
    assert session.may_be_written()
    assert session.written_ids() == {"q1"}
    play(session, [(0.7, CLEAN, [BlocksReleased("q1")])])


def test_one_that_is_written_and_not_granted_waits_for_nobody():
    play(claimed(), [(0.5, WRITTEN, []), (0.6, AbortRequest("q1"), [*FAILED, BlocksReleased("q1")])])


@pytest.mark.parametrize("first", ["read", "source"])
def test_one_that_moves_waits_for_both(first):
    session = moving()
    play(session, [(0.6, AbortRequest("q1"), [Count, FetchFailed, Cancel(KEY), ABORT])])
    ends = [TicketEnded(KEY, "cancelled"), CLEAN]
    ends = ends if first == "read" else ends[::-1]
    play(session, [(0.7, ends[0], [])])
    assert session.num_open() == 1
    assert session.may_be_written() == (first == "read")
    play(session, [(0.8, ends[1], [BlocksReleased("q1")])])


def test_one_of_which_one_part_has_ended_waits_for_the_other():
    play(moving(), [(0.6, READ, []), (0.7, AbortRequest("q1"), FAILED), (0.8, CLEAN, [BlocksReleased("q1")])])
    session = moving()
    play(session, [(0.6, WRITTEN, []), (0.7, AbortRequest("q1"), [Count, FetchFailed, Cancel(KEY), ABORT])])
    play(session, [(0.7, CLEAN, []), (0.8, READ, [BlocksReleased("q1")])])


@pytest.mark.parametrize(
    ("event", "said", "reason"),
    [(REFUSED, [Count, FetchFailed, Cancel(KEY), ABORT], "transport"), (TicketEnded(KEY, "gone"), FAILED, "transport")],
)
def test_what_goes_wrong_on_either_side_ends_it(event, said, reason):
    session = moving()
    commands = play(session, [(0.6, event, said)])
    assert next(each.error.reason for each in commands if isinstance(each, FetchFailed)) == reason
    assert session.num_open() == 1
    ends = (
        [(0.7, CLEAN, []), (0.8, READ, [BlocksReleased("q1")])]
        if event is REFUSED
        else [(0.8, CLEAN, [BlocksReleased("q1")])]
    )
    play(session, ends)


def test_a_grant_that_cannot_be_leaves_it_to_the_source():
    session = claimed()
    play(session, [(0.5, answer(m.Grant("q1", ((3, 3, 99),))), FAILED), (0.6, CLEAN, [BlocksReleased("q1")])])


def test_a_source_that_cannot_reach_us_is_read():
    session, _ = target()
    refusal = answer(m.Refusal(m.Reason.UNREACHABLE, "no transport reaches the target", "cma: not allowed", "", ""))
    play(session, [(0.4, refusal, [Count, PLAIN_CLAIM]), (0.5, GRANT, [Post]), (0.6, READ, [LANDED])])


def test_a_source_that_is_lost_may_still_write():
    session = moving()
    play(session, [(1.4, Tick(), [CLAIM, RENEW]), (2.6, Tick(), [CheckLiveness, CLAIM, Send])])
    commands = session.handle(Tick(), 4.6)
    assert {type(each) for each in commands} >= {FetchFailed, Cancel, Disconnect}
    play(session, [(4.7, TicketEnded(KEY, "disconnected"), [])])
    assert session.written_ids() == {"q1"}
    play(session, [(4.8, CLEAN, [BlocksReleased("q1"), Disconnect])])


@pytest.mark.parametrize(
    "alone",
    [
        {"may_switch_direction": False},
        {"costs": replace(COSTS, sharing_s=0.0)},
        {"costs": replace(COSTS, row_s=1e-9)},
        {"costs": replace(COSTS, num_at_once=1.0)},
    ],
    ids=["a pull was asked for", "only one side can", "too little to gain", "one core"],
)
def test_what_is_read_alone(alone):
    _, said = target(**alone)
    assert said == [PLAIN_CLAIM]


def test_what_cannot_be_cut_is_read_alone_or_packed():
    """Four tokens are one block of the source."""
    wanted = replace(WANTED, ranges=(TokenRange(0, 4),))
    _, said = target(wanted=wanted)
    assert [each.message.read_from for each in said] == [0]
    session, said = target(wanted=wanted, staging=StagingPolicy(AUTO, 1 << 20))
    assert said == [OURS]
    (claim,) = session.handle(answer(m.Reached("cma", "")), 0.4)
    assert (claim.message.strategy, claim.message.read_from) == (Strategy.PACK, 0)


def test_where_only_the_source_still_writes_it_has_time_to_notice_that_it_cannot():
    session = moving()
    session.handle(READ, 0.6)
    for second in range(1, 4):
        assert RENEW in session.handle(Tick(), float(second))
        session.handle(answer(m.Renewed(())), second + 0.1)
