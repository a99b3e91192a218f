"""What each way of moving rows costs, and which one is chosen."""

from dataclasses import replace
from math import fsum, inf, isclose, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import ConfigurationError
from kvferry.plan.programs.copies import NOTHING, Copies
from kvferry.plan.programs.program import RegionStarts
from kvferry.plan.strategy.calibration import TYPICAL_AGENTS, TYPICAL_HOST, Costs, typical_device
from kvferry.plan.strategy.cost_model import Counts, choose, counts_of, prices
from kvferry.plan.strategy.strategies import Side, Strategy, staged

KIB, MIB = 1 << 10, 1 << 20
ONE_REGION = np.zeros(0, np.uint64)
many = settings(max_examples=150)


def rows_of(row_bytes, total=64 * MIB, runs_of=1):
    """A transfer in rows of one size, `runs_of` of which are contiguous at the source."""
    num_rows = total // row_bytes
    return Counts(total, num_rows, -(-num_rows // runs_of))


def seconds(counts, costs, strategy):
    return next(price.seconds for price in prices(counts, costs) if price.strategy is strategy)


def gain(counts, costs):
    """How many times faster pack is than direct."""
    return seconds(counts, costs, Strategy.DIRECT) / seconds(counts, costs, Strategy.PACK)


positive = st.floats(1e-9, 1e-2)
rates = st.floats(1e6, 1e12)


@st.composite
def some_costs(draw):
    return Costs(
        latency_s=draw(positive),
        row_s=draw(positive),
        wire_bytes_per_s=draw(rates),
        gather_bytes_per_s=draw(rates),
        scatter_bytes_per_s=draw(rates),
        copy_row_s=draw(positive),
        launch_s=draw(positive),
        slot_bytes=draw(st.integers(1, 1 << 28)),
        num_at_once=draw(st.sampled_from([1.0, 1.5, 3.0])),
        fan_in=draw(st.sampled_from([1.0, 1.5, 8.0])),
        rows_fan_in=draw(st.sampled_from([1.0, 1.5, 8.0])),
        staging_s=draw(st.sampled_from([0.0, 1e-6, 1.0])),
        fan_out=draw(st.sampled_from([1.0, 4.0])),
    )


def alone_and_shared(counts, costs):
    """The prices of moving straight, without and with the help of the sources."""
    both = prices(counts, replace(costs, sharing_s=0.0)), prices(counts, costs)
    return tuple(next(price for price in found if price.strategy is Strategy.DIRECT) for found in both)


@st.composite
def some_counts(draw):
    num_rows = draw(st.integers(1, 1 << 24))
    return Counts(num_rows * draw(st.integers(1, 1 << 20)), num_rows, draw(st.integers(1, num_rows)))


def test_agents_that_know_nothing_better_of_each_other_do_not_fill_tiny_slots():
    """What was pushed was priced as if nobody had to ask for slots: 64 KiB at a time it took many times as long."""
    pushed = Counts(num_bytes=5_726_208, num_rows=432, num_source_runs=432)
    direct, second, _ = prices(pushed, replace(TYPICAL_AGENTS, slot_bytes=64 * KIB))
    assert direct.strategy is Strategy.DIRECT
    assert second.seconds > 3 * direct.seconds


# The calibration, against what was measured with 64 MiB (docstring of TYPICAL_HOST).


@pytest.mark.parametrize("row_bytes", [256, 512, 1 * KIB, 2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB])
def test_on_a_host_staging_wins_below_64_kib(row_bytes):
    assert choose(rows_of(row_bytes), TYPICAL_HOST).strategy is Strategy.PACK


@pytest.mark.parametrize("total", [64 * MIB, 1024 * MIB])
@pytest.mark.parametrize("row_bytes", [128 * KIB, 256 * KIB, 1 * MIB])
def test_on_a_host_long_rows_go_direct_however_many_they_are(row_bytes, total):
    assert choose(rows_of(row_bytes, total), TYPICAL_HOST).strategy is Strategy.DIRECT


def test_on_a_host_the_two_meet_near_64_kib():
    assert 0.9 < gain(rows_of(64 * KIB), TYPICAL_HOST) < 1.15


@pytest.mark.parametrize(
    ("row_bytes", "least", "most"),
    [
        (256, 20, 40),
        (512, 15, 25),
        (8 * KIB, 1.8, 2.6),
        (16 * KIB, 1.1, 2.0),
        (32 * KIB, 1.0, 1.6),
        (128 * KIB, 0.7, 0.9),
    ],
)
def test_on_a_host_staging_gains_what_was_measured(row_bytes, least, most):
    assert least <= gain(rows_of(row_bytes), TYPICAL_HOST) <= most


def test_on_a_host_direct_rows_take_what_was_measured():
    assert isclose(seconds(rows_of(256), TYPICAL_HOST, Strategy.DIRECT), 0.877, rel_tol=0.15)
    assert isclose(seconds(rows_of(512), TYPICAL_HOST, Strategy.DIRECT), 0.407, rel_tol=0.15)
    assert isclose(seconds(rows_of(4 * KIB), TYPICAL_HOST, Strategy.DIRECT), 0.053, rel_tol=0.15)


def test_on_a_host_the_pipeline_takes_what_was_measured_with_its_slots():
    measured_slots = replace(TYPICAL_HOST, slot_bytes=8 * MIB)
    assert isclose(seconds(rows_of(512), measured_slots, Strategy.PACK), 0.0213, rel_tol=0.15)


def test_one_run_at_the_source_is_scattered_not_gathered():
    choice = choose(rows_of(512, runs_of=1024), TYPICAL_HOST)
    assert choice.strategy is Strategy.SCATTER


def test_a_device_packs_small_rows_near_the_rate_of_its_link():
    costs = typical_device(50e9)
    choice = choose(rows_of(256, 1024 * MIB), costs)
    assert choice.strategy is Strategy.PACK
    assert choice.predicted_s < 1.1 * 1024 * MIB / 50e9
    assert choose(rows_of(16 * MIB, 1024 * MIB), costs).strategy is Strategy.DIRECT


# Laws.


@many
@given(some_counts(), some_costs(), st.integers(1, 1 << 20))
def test_more_rows_are_never_cheaper(counts, costs, more):
    larger = replace(counts, num_rows=counts.num_rows + more, num_source_runs=counts.num_source_runs + more)
    for strategy in Strategy:
        assert seconds(larger, costs, strategy) >= seconds(counts, costs, strategy) * (1 - 1e-12)


@many
@given(some_counts(), some_costs(), st.floats(1, 1000), st.sampled_from(["wire", "gather", "scatter"]))
def test_a_faster_stage_is_never_dearer(counts, costs, times, stage):
    name = f"{stage}_bytes_per_s"
    rate = {"wire": costs.wire_bytes_per_s, "gather": costs.gather_bytes_per_s, "scatter": costs.scatter_bytes_per_s}[
        stage
    ]
    faster = replace(costs, **{name: rate * times})
    for strategy in Strategy:
        assert seconds(counts, faster, strategy) <= seconds(counts, costs, strategy) * (1 + 1e-12)


@many
@given(some_counts(), some_costs())
def test_a_stage_costs_at_least_the_slowest_and_at_most_all_in_turn(counts, costs):
    costs = replace(costs, num_at_once=3.0, fan_in=1.0, staging_s=0.0)
    stages = stages_of_pack(counts, costs)
    found = seconds(counts, costs, Strategy.PACK) - costs.latency_s
    depth = max(1.0, counts.num_bytes / costs.slot_bytes)
    assert isclose(found, max(stages) + (fsum(stages) - max(stages)) / depth, rel_tol=1e-6)
    assert max(stages) * (1 - 1e-6) <= found <= fsum(stages) * (1 + 1e-6)


def stages_of_pack(counts, costs):
    num_slots = -(-counts.num_bytes // costs.slot_bytes)
    copied = num_slots * costs.launch_s + counts.num_rows * costs.copy_row_s
    return [
        copied + counts.num_bytes / costs.gather_bytes_per_s,
        num_slots * costs.row_s + counts.num_bytes / costs.wire_bytes_per_s,
        copied + counts.num_bytes / costs.scatter_bytes_per_s,
    ]


@many
@given(some_counts(), some_costs())
def test_what_one_of_several_sources_costs_is_what_all_take(counts, costs):
    """What the target does it does for each; and stages share what they work with across all of them."""
    costs = replace(costs, staging_s=0.0)
    bytes_s = counts.num_bytes / costs.wire_bytes_per_s
    direct = seconds(counts, costs, Strategy.DIRECT) - costs.latency_s
    alone_s = costs.rows_fan_in * counts.num_rows * costs.row_s + costs.fan_in * bytes_s
    if costs.num_at_once == 3.0:
        assert isclose(direct, alone_s, rel_tol=1e-6)
    assert direct >= alone_s * (1 - 1e-6)
    gather, wire, scatter = stages_of_pack(counts, costs)
    found, all_s = seconds(counts, costs, Strategy.PACK) - costs.latency_s, fsum([gather, wire, scatter])
    assert found >= max(gather, costs.fan_in * bytes_s, costs.fan_in * scatter) * (1 - 1e-6)
    assert found <= costs.fan_in * all_s * (1 + 1e-6)
    if costs.num_at_once < 3.0:
        assert found >= costs.fan_in * all_s / costs.num_at_once * (1 - 1e-6)


@pytest.mark.parametrize(("fan_in", "expected"), [(1.0, Strategy.DIRECT), (8.0, Strategy.PACK)])
def test_packing_pays_sooner_where_many_are_read_by_one(fan_in, expected):
    """One thread posts all rows; to gather and to write, each source has its own."""
    costs = replace(TYPICAL_HOST, gather_bytes_per_s=1e9, fan_in=fan_in, rows_fan_in=fan_in)
    assert choose(rows_of(16 * KIB), costs).strategy is expected


@pytest.mark.parametrize(("rows_fan_in", "expected"), [(1.0, Strategy.DIRECT), (8.0, Strategy.PACK)])
def test_many_that_write_do_not_wait_for_one_that_scatters_for_all(rows_fan_in, expected):
    costs = replace(TYPICAL_HOST, wire_bytes_per_s=50e9, fan_in=8.0, rows_fan_in=rows_fan_in)
    assert choose(rows_of(8 * KIB), costs).strategy is expected


@many
@given(some_counts(), some_costs())
def test_the_cheapest_is_chosen_and_the_losers_are_told(counts, costs):
    choice = choose(counts, costs)
    assert sorted(price.strategy for price in choice.prices) == sorted(Strategy)
    assert [price.seconds for price in choice.prices] == sorted(price.seconds for price in choice.prices)
    assert (choice.strategy, choice.predicted_s) == (choice.prices[0].strategy, choice.prices[0].seconds)
    assert choice.reason.startswith(f"{choice.strategy}: ")
    assert choice.prices == prices(counts, costs)


@many
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 16)), max_size=40), st.integers(1, 64))
def test_prices_count_the_rows_that_the_stages_have(rows, slot_bytes):
    # Sources may touch or not; targets lie apart.
    sources = np.array([start for start, _ in rows], np.uint64) * np.uint64(16)
    lengths = np.array([length for _, length in rows], np.uint64)
    copies = Copies(sources, np.arange(len(rows), dtype=np.uint64) * np.uint64(64), lengths, len(rows))
    costs = replace(TYPICAL_HOST, slot_bytes=slot_bytes)
    found = {price.strategy: price.num_rows for price in choose(counts_of(copies, ONE_REGION), costs).prices}
    starts = RegionStarts(ONE_REGION, ONE_REGION)
    posted = {strategy: len(staged(copies, strategy, slot_bytes, starts, Side.TARGET).wire) for strategy in Strategy}
    assert posted["direct"] == found["direct"]
    assert posted["pack"] == found["pack"]
    assert posted["scatter"] <= found["scatter"] <= posted["scatter"] + max(0, found["pack"] - 1)


