"""A quote adds up: pairs, bytes and rows are those of the copies, and a rank's own pairs share its link."""

from dataclasses import replace

import pytest

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route
from kvferry.plan.strategy.calibration import Costs
from kvferry.plan.strategy.request_estimate import Quote, quote

COSTS = Costs(
    latency_s=1e-5,
    row_s=1e-6,
    wire_bytes_per_s=1e9,
    gather_bytes_per_s=1e10,
    scatter_bytes_per_s=1e10,
    copy_row_s=1e-8,
    launch_s=1e-5,
    slot_bytes=1 << 20,
)
MODEL = attention(num_layers=2, num_heads=6, head_dim=4, dtype="float16", item_bytes=2)
SOURCES = describe(MODEL, EngineShape(3, 1, 4, 8, "token-major"), 1 << 41)
TARGETS = describe(MODEL, EngineShape(2, 1, 16, 4, "token-major"), 1 << 52)
TABLES = [[5, 4, 2, 3]], [[1]]
RANGES = [TokenRange(2, 15)]


def test_every_pair_has_the_bytes_and_rows_of_its_copies():
    found = quote((SOURCES, TARGETS), TABLES, RANGES, COSTS)
    assert found.route == route(SOURCES, TARGETS)
    assert [(pair.source_rank, pair.target_rank) for pair in found.pairs] == [(0, 0), (1, 0), (1, 1), (2, 1)]
    for pair in found.pairs:
        legs = found.route.between(pair.source_rank, pair.target_rank)
        copies = copies_for(bind(legs, SOURCES[pair.source_rank], TARGETS[pair.target_rank]), *TABLES, RANGES)
        assert pair.legs == legs
        assert (pair.num_bytes, pair.num_pieces, pair.num_rows) == (copies.num_bytes, copies.pieces, len(copies))
    assert sum(pair.num_bytes for pair in found.pairs) == 13 * MODEL.bytes_per_token


def test_the_busiest_rank_decides_how_long_it_takes():
    found = quote((SOURCES, TARGETS), TABLES, RANGES, COSTS)
    first, shared, other, last = (pair.choice.predicted_s for pair in found.pairs)
    assert found.predicted_s == pytest.approx(max(first + shared, shared + other, other + last))
    fan_out = [replace(pair, target_rank=index) for index, pair in enumerate([found.pairs[1]] * 3)]
    fan_in = [replace(pair, source_rank=index) for index, pair in enumerate([found.pairs[1]] * 4)]
    assert Quote(found.route, tuple(fan_out)).predicted_s == pytest.approx(3 * shared)
    assert Quote(found.route, tuple(fan_in)).predicted_s == pytest.approx(4 * shared)
    assert Quote(found.route, ()).predicted_s == 0
