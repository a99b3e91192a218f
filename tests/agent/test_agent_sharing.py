"""Reads that are shared: real agents over transports that copy, of which each side moves a part."""

import pytest
from agent_support import BYTES_PER_TOKEN, NIXL, NUM_TOKENS, SOURCE, TARGET, moved, moved_between_all

from kvferry.plan.description.describe import EngineShape
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import BlocksReleased, FetchFailed, LeaseEnded
from kvferry.session.target.read_strategy import NO_STAGING
from kvferry.session.timing import Timing

SOON = Timing(lease_s=20.0, heartbeat_s=0.2, resend_s=0.1, handshake_s=5.0, transfer_s=20.0, fence_s=0.3)


@pytest.fixture(autouse=True)
def worth_sharing(monkeypatch):
    """However little there is to move, on however few cores."""
    monkeypatch.setattr("kvferry.agent.transports.costs.SHARING_S", 1e-15)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    # A busy machine may feign that one direction is slower.
    monkeypatch.setattr("kvferry.transport.selection.measurement.FAR_SLOWER", 1e9)
    monkeypatch.setattr("kvferry.transport.selection.diagnosis.FAR_SLOWER", 1e9)


def written_and_read(sources, targets):
    """How much was written by the sources, and read by the targets."""
    written = sum(source.agent.moved_bytes[Direction.WRITE] for source in sources)
    return written, sum(target.agent.moved_bytes[Direction.READ] for target in targets)


@pytest.mark.parametrize("transport", ["shm", "cma", NIXL, "tcp"])
def test_both_sides_move_a_part_where_both_copy(make_rank, transport):
    source = make_rank("p0", SOURCE, transport)
    target = make_rank("d0", TARGET, transport, may_switch_direction=True, digest=DigestPolicy.FULL, staging=NO_STAGING)
    num_bytes = NUM_TOKENS * BYTES_PER_TOKEN
    for number in (1, 2):
        report = moved(source, target, number)
        assert (report.num_bytes, report.verified, report.strategy) == (num_bytes, "full", "direct")
    written, read = written_and_read([source], [target])
    assert written + read == 2 * num_bytes
    assert 0 < written < 2 * num_bytes or (transport == "tcp" and written == 0)


@pytest.mark.parametrize(("wide", "narrow"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4)])
def test_ranks_of_another_parallelism_share_what_each_target_rank_needs(make_engine, wide, narrow):
    sources = make_engine("p0", EngineShape(wide, 1, 4, 16, "token-major"))
    targets = make_engine(
        "d0",
        EngineShape(narrow, 1, 6, 9, "block-head-major"),
        may_switch_direction=True,
        staging=NO_STAGING,
        digest=DigestPolicy.FULL,
    )
    assert {report.verified for report in moved_between_all(sources, targets)} == {"full"}
    assert min(written_and_read(sources, targets)) > 0


def test_what_is_to_be_pulled_is_pulled(make_rank):
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET, may_switch_direction=False, staging=NO_STAGING)
    moved(source, target)
    assert written_and_read([source], [target]) == (0, NUM_TOKENS * BYTES_PER_TOKEN)


def test_blocks_wait_for_the_part_that_is_written(make_rank, gate):
    """Ours has long been read when the request is aborted."""
    source = make_rank("p0", SOURCE, timing=SOON, wrap=gate.behind)
    target = make_rank("d0", TARGET, timing=SOON, may_switch_direction=True, staging=NO_STAGING)
    moved(source, target, 0)
    gate.hold(source, target)
    target.agent.abort("q1")
    assert target.next_notice(FetchFailed).error.reason == "aborted"
    assert target.notices.empty()
    gate.open()
    assert target.next_notice(BlocksReleased) == BlocksReleased("q1")
    assert source.next_notice(LeaseEnded) == LeaseEnded("r1", "aborted")