# Single cases.


def test_counts_of_rows():
    copies = Copies(
        source=np.array([100, 0, 50], np.uint64),
        target=np.array([0, 1000, 2000], np.uint64),
        length=np.array([10, 50, 50], np.uint64),
        pieces=3,
    )
    assert counts_of(copies, np.array([0, 50], np.uint64)) == Counts(110, 3, 2)
    assert counts_of(copies, ONE_REGION) == Counts(110, 3, 1)


# One slot, all numbers exact in binary: direct 1 + 4*1 + 2 = 7; scatter 1 + 1 + 2 + (1 + 4*0.25 + 1) = 7.
TIED = Costs(
    latency_s=1.0,
    row_s=1.0,
    wire_bytes_per_s=2.0,
    gather_bytes_per_s=4.0,
    scatter_bytes_per_s=4.0,
    copy_row_s=0.25,
    launch_s=1.0,
    slot_bytes=4,
)


def test_stages_that_share_what_they_work_with_take_their_sum_at_least():
    """Two cores that share the memory do one and a half times the work of one: then shorter rows go direct."""
    alone, shared = TYPICAL_HOST, replace(TYPICAL_HOST, num_at_once=1.5)
    counts = rows_of(24 * KIB)
    assert gain(counts, shared) < 1 < gain(counts, alone)
    assert seconds(counts, shared, Strategy.DIRECT) == seconds(counts, alone, Strategy.DIRECT)
    assert gain(rows_of(512), shared) > 10


