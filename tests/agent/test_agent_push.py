"""Push: two real agents over real transports; the source writes into the target's blocks."""

import pytest

from kvferry.agent import new_lease_id
from kvferry.plan.copies import Direction
from kvferry.plan.describe import EngineShape
from kvferry.plan.tokens import TokenRange
from kvferry.session.events import Fetched, LeaseWanted, SourceFree
from kvferry.testing import oracle

SOURCE = EngineShape(1, 1, block_tokens=4, num_blocks=16, format="token-major")
TARGET = EngineShape(1, 1, block_tokens=6, num_blocks=9, format="block-head-major")
SOURCE_TABLES, TARGET_TABLES = ((3, 9, 1, 15, 0, 7),), ((8, 0, 5, 2),)
NUM_TOKENS = 21


def leased(source, request_id="r1"):
    oracle.fill(source.memory, SOURCE_TABLES, TokenRange(0, NUM_TOKENS))
    return source.agent.lease(LeaseWanted(request_id, new_lease_id(), SOURCE_TABLES, NUM_TOKENS))


@pytest.mark.parametrize("transport", ["shm", "cma", "tcp", "nixl", "auto"])
def test_a_source_writes_into_another_layout(make_rank, transport):
    if transport == "nixl":
        pytest.importorskip("nixl_cu13", reason="the nixl extra is not installed")
    source = make_rank("p0", SOURCE, transport)
    target = make_rank("d0", TARGET, transport, direction=Direction.WRITE)
    for request_id in ("1", "2"):
        reference = leased(source, f"r{request_id}")
        target.agent.fetch(target.wanted(source, reference, TARGET_TABLES, NUM_TOKENS, f"q{request_id}"))
        report = target.next_notice(Fetched).report
        assert report.num_bytes == NUM_TOKENS * 2 * 2 * 4 * 8 * 4
        assert report.verified == "sampled"
        assert transport in (report.transport, "auto")
        assert source.next_notice(SourceFree) == SourceFree(f"r{request_id}", "done")
