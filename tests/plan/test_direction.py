"""Directions have names that users type."""

import pytest

from kvferry.errors import ConfigurationError
from kvferry.plan.copies import Direction, direction_named


def test_directions_are_named_by_what_the_target_sees():
    assert (direction_named("pull"), direction_named("push")) == (Direction.READ, Direction.WRITE)


def test_an_unknown_direction_is_refused_with_those_that_exist():
    with pytest.raises(ConfigurationError, match="pull or push"):
        direction_named("shove")