@many
@given(some_counts(), some_costs(), st.sampled_from([1e-3, 1.0, 1e3]))
def test_what_is_staged_takes_a_while_on_top(counts, costs, more_s):
    found = [prices(counts, replace(costs, staging_s=each)) for each in (0.0, more_s)]
    without, with_it = ({price.strategy: price.seconds for price in each} for each in found)
    for strategy in Strategy:
        assert isclose(with_it[strategy], without[strategy] + (more_s if strategy is not Strategy.DIRECT else 0.0))


@many
@given(some_counts(), some_costs(), st.sampled_from([1e-3, 1.0, 1e3]))
def test_a_message_there_and_back_is_in_every_price(counts, costs, more_s):
    found = [prices(counts, replace(costs, latency_s=each)) for each in (1e-9, 1e-9 + more_s)]
    without, with_it = ({price.strategy: price.seconds for price in each} for each in found)
    for strategy in Strategy:
        assert isclose(with_it[strategy], without[strategy] + more_s)


@many
@given(some_counts(), some_costs(), st.sampled_from([1e-9, 1e-3, 1e3]))
def test_what_is_shared_takes_less_and_only_what_moves_straight_is(counts, costs, sharing_s):
    alone, shared = alone_and_shared(counts, replace(costs, sharing_s=sharing_s))
    ours = max(costs.fan_out / (costs.fan_in + costs.fan_out), 1 / costs.num_at_once)
    price_s = costs.latency_s + sharing_s * costs.fan_in + ours * (alone.seconds - costs.latency_s)
    assert isclose(shared.seconds, min(alone.seconds, price_s), rel_tol=1e-9)
    theirs = costs.fan_in / (costs.fan_in + costs.fan_out) if shared != alone else 0.0
    assert (alone.shared, shared.shared) == (0.0, theirs)
    others = [prices(counts, replace(costs, sharing_s=each)) for each in (0.0, sharing_s)]
    staged = [[price for price in found if price.strategy is not Strategy.DIRECT] for found in others]
    assert staged[0] == staged[1]


