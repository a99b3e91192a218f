"""Links: who waits for whom, and what a slower link changes in the middle of a transfer."""

import math

import pytest
import simpy

from kvferry.errors import ConfigurationError
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.strategy.calibration import typical_device
from kvferry.plan.strategy.cost_model import Counts, choose
from kvferry.simulate.costs import CacheSize
from kvferry.simulate.fleet.network import Network

LINK = 10e9
CACHE = CacheSize(100_000, rows_per_block=4)
A, B, C = ("a", 0), ("b", 0), ("c", 1)


def first(num_tokens):
    return TokenRange(0, num_tokens)


def network(uplink=10e9):
    env = simpy.Environment()
    return env, Network(env, CACHE, LINK, (uplink, uplink))


def end_of(env, event):
    times = []
    event.callbacks.append(lambda _: times.append(env.now))
    return times


def price_s(num_tokens):
    """By the price model of `kvferry plan`."""
    rows = CACHE.num_rows(num_tokens)
    return choose(Counts(CACHE.num_bytes(first(num_tokens)), rows, rows), typical_device(LINK)).predicted_s


def test_a_transfer_alone_takes_what_the_price_model_says():
    env, wires = network()
    ended = end_of(env, wires.move(A, B, first(2000)))
    env.run()
    assert ended == [pytest.approx(price_s(2000))]
    assert price_s(2000) > 2000 * 100_000 / LINK


def test_nothing_takes_no_time():
    env, wires = network()
    ended = end_of(env, wires.move(A, B, first(0)))
    env.run()
    assert ended == [0.0]


def test_two_transfers_to_one_engine_come_one_after_the_other():
    env, wires = network()
    ended = [end_of(env, wires.move(source, B, first(2000))) for source in (A, ("d", 0))]
    env.run()
    overhead_s = wires.overhead_s(first(2000))
    assert ended == [[pytest.approx(0.02 + overhead_s)], [pytest.approx(0.04 + overhead_s)]]


def test_only_what_leaves_a_rack_takes_its_uplink():
    env, wires = network(uplink=1e9)
    inside, outside = end_of(env, wires.move(A, B, first(2000))), end_of(env, wires.move(("d", 0), C, first(2000)))
    env.run()
    assert inside == [pytest.approx(0.02 + wires.overhead_s(first(2000)))]
    assert outside == [pytest.approx(0.2 + wires.overhead_s(first(2000)))]
    assert (wires.upwards[0].busy_s, wires.upwards[1].busy_s) == (pytest.approx(0.2), 0.0)


def test_a_link_that_slows_down_in_the_middle_and_recovers():
    env, wires = network()
    ended = end_of(env, wires.move(A, C, first(2000)))
    # Half of it goes in 10 ms; of the other half, 10 % in the next 10 ms.
    for at_s, share in ((0.01, 0.1), (0.02, 1.0)):
        timeout = env.timeout(at_s)
        timeout.callbacks.append(lambda _, share=share: [link.set_share(share) for link in wires.upwards])
    env.run()
    assert ended == [pytest.approx(0.01 + 0.01 + 0.009 + wires.overhead_s(first(2000)))]


@pytest.mark.parametrize("words", [(0.0, 0), (-1.0, 10), (10.0, -1), (math.nan, 10), (math.nan, 0)])
def test_a_cache_without_bytes_is_refused(words):
    with pytest.raises(ConfigurationError):
        CacheSize(*words)


def test_a_cache_of_fixed_size_takes_as_long_for_any_prompt():
    env = simpy.Environment()
    wires = Network(env, CacheSize(0.0, 10_000_000, rows_per_block=0), LINK, (LINK,))
    ended = [end_of(env, wires.move(A, B, first(2000))), end_of(env, wires.move(("c", 0), ("d", 0), first(4000)))]
    env.run()
    assert ended == [[pytest.approx(0.001 + wires.overhead_s(first(2000)))]] * 2
