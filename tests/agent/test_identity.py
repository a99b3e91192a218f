"""What a rank tells of itself where its engine has so many ranks that their layouts fit into no message to a source."""

from dataclasses import replace

import pytest

from kvferry.agent.config import AgentConfig
from kvferry.agent.identity import target_identity
from kvferry.errors import ConfigurationError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.model import attention
from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.target.read_strategy import AUTO, StagingPolicy
from kvferry.wire.messages import Party, Probe

MODEL = attention(126, 128, 128, "bfloat16", 2)
MANY = describe(MODEL, EngineShape(128, 1, 16, 64, "token-major"), 1 << 30)
ONE = describe(attention(1, 1, 1, "int8", 1), EngineShape(1, 1, 1, 1, "token-major"), 1 << 20)


def identity_of(layouts=MANY, direction=Direction.READ, allowed=AUTO, is_staged=False):
    source = SourceIdentity(Party("d0", "e1", 0), "0", layouts, (), Probe(0, 0, 0), is_staged=is_staged)
    config = replace(AgentConfig("d0"), direction=direction, staging=StagingPolicy(allowed, 1 << 20))
    return target_identity(source, replace(config, may_switch_direction=True), b"", frozenset())


@pytest.mark.parametrize(
    ("is_staged", "left"), [(False, (Strategy.DIRECT, Strategy.SCATTER)), (True, (Strategy.SCATTER,))]
)
def test_who_cannot_send_its_layouts_only_reads(is_staged, left):
    found = identity_of(is_staged=is_staged)
    assert (found.staging.allowed, found.may_switch_direction) == (left, False)


def test_who_can_send_its_layouts_may_be_written_to():
    found = identity_of(ONE)
    assert (found.staging.allowed, found.may_switch_direction) == (AUTO, True)


@pytest.mark.parametrize("wanted", [{"direction": Direction.WRITE}, {"allowed": (Strategy.PACK,)}])
def test_what_needs_the_layouts_is_refused_at_the_start(wanted):
    with pytest.raises(ConfigurationError, match="too large to be sent to a source that writes"):
        identity_of(**wanted)
    assert identity_of(ONE, **wanted)
