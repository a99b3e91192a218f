"""Agents with and without the shared token: caches move between those that have it, and nobody else learns anything."""

import secrets

import pytest
from agent_support import until

from kvferry import Agent, AgentConfig, Cache, SharedToken, new_lease_id
from kvferry.agent.control.shared_token import NO_TOKEN
from kvferry.plan.description.describe import EngineShape
from kvferry.session.commands import BlocksReleased, Fetched, FetchFailed, LeaseEnded
from kvferry.session.events import LeaseRequest
from kvferry.session.timing import Timing
from kvferry.transport.registry import open_transports

SHAPE = EngineShape(1, 1, block_tokens=4, num_blocks=16, format="token-major")
TABLES = ((3, 4, 5),)
NUM_TOKENS = 9
OURS, THEIRS = SharedToken(secrets.token_bytes(32)), SharedToken(secrets.token_bytes(32))


@pytest.fixture
def with_token(make_rank):
    """A rank like any other whose agent has a token."""
    made = []

    def make(engine_id, token, transport="tcp", timing=None):
        rank = make_rank(engine_id, SHAPE, transport)
        rank.agent.close()
        rank.notices.get(timeout=30)  # it has stopped
        opened = open_transports(transport)
        cache = Cache((rank.memory.layout,), ())
        config = AgentConfig(engine_id, transport=transport, token=token, timing=timing or Timing(handshake_s=2.0))
        rank.agent = Agent(config, cache, rank.notices.put, opened.transports, opened.unavailable)
        rank.agent.start()
        made.append(rank.agent)
        return rank

    yield make
    for agent in made:
        agent.close()


def leased(source):
    return source.agent.lease(LeaseRequest("r1", new_lease_id(), TABLES, NUM_TOKENS))


def test_a_claim_is_valid_between_holders_of_one_token(with_token):
    source, target = with_token("p0", OURS), with_token("d0", OURS)
    target.agent.fetch(target.wanted(source, leased(source), TABLES, 0))
    target.next_notice(Fetched)
    assert source.next_notice(LeaseEnded) == LeaseEnded("r1", "done")
    assert not source.agent.counts


@pytest.mark.parametrize("tokens", [(OURS, THEIRS), (OURS, NO_TOKEN), (NO_TOKEN, OURS)], ids=["other", "none", "extra"])
def test_without_the_same_token_there_is_a_typed_failure_with_a_hint(with_token, tokens):
    timing = Timing(resend_s=0.5)
    source, target = (with_token(name, token, timing=timing) for name, token in zip(("p0", "d0"), tokens, strict=True))
    target.agent.fetch(target.wanted(source, leased(source), TABLES, 0))
    error = target.next_notice(FetchFailed).error
    assert error.reason == "unreachable"
    assert "ended the handshake" in error.what
    assert "--token-file" in error.hint
    target.next_notice(BlocksReleased)
    # Where only one side has a token, it depends on who notices first.
    refused = {("connections_refused", reason) for reason in ("stranger", "unfinished")}
    until(lambda: source.agent.counts.keys() & refused)
    assert source.agent.counts.keys() <= refused
    assert source.notices.empty()
