"""Laws of simulated steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connectors.step_cost import NO_COST, StepCost, step_cost_named
from kvferry.errors import ConfigurationError

costs = st.builds(StepCost, *[st.floats(0, 1)] * 4)
sizes = st.integers(0, 4096)


@given(costs, sizes, sizes, st.integers(0, 64))
def test_more_work_never_takes_less(cost, tokens, more, sequences):
    assert cost.seconds(tokens + more, sequences) >= cost.seconds(tokens, sequences) - 1e-9
    assert cost.seconds(tokens, sequences + more) >= cost.seconds(tokens, sequences) - 1e-9


@given(costs, sizes, sizes)
def test_a_step_lies_between_the_roofline_and_taking_turns(cost, tokens, sequences):
    computing, reading = tokens * cost.token_s, cost.step_s + sequences * cost.sequence_s
    found = cost.seconds(tokens, sequences)
    assert max(computing, reading) - 1e-9 <= found <= computing + reading + 1e-9


def test_the_ends_of_overlap():
    assert StepCost(1e-3, 5e-2, 0.0, overlap=0.0).seconds(100, 1) == pytest.approx(0.15)
    assert StepCost(1e-3, 5e-2, 0.0, overlap=1.0).seconds(100, 1) == pytest.approx(0.1)


def test_costs_are_read_in_any_unit_and_order():
    assert step_cost_named("step=50ms, token=1.5ms,sequence=300us,overlap=0.25").step_s == pytest.approx(0.05)
    assert step_cost_named("overlap=0.25,token=1.5ms,sequence=0.3ms,step=0.05s") == StepCost(0.0015, 0.05, 0.0003, 0.25)
    assert step_cost_named("") == NO_COST


@pytest.mark.parametrize("text", ["step", "step=5", "overlap=2", "overlap=1ms", "wait=1ms", "step=1ms,step=2ms", ","])
def test_other_costs_are_refused(text):
    with pytest.raises(ConfigurationError):
        step_cost_named(text)
