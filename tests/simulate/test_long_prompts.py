"""Prompts that are longer than what the router names of them: engines cache all of it."""

import pytest
from fleet_support import COSTS, SEQUENCE_S, STEP_S, TOKEN_S, WIRES, setting, transfer_s

from kvferry.bench.load.workload import Piece, PlannedRequest, Prompt
from kvferry.router.request.prompt_cost import MAX_PREFIXES
from kvferry.simulate.load import PREFIX_TOKENS, arrivals_of
from kvferry.simulate.settings import Fleet
from kvferry.simulate.simulation import simulate

LONG = 40_000


def arrivals(*prompts):
    """Prompts of these pieces, a long time one after the other."""
    pieces = (tuple(Piece(*piece) for piece in prompt) for prompt in prompts)
    planned = [PlannedRequest(1.0 + 20.0 * place, Prompt(each), 10) for place, each in enumerate(pieces)]
    return arrivals_of(planned, (), 0)


def test_a_long_prompt_that_comes_again_is_cached_to_its_end():
    given = setting(Fleet(0, 1), 60.0)
    first, again = simulate(given, arrivals([("a", LONG)], [("a", LONG)])).outcomes
    assert first.ttft_s == pytest.approx(LONG / COSTS.chunk_tokens * STEP_S + LONG * TOKEN_S)
    rest = LONG % PREFIX_TOKENS
    assert again.ttft_s == pytest.approx(STEP_S + rest * TOKEN_S)


def test_only_the_end_of_a_long_prompt_is_moved_again():
    given = setting(Fleet(1, 1), 60.0)
    _, again = simulate(given, arrivals([("a", LONG)], [("a", 39_000), ("b", 1000)])).outcomes
    rest = LONG - 39_000 // PREFIX_TOKENS * PREFIX_TOKENS
    computed_s = 2 * STEP_S + rest * TOKEN_S
    fetched_s = WIRES.handover_s + transfer_s(rest) + STEP_S + SEQUENCE_S
    assert again.ttft_s == pytest.approx(computed_s + fetched_s)


def test_the_router_knows_the_first_names_of_a_prompt_and_engines_all():
    (arrival,) = arrivals([("a", 1000), ("b", 999_000)])
    assert len(arrival.names) == len(set(arrival.names)) == 1_000_000 // PREFIX_TOKENS
    assert arrival.cost.prefixes == arrival.names[:MAX_PREFIXES]


def test_long_prompts_share_the_names_of_what_they_share():
    one, other = arrivals([("a", 30_000), ("b", 10_000)], [("a", 30_000), ("c", 10_000)])
    equal = [mine == theirs for mine, theirs in zip(one.names, other.names, strict=True)]
    num_equal = 30_000 // PREFIX_TOKENS
    assert equal == [True] * num_equal + [False] * (LONG // PREFIX_TOKENS - num_equal)
