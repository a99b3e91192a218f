"""Two real agents: what a reference says of blocks is read at once, and counts only as the source grants it."""

import time
from dataclasses import replace

import pytest
from agent_support import (
    DEADLINE_S,
    NIXL,
    NUM_TOKENS,
    SOURCE,
    SOURCE_TABLES,
    TARGET,
    TARGET_TABLES,
    check,
    leased,
    moved,
)
from engines import oracle

from kvferry import new_lease_id
from kvferry.agent.config import staging_named
from kvferry.errors import RequestError
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Fetched, LeaseEnded
from kvferry.session.events import LeaseProgress, LeaseRequest
from kvferry.wire.messages import Reference

TRANSPORTS = ["shm", "cma", "tcp", NIXL]
ELSEWHERE = ((15, 9, 1, 3, 0, 7),)


@pytest.fixture
def pair(make_rank):
    def make(transport="shm"):
        direct = {"staging": staging_named("direct")}
        return make_rank("p0", SOURCE, transport, **direct), make_rank("d0", TARGET, transport, **direct)

    return make


def fetch(source, target, reference, tables, number=1):
    wanted = target.wanted(source, reference, TARGET_TABLES, NUM_TOKENS, f"q{number}")
    target.agent.fetch(replace(wanted, source_tables=tables))


def arrived(source, target, number=1):
    report = target.next_notice(Fetched).report
    check(target)
    assert source.next_notice(LeaseEnded) == LeaseEnded(f"r{number}", "done")
    return report


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_cache_is_read_while_its_source_is_asked(pair, transport):
    source, target = pair(transport)
    asked = moved(source, target)
    fetch(source, target, leased(source, "r2"), SOURCE_TABLES, 2)
    report = arrived(source, target, 2)
    assert (report.num_bytes, report.num_rows) == (asked.num_bytes, asked.num_rows)
    assert report.verified == "sampled"
    assert not [what for what, _ in target.agent.counts if what == "reads_repeated"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("tables", "why"), [(ELSEWHERE, "other_blocks"), (((1 << 40,) * 6,), ""), ((), ""), (SOURCE_TABLES * 3, "")]
)
def test_nothing_that_a_reference_says_of_blocks_makes_a_difference(pair, transport, tables, why):
    source, target = pair(transport)
    fetch(source, target, leased(source), tables)
    arrived(source, target)
    # On a busy machine the grant may be faster than the turn in which reading would have begun.
    assert {reason for what, reason in target.agent.counts if what == "reads_repeated"} <= {why}


@pytest.mark.parametrize(("tables", "why"), [(SOURCE_TABLES, "early"), (ELSEWHERE, "other_blocks")])
def test_what_was_read_before_it_was_computed_is_read_again(pair, tables, why):
    """Somebody knows of the blocks, and of the lease, before anything is in them."""
    source, target = pair()
    lease = LeaseRequest("r1", new_lease_id(), ((),), NUM_TOKENS, is_growing=True)
    fetch(source, target, source.agent.lease(lease), tables)
    deadline = time.monotonic() + DEADLINE_S
    while not target.agent.moved_bytes[Direction.READ]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    oracle.fill(source.memory, SOURCE_TABLES, TokenRange(0, NUM_TOKENS))
    source.agent.grow(LeaseProgress("r1", SOURCE_TABLES, NUM_TOKENS))
    arrived(source, target)
    assert target.agent.counts["reads_repeated", why] == 1


def test_a_claim_that_is_faster_than_the_lease_is_not_trusted(pair):
    source, target = pair()
    lease_id, party = new_lease_id(), source.agent.party
    fetch(source, target, Reference(party.engine_id, party.epoch, "r1", lease_id), SOURCE_TABLES)
    oracle.fill(source.memory, SOURCE_TABLES, TokenRange(0, NUM_TOKENS))
    deadline = time.monotonic() + DEADLINE_S
    while not source.agent._event_loop.source._early.knows(lease_id, target.agent.party):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    source.agent.lease(LeaseRequest("r1", lease_id, SOURCE_TABLES, NUM_TOKENS))
    arrived(source, target)
    assert target.agent.counts["reads_repeated", "early"] <= 1


@pytest.mark.parametrize("tables", [((-1, 3),), ((1 << 60,),), (("3",),)])
def test_blocks_that_no_source_could_name_are_refused_at_once(pair, tables):
    source, target = pair()
    with pytest.raises(RequestError, match="block ids of a source"):
        fetch(source, target, leased(source), tables)
