"""Push: real agents over real transports; the sources write into the target's blocks."""

import pytest
from agent_support import BYTES_PER_TOKEN, NIXL, NUM_TOKENS, SOURCE, TARGET, check, leased, moved, moved_between_all

from kvferry.plan.description.describe import EngineShape
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import BlocksReleased, FetchFailed, LeaseEnded
from kvferry.session.timing import Timing

SOON = Timing(lease_s=20.0, heartbeat_s=0.2, resend_s=0.1, handshake_s=5.0, transfer_s=20.0, fence_s=0.3)


@pytest.mark.parametrize("transport", ["shm", "cma", "tcp", NIXL, "auto"])
def test_a_source_writes_into_another_layout(make_rank, transport):
    source = make_rank("p0", SOURCE, transport)
    target = make_rank("d0", TARGET, transport, direction=Direction.WRITE)
    for number in (1, 2):
        report = moved(source, target, number)
        assert (report.num_bytes, report.verified) == (NUM_TOKENS * BYTES_PER_TOKEN, "sampled")
        assert transport in (report.transport, "auto")


@pytest.mark.parametrize(("wide", "narrow"), [(1, 2), (2, 1), (4, 2), (1, 4)])
def test_ranks_of_another_parallelism_write_what_each_target_rank_needs(make_engine, wide, narrow):
    sources = make_engine("p0", EngineShape(wide, 1, 4, 16, "token-major"))
    targets = make_engine("d0", EngineShape(narrow, 1, 6, 9, "block-head-major"), direction=Direction.WRITE)
    assert {report.verified for report in moved_between_all(sources, targets)} == {"sampled"}


@pytest.mark.parametrize("tables", [((7,),), ((8, 0, 5, 99),)], ids=["too few", "out of range"])
def test_blocks_that_do_not_fit_fail_only_that_request(make_rank, tables):
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET, direction=Direction.WRITE)
    target.agent.fetch(target.wanted(source, leased(source), tables, NUM_TOKENS))
    assert target.next_notice(FetchFailed).error.reason == "out_of_range"
    target.next_notice(BlocksReleased)
    check(target, num_tokens=0)
    source.next_notice(LeaseEnded)
    moved(source, target, 2)


@pytest.fixture
def gated(make_rank, gate):
    """A source whose writes wait while the gate is shut, and a target to which one is under way."""
    source = make_rank("p0", SOURCE, timing=SOON, wrap=gate.behind)
    target = make_rank("d0", TARGET, timing=SOON, direction=Direction.WRITE)
    moved(source, target, 0)
    gate.hold(source, target)
    return source, target, gate


def test_both_sides_keep_their_blocks_until_the_ticket_of_an_aborted_push_has_ended(gated):
    source, target, gate = gated
    target.agent.abort("q1")
    assert target.next_notice(FetchFailed).error.reason == "aborted"
    assert source.next_notice(LeaseEnded).reason == "aborted"
    assert target.next_notice(BlocksReleased) == BlocksReleased("q1")
    assert source.agent.num_open_reads == 0
    gate.open()
    moved(source, target, 2)


def test_a_source_that_has_gone_is_noticed_at_its_address(gated):
    source, target, _ = gated
    source.agent.close()
    assert target.next_notice(FetchFailed).error.reason == "peer_lost"
    assert target.next_notice(BlocksReleased) == BlocksReleased("q1")
    check(target, num_tokens=NUM_TOKENS)
