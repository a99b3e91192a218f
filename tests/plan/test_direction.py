"""Directions have names that users type."""

import pytest

from kvferry.errors import ConfigurationError
from kvferry.plan.programs.copies import Direction, direction_named, may_switch_direction


def test_directions_are_named_by_what_the_target_sees():
    assert (direction_named("pull"), direction_named("push")) == (Direction.READ, Direction.WRITE)
    assert direction_named("auto") is Direction.READ
    assert [may_switch_direction(name) for name in ("pull", "push", "auto")] == [False, False, True]


def test_an_unknown_direction_is_refused_with_those_that_exist():
    with pytest.raises(ConfigurationError, match="pull or push or auto"):
        direction_named("shove")
