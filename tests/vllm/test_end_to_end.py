"""Prefill on one real vLLM server, decode on another: every answer must be the one a single server gives."""

from __future__ import annotations

import pytest
from answers import compare, loaded_tokens, problems, prompts_of
from servers import Pair, PairSpec, ServerSpec

# Below a block, exactly blocks, one more, and sizes that no block divides.
SIZES = (2, 5, 63, 64, 65, 127, 128, 129, 300, 1000)
FEW_SIZES = (5, 128, 300, 700)
LONG_SIZE = 5000
CHUNKED = ("--max-num-batched-tokens", "1024")


def both(block_tokens: int, tp: int = 1) -> ServerSpec:
    """A side that can send and receive, so that one pair of servers shows both directions."""
    return ServerSpec("kv_both", tp, block_tokens)


UNEQUAL = PairSpec("llama", both(64), both(128))
EQUAL = PairSpec("llama", ServerSpec("kv_producer", flags=CHUNKED))
SMOKE = [EQUAL, PairSpec("gemma3"), PairSpec("deepseek_v3"), PairSpec("nemotron_h")]


def check_equal(pair: Pair, sizes: tuple[int, ...], at_once: int = 1, reverse: bool = False) -> None:
    """Every answer is right, and the deciding side computed no prompt but for the last token of each."""
    target = pair.prefill if reverse else pair.decode
    before = loaded_tokens(target)
    found = compare(pair, prompts_of(sizes), at_once, reverse)
    loaded = loaded_tokens(target) - before
    worst = max(one.error for one in found), max(one.noise for one in found)
    print(f"{pair.spec}: loaded {loaded:.0f} tokens, off by {worst[0]:.1e}, control {worst[1]:.1e}")
    assert not problems(found)
    assert loaded >= sum(sizes) - len(sizes)


@pytest.mark.parametrize("spec", SMOKE, ids=str)
def test_answers_equal_a_single_servers(pair, spec):
    check_equal(pair, SIZES)


@pytest.mark.parametrize("spec", [UNEQUAL], ids=str)
@pytest.mark.parametrize("reverse", [False, True], ids=["64to128", "128to64"])
def test_block_sizes_differ(pair, spec, reverse):
    check_equal(pair, SIZES, reverse=reverse)


@pytest.mark.parametrize("spec", [EQUAL], ids=str)
def test_a_prompt_of_several_thousand_tokens_in_chunks(pair, spec):
    check_equal(pair, (LONG_SIZE,))


@pytest.mark.parametrize("spec", [EQUAL, UNEQUAL], ids=str)
def test_eight_requests_at_once(pair, spec):
    check_equal(pair, FEW_SIZES * 2, at_once=8)
