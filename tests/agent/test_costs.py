"""What moving costs, from the self-test of a transport."""

from dataclasses import replace

import pytest

from kvferry.agent.transports.costs import costs_of
from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.calibration import typical_device
from kvferry.plan.strategy.cost_model import Counts, prices
from kvferry.plan.strategy.strategies import Strategy
from kvferry.transport.machine.facts import Place
from kvferry.transport.selection.measurement import UNMEASURED, Measurement, Rates

SLOT = 4 << 20


def measured(gigabytes_per_s, row_s, carriers=("cma/memory",)):
    row_rate = 4096e-9 / (4096e-9 / gigabytes_per_s + row_s)
    return Measurement("nixl", gigabytes_per_s, row_rate, 20e-6, "", carriers=carriers)


def cheapest(num_bytes, row_bytes, costs):
    counts = Counts(num_bytes, num_bytes // row_bytes, num_bytes // row_bytes)
    return prices(counts, costs)[0].strategy


def test_rows_and_bytes_are_told_apart():
    costs = costs_of(measured(2.5, 2e-6), Place.SAME_HOST)
    assert costs.row_s == pytest.approx(2e-6)
    assert costs.wire_bytes_per_s == pytest.approx(2.5e9)


@pytest.mark.parametrize("slowness", [1, 10])
@pytest.mark.parametrize(
    ("row_bytes", "expected"), [(768, "pack"), (2048, "pack"), (12 << 10, "direct"), (24 << 10, "direct")]
)
def test_a_slow_moment_changes_nothing_about_what_is_cheaper(slowness, row_bytes, expected, monkeypatch):
    """Of what has been measured on two cores: what was fastest, and no other when all that was slower by a factor."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    costs = costs_of(measured(2.5 / slowness, 2e-6 * slowness), Place.SAME_HOST)
    assert cheapest(12 * SLOT, row_bytes, costs) == expected


# Of one pair of processes, in GB/s and in GB/s of rows of 4 KiB, with nothing, two and six others on two cores.
BUSY = [(4.19, 2.60), (3.06, 2.16), (2.93, 2.80), (0.47, 2.66), (3.01, 3.31), (2.36, 0.56), (1.18, 3.29), (1.64, 0.60)]


@pytest.mark.parametrize("rates", BUSY, ids=str)
@pytest.mark.parametrize(("carrier", "fan_in"), [("cma", 1.0), ("cma", 2.0), ("cma/memory", 1.0), ("cma/memory", 2.0)])
def test_a_self_test_beside_busy_engines_changes_nothing_about_what_is_cheaper(rates, carrier, fan_in, monkeypatch):
    """What was fastest in benchmarks/mixed_tp.py, with this carrier, when nothing else ran."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    found = Measurement("it", *rates, 4e-4, "", Rates(*rates, 4e-4), carriers=(carrier,))
    costs = replace(costs_of(found, Place.SAME_HOST), fan_in=fan_in, rows_fan_in=fan_in)
    chosen = [cheapest(12 * SLOT, row_bytes, costs) for row_bytes in (1024, 1536, 24 << 10, 32 << 10)]
    assert chosen == [Strategy.PACK, Strategy.PACK, Strategy.DIRECT, Strategy.DIRECT]


@pytest.mark.parametrize("rates", BUSY, ids=str)
@pytest.mark.parametrize("place", Place)
def test_long_rows_go_straight_over_sockets_whatever_a_busy_moment_says_of_them(rates, place):
    """For these the kernel copies rows of a thousand addresses at a time. Short ones are packed by some moments, and
    that takes about as long."""
    found = Measurement("tcp", *rates, 4e-4, "", Rates(*rates, 4e-4), carriers=("tcp",))
    costs = costs_of(found, place)
    assert [cheapest(12 * SLOT, row_bytes, costs) for row_bytes in (12 << 10, 24 << 10)] == [Strategy.DIRECT] * 2
    sockets_of_ucx = costs_of(replace(found, carriers=("tcp/eth0",)), place)
    assert sockets_of_ucx.row_s == pytest.approx(max(1e-9, 4096e-9 / rates[1] - 4096e-9 / rates[0]))


@pytest.mark.parametrize("num_cpus", [1, 2, 16])
@pytest.mark.parametrize("fan_in", [1.0, 4.0])
@pytest.mark.parametrize("row_bytes", [64, 256, 768, 4 << 10])
def test_nothing_is_staged_where_rows_are_copied_in_one_pass(row_bytes, fan_in, num_cpus, monkeypatch):
    """Whatever the self-test says of a row, a gather and a scatter would pay it, too, and slots beside it."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cpus)))
    found = measured(12.0, 140e-9, ("shm",))
    found = replace(found, writing=found.rates(Direction.READ))
    costs = replace(costs_of(found, Place.SAME_HOST), fan_in=fan_in, rows_fan_in=fan_in)
    assert cheapest(12 * SLOT, row_bytes, costs) is Strategy.DIRECT


def test_a_few_rows_are_not_worth_a_slot():
    assert cheapest(64 << 10, 1024, costs_of(measured(2.5, 2e-6), Place.SAME_HOST)) is Strategy.DIRECT


@pytest.mark.parametrize(("place", "carriers"), [(Place.OTHER_HOST, ("rc/mlx5_0",)), (Place.SAME_HOST, ("tcp/lo",))])
def test_where_the_wire_is_no_copy_its_rate_says_nothing_about_copies(place, carriers):
    costs = [costs_of(measured(rate, 2e-6, carriers), place) for rate in (1.0, 40.0)]
    assert costs[0].gather_bytes_per_s == costs[1].gather_bytes_per_s
    assert costs[0].num_at_once == 3


@pytest.mark.parametrize("carriers", [("cma/memory",), ("shm",), ("cma", "posix/memory")])
@pytest.mark.parametrize("times", [0.2, 0.6, 1.0, 1.9, 5.0])
def test_where_both_copy_both_can_at_once(carriers, times, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    found = measured(2.5, 2e-6, carriers)
    writing = Rates(found.gigabytes_per_s * times, found.row_gigabytes_per_s * times, 1e-5)
    costs = costs_of(replace(found, writing=writing), Place.SAME_HOST)
    assert costs.sharing_s > 0
    assert costs.gathers_into_peer
    shares = [
        next(price.shared for price in prices(Counts(num_bytes, num_bytes >> 14, num_bytes >> 14), costs))
        for num_bytes in (1 << 20, 64 << 20)
    ]
    assert shares == [0.0, 0.5]


@pytest.mark.parametrize(
    ("carriers", "place", "writing"),
    [
        (("rc/mlx5_0",), Place.OTHER_HOST, Rates(2.5, 1.0, 1e-5)),
        (("rc/mlx5_0",), Place.SAME_HOST, Rates(2.5, 1.0, 1e-5)),
        (("cma/memory", "cuda_ipc/cuda"), Place.SAME_HOST, Rates(2.5, 1.0, 1e-5)),
        (("tcp/lo",), Place.SAME_HOST, Rates(2.5, 1.0, 1e-5)),
        ((), Place.SAME_HOST, Rates(2.5, 1.0, 1e-5)),
        (("cma/memory",), Place.SAME_HOST, Rates(0.25, 0.1, 1e-5)),
        (("cma/memory",), Place.SAME_HOST, Rates(25.0, 10.0, 1e-5)),
        (("cma/memory",), Place.SAME_HOST, Rates(0.0, 0.0, 1e-5, "not allowed")),
        (("cma/memory",), Place.SAME_HOST, UNMEASURED),
    ],
)
def test_where_one_side_moves_all(carriers, place, writing):
    costs = costs_of(replace(measured(2.5, 2e-6, carriers), writing=writing), place)
    assert (costs.sharing_s, costs.gathers_into_peer) == (0.0, False)


WRITES = {"fast": Rates(20.0, 10.0, 1e-5), "slow": Rates(0.1, 0.05, 1e-3)}


def test_what_a_direction_costs_is_its_own():
    found = replace(measured(2.5, 2e-6), writing=WRITES["fast"])
    assert costs_of(found, Place.OTHER_HOST).wire_bytes_per_s == pytest.approx(2.5e9)
    written = costs_of(found, Place.OTHER_HOST, Direction.WRITE)
    assert (written.wire_bytes_per_s, written.latency_s) == (pytest.approx(20e9), 1e-5)
    unmeasured = measured(2.5, 2e-6)
    assert costs_of(unmeasured, Place.OTHER_HOST, Direction.WRITE) == costs_of(unmeasured, Place.OTHER_HOST)


@pytest.mark.parametrize(("writes", "expected"), [("fast", "pack"), ("slow", "scatter")])
def test_nothing_is_packed_where_writing_is_far_slower(writes, expected):
    """Rows of the target that are many for each run of the source: through staging memory, whoever moves it."""
    costs = costs_of(replace(measured(2.5, 2e-6), writing=WRITES[writes]), Place.OTHER_HOST)
    counts = Counts(12 * SLOT, 12 * SLOT // 768, 12 * SLOT // (8 * 768))
    assert prices(counts, costs)[0].strategy == expected


def test_a_read_of_one_small_slot_goes_straight_where_rows_alone_would_have_it_packed():
    """To have it asked for and handed on takes longer than some hundred rows."""
    costs = costs_of(measured(2.5, 2e-6), Place.OTHER_HOST)
    counts = Counts(1 << 18, 256, 256)
    assert prices(counts, replace(costs, staging_s=0.0))[0].strategy == "pack"
    assert prices(counts, costs)[0].strategy == "direct"


@pytest.mark.parametrize(
    ("num_bytes", "row_bytes", "expected"),
    [
        (96 * SLOT, 1536, "pack"),
        (96 * SLOT, 24 << 10, "pack"),
        (96 * SLOT, 4 << 20, "direct"),
        (SLOT, 64 << 10, "direct"),
    ],
)
def test_rows_of_device_memory_cost_what_the_device_takes(num_bytes, row_bytes, expected):
    """Measured between two processes on an H200: whatever the self-test says of rows of host memory."""
    found = measured(8.3, 1e-6, ("cma/memory", "cuda_ipc/cuda"))
    costs = replace(costs_of(found, Place.SAME_HOST, buffer_device="cuda"), slot_bytes=24 << 20)
    assert cheapest(num_bytes, row_bytes, costs) == expected


def test_rows_of_device_memory_take_what_they_took_unless_those_of_host_memory_take_longer():
    """Measured: 1.58 s for 256 Ki rows, and 6 ms for 512 of 24 KiB as well as for one slot of them."""
    found = measured(8.3, 1e-6, ("cma/memory", "cuda_ipc/cuda"))
    costs = replace(costs_of(found, Place.SAME_HOST, buffer_device="cuda"), slot_bytes=24 << 20)
    many = {one.strategy: one.seconds for one in prices(Counts(96 * SLOT, 1 << 18, 1 << 18), costs)}
    few = {one.strategy: one.seconds for one in prices(Counts(3 * SLOT, 512, 512), costs)}
    assert many[Strategy.DIRECT] == pytest.approx(1.58, rel=0.1)
    assert few[Strategy.PACK] == pytest.approx(few[Strategy.DIRECT], rel=0.2)
    slow = replace(found, row_gigabytes_per_s=measured(8.3, 20e-6).row_gigabytes_per_s)
    assert costs_of(slow, Place.SAME_HOST, buffer_device="cuda").row_s == pytest.approx(20e-6)


def test_a_device_gathers_and_scatters_at_its_own_rates_but_slots_leave_no_faster_than_it_writes():
    found, device = measured(8.3, 1e-6, ("cma/memory", "cuda_ipc/cuda")), typical_device(1.0)
    costs = costs_of(found, Place.SAME_HOST, buffer_device="cuda")
    rates = [(one.gather_bytes_per_s, one.scatter_bytes_per_s, one.copy_row_s) for one in (costs, device)]
    assert rates[0] == rates[1]
    slow = costs_of(replace(found, writing=WRITES["slow"]), Place.SAME_HOST, buffer_device="cuda")
    assert slow.gather_bytes_per_s == WRITES["slow"].gigabytes_per_s * 1e9


def test_between_hosts_a_card_posts_rows_of_device_memory_as_any_others():
    found = measured(25.0, 1e-6, ("rc_mlx5/mlx5_0",))
    assert costs_of(found, Place.OTHER_HOST, buffer_device="cuda") == costs_of(found, Place.OTHER_HOST)