def test_nothing_is_on_the_wire_that_is_gathered_where_it_is_scattered_from():
    """On two cores the two stages take turns at what is left; the other ways cost as before."""
    counts, costs = rows_of(768), replace(TYPICAL_HOST, num_at_once=1.5)
    near = {price.strategy: price for price in prices(counts, costs)}
    far = {price.strategy: price for price in prices(counts, replace(costs, gathers_into_peer=True))}
    assert all(far[each] == near[each] for each in (Strategy.DIRECT, Strategy.SCATTER))
    num_slots = -(-counts.num_bytes // costs.slot_bytes)
    rows_s = counts.num_rows * costs.copy_row_s + num_slots * costs.launch_s
    stage_s = rows_s + counts.num_bytes / costs.gather_bytes_per_s
    assert far[Strategy.PACK].seconds == pytest.approx(costs.latency_s + 2 * stage_s / 1.5)
    assert far[Strategy.PACK].num_rows == near[Strategy.PACK].num_rows == num_slots


@pytest.mark.parametrize(
    ("fan_in", "fan_out", "share"), [(1, 1, 0.5), (2, 1, 2 / 3), (4, 1, 0.8), (1, 2, 1 / 3), (2, 2, 0.5), (1, 4, 0.2)]
)
def test_everybody_copies_as_much(fan_in, fan_out, share):
    """Each at the same time as the others: the more sources there are, the more they write, each to all its targets."""
    costs = replace(TYPICAL_HOST, sharing_s=1e-9, fan_in=fan_in, rows_fan_in=fan_in, fan_out=fan_out, num_at_once=3.0)
    alone, shared = alone_and_shared(rows_of(16 * KIB), costs)
    assert shared.shared == pytest.approx(share)
    assert shared.seconds == pytest.approx(max(1 - share, 1 / 3) * alone.seconds, rel=0.01)


def test_on_one_core_nothing_is_shared():
    alone, shared = alone_and_shared(rows_of(16 * KIB), replace(TYPICAL_HOST, sharing_s=1e-9, num_at_once=1.0))
    assert shared == alone


def test_a_tie_goes_to_the_simpler_strategy():
    found = prices(Counts(4, 4, 1), TIED)
    assert [(price.strategy, price.seconds) for price in found] == [("direct", 7), ("scatter", 7), ("pack", 10)]


def test_a_tie_of_the_staged_two_goes_to_scatter():
    # Scatter posts 4 rows, pack one: what the gather costs (3) is what the rows save.
    found = prices(Counts(4, 4, 4), TIED)
    assert [(price.strategy, price.seconds) for price in found] == [("direct", 7), ("scatter", 10), ("pack", 10)]


def test_nothing_costs_nothing_and_is_direct():
    choice = choose(counts_of(NOTHING, ONE_REGION), TYPICAL_HOST)
    assert (choice.strategy, choice.predicted_s) == (Strategy.DIRECT, 0.0)
    assert choice.reason == "direct: there is nothing to move"
    assert [(price.seconds, price.num_rows) for price in choice.prices] == [(0.0, 0)] * 3


@pytest.mark.parametrize(
    ("counts", "costs", "reason"),
    [
        (
            rows_of(512, 20 * MIB),
            typical_device(12.5e9),
            "pack: 40,960 rows of 512 bytes would cost 83.6 ms one by one; gathered into 2 slots it is 2.4 ms",
        ),
        (
            rows_of(512, 4 * MIB, runs_of=8192),
            TYPICAL_HOST,
            "scatter: 8,192 rows of 512 bytes would cost 25.2 ms one by one; "
            "read as 1 run through 1 slot at the target it is 1.68 ms",
        ),
        (
            Counts(2 * MIB, 1, 1),
            TYPICAL_HOST,
            "direct: 1 row of 2 MiB would cost 346 µs; with scatter it would be 735 µs",
        ),
        (
            rows_of(1536 * KIB, 15 * 1024 * MIB),
            TYPICAL_HOST,
            "direct: 10,240 rows of 1.5 MiB would cost 2.55 s; with scatter it would be 2.93 s",
        ),
        (
            Counts(128 * KIB - 1, 2, 2),
            TYPICAL_HOST,
            "direct: 2 rows of about 64 KiB would cost 41.5 µs; with scatter it would be 79.9 µs",
        ),
    ],
)
def test_the_reason_is_a_sentence_with_the_numbers(counts, costs, reason):
    assert choose(counts, costs).reason == reason


@pytest.mark.parametrize(("latency_s", "told"), [(999.9e-6, "1 ms"), (0.9999, "1.00 s"), (1234.0, "1,234.00 s")])
def test_times_are_told_without_exponents(latency_s, told):
    reason = choose(Counts(1, 1, 1), replace(TYPICAL_HOST, latency_s=latency_s)).reason
    assert f"would cost {told};" in reason


@pytest.mark.parametrize("wrong", [0, -1, nan, inf, -inf])
@pytest.mark.parametrize(
    "name",
    [
        "latency_s",
        "row_s",
        "wire_bytes_per_s",
        "gather_bytes_per_s",
        "scatter_bytes_per_s",
        "copy_row_s",
        "launch_s",
        "slot_bytes",
    ],
)
def test_costs_are_positive_and_finite(name, wrong):
    with pytest.raises(ConfigurationError, match=f"found: {name} = {wrong};"):
        replace(TYPICAL_HOST, **{name: wrong})


def test_all_wrong_costs_are_told_at_once():
    with pytest.raises(ConfigurationError, match="found: row_s = nan, launch_s = -1"):
        replace(TYPICAL_HOST, row_s=nan, launch_s=-1)


def test_a_link_without_a_rate_is_refused():
    with pytest.raises(ConfigurationError, match="wire_bytes_per_s = 0"):
        typical_device(0)
