"""What incidents that follow each other do to engines and links."""

import pytest
import simpy
from fleet_support import setting

from kvferry.simulate.fleet.hardware import Hardware
from kvferry.simulate.fleet.work import EngineState
from kvferry.simulate.settings import Fleet

READY, STOPPED, SILENT = EngineState.READY, EngineState.STOPPED, EngineState.SILENT


def hardware(*incidents):
    """Two racks of two engines, which start within ten seconds."""
    env = simpy.Environment()
    return env, Hardware(env, setting(Fleet(2, 2, per_rack=2), 100.0, incidents))


def states(env, found, *times):
    """How the first engine of the last rack reacts at these times."""
    for at_s in times:
        env.run(at_s)
        yield found.racks[1][0].state


def test_a_rack_that_dies_while_its_engines_start_is_silent_and_starts_them_again():
    env, found = hardware("rack 1 dies from 20 to 30", "rack 1 dies from 32 to 35")
    assert list(states(env, found, 25, 31, 33, 36, 44, 46)) == [SILENT, STOPPED, SILENT, STOPPED, STOPPED, READY]
    assert found.racks[1][0].epoch == 2


@pytest.mark.parametrize("ends", ["30", "30.3"])
def test_a_rack_that_dies_again_when_it_is_back_stays_silent(ends):
    env, found = hardware(f"rack 1 dies from 20.1 to {ends}", f"rack 1 dies from {ends} to 50")
    assert list(states(env, found, 25, 31, 49, 51, 61)) == [SILENT, SILENT, SILENT, STOPPED, READY]


def test_an_engine_whose_rack_dies_while_a_rollout_starts_it_is_started_by_its_host():
    env, found = hardware("rollout from 20 by 4", "rack 1 dies from 25 to 32")
    # The rollout would have it ready at 33.
    assert list(states(env, found, 24, 26, 34, 41, 43)) == [STOPPED, SILENT, STOPPED, STOPPED, READY]


@pytest.mark.parametrize("ends", ["30", "30.3"])
def test_an_uplink_that_is_slower_from_the_end_of_the_one_incident_on_is_that_slow(ends):
    env, found = hardware(f"link of rack 1 at 50% from 20.1 to {ends}", f"link of rack 1 at 10% from {ends} to 50")
    link, took_s = found.network.upwards[1], []
    for at_s in (10, 25, 40, 60):
        env.run(at_s)
        before_s = link.left_s(link.num_bytes)
        took_s.append(link.left_s(link.enqueue(20_000_000)) - before_s)
    assert took_s == pytest.approx([0.001, 0.002, 0.01, 0.001])
