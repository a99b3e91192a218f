"""Two real agents over a transport whose reads crawl: with `may_switch_direction` the source writes."""

import time

import pytest
from engines import oracle
from faulty_transport import FaultyTransport

from kvferry import new_lease_id
from kvferry.plan.description.describe import EngineShape
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Direction
from kvferry.session.commands import Fetched, LeaseEnded
from kvferry.session.events import LeaseRequest
from kvferry.session.target.read_strategy import NO_STAGING

SHAPE = EngineShape(1, 1, block_tokens=4, num_blocks=16, format="token-major")
SOURCE_TABLES, TARGET_TABLES, NUM_TOKENS = ((3, 9, 1),), ((8, 0, 5),), 10
CRAWL_S = 0.2


class Crawling(FaultyTransport):
    """Its reads are not said to have ended before a while has passed."""

    def __init__(self, inner):
        super().__init__(inner)
        self.reads, self.late = {}, []

    def post(self, peer, copies, direction):
        ticket = super().post(peer, copies, direction)
        if direction is Direction.READ:
            self.reads[ticket] = time.monotonic() + CRAWL_S
        return ticket

    def poll(self):
        now, ended = time.monotonic(), [*self.late, *super().poll()]
        self.late = [completion for completion in ended if self.reads.get(completion.ticket, 0.0) > now]
        return [completion for completion in ended if completion not in self.late]


@pytest.mark.parametrize("may_switch_direction", [False, True])
@pytest.mark.slow
def test_a_source_writes_where_reading_crawls(make_rank, may_switch_direction):
    source, target = (
        make_rank("p0", SHAPE),
        make_rank(
            "d0",
            SHAPE,
            wrap=Crawling,
            may_switch_direction=may_switch_direction,
            digest=DigestPolicy.FULL,
            staging=NO_STAGING,
        ),
    )
    oracle.fill(source.memory, SOURCE_TABLES, TokenRange(0, NUM_TOKENS))
    reference = source.agent.lease(LeaseRequest("r1", new_lease_id(), SOURCE_TABLES, NUM_TOKENS))
    target.agent.fetch(target.wanted(source, reference, TARGET_TABLES, NUM_TOKENS))
    # Every byte was compared with the source's own.
    report = target.next_notice(Fetched).report
    assert report.verified == DigestPolicy.FULL
    source.next_notice(LeaseEnded)
    (met,) = target.agent.peers
    (finding,) = met.findings
    assert "reading over shm is" in finding.what
    # Said loudly in any case: something is wrong with these reads, though nothing suffers from it here.
    assert target.agent.counts["transport_warnings", "shm"] == 1
    written, read = source.agent.moved_bytes[Direction.WRITE], target.agent.moved_bytes[Direction.READ]
    assert (written, read) == ((report.num_bytes, 0) if may_switch_direction else (0, report.num_bytes))
    # Who writes has met whom it writes to.
    assert len(source.agent.peers) == int(may_switch_direction)
