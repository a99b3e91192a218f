"""The ways that a cache can take from one engine to another: what `accuracy.py` starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

__all__ = ["WAYS", "Side", "Way"]

# Rows between blocks of these sizes are cut on both sides.
BLOCKS = ((16, 64), (64, 16), (16, 128), (128, 16), (64, 128), (128, 64))
# vLLM on a CPU takes no smaller ones for models without windows, and those alone send early.
EARLY_BLOCK = 32
# Below the window of 512 tokens of Gemma 3, which longer prompts then cross in the middle of a step.
STEP_TOKENS = 200
VLLM_FLAGS = (
    *("--max-model-len", "8192", "--max-num-seqs", "16", "--seed", "0", "--enforce-eager"),
    *("--kv-cache-memory-bytes", str(1 << 30)),
)


@dataclass(frozen=True)
class Side:
    """An engine: `transformers` or `vllm`. It computes at most `step_tokens` in a step; 0 leaves that to it."""

    engine: str = "transformers"
    block_tokens: int = 16
    ranks: int = 1
    step_tokens: int = 0

    def arguments(self, cache_tokens: int) -> tuple[str, ...]:
        """Of `kvferry serve`, those that go to vLLM itself last."""
        steps = str(self.step_tokens)
        words = ("--engine", self.engine, "--block-tokens", str(self.block_tokens))
        if self.engine == "transformers":
            words += ("--num-blocks", str(-(-cache_tokens // self.block_tokens)))
            return words + (("--max-batch-tokens", steps) if self.step_tokens else ())
        words += ("--", *VLLM_FLAGS, "--tensor-parallel-size", str(self.ranks))
        return words + (("--max-num-batched-tokens", steps) if self.step_tokens else ())


@dataclass(frozen=True)
class Way:
    """Two engines; `transfer` are options of both. With `early`, decode begins beside prefill."""

    prefill: Side
    decode: Side
    dtype: str = "float32"
    transfer: tuple[str, ...] = ()
    early: bool = False


def told(way: Way, **options: str) -> Way:
    words = ((f"--{name.replace('_', '-')}", value) for name, value in options.items())
    return replace(way, transfer=tuple(word for pair in words for word in pair))


def ways_of(prefill: Side, decode: Side, copies: Iterable[tuple[str, str]]) -> dict[str, Way]:
    """All between two engines, whatever they are. `copies` are transports and strategies."""
    way = Way(prefill, decode)
    early = Way(*(replace(side, block_tokens=EARLY_BLOCK) for side in (prefill, decode)), early=True)
    one_step = replace(prefill, step_tokens=STEP_TOKENS), replace(decode, step_tokens=STEP_TOKENS)
    return {
        "as it is by itself": way,
        **{
            f"blocks of {one} to {other}": Way(replace(prefill, block_tokens=one), replace(decode, block_tokens=other))
            for one, other in BLOCKS
        },
        **{
            f"{transport}, {strategy}": told(way, transport=transport, strategy=strategy, digest="off")
            for transport, strategy in copies
        },
        "pull": told(way, transfer_direction="pull", digest="off"),
        "push": told(way, transfer_direction="push", digest="off"),
        "full digests": told(way, digest="full"),
        "early decode": early,
        "early decode, push": told(early, transfer_direction="push", digest="off"),
        f"steps of {STEP_TOKENS} tokens": Way(*one_step),
        "bfloat16": replace(way, dtype="bfloat16"),
    }


ALL_COPIES = tuple(product(("shm", "cma", "tcp", "nixl"), ("direct", "scatter", "pack")))
# Each transport and each strategy once: what moves bytes is the same code on every engine.
SOME_COPIES = (("shm", "direct"), ("cma", "scatter"), ("tcp", "pack"), ("nixl", "direct"))
# vLLM's cache is no shared memory.
COPIES_OF_VLLM = SOME_COPIES[1:]
OURS, VLLM, TWO_RANKS = Side(), Side("vllm"), Side("vllm", ranks=2)

WAYS: dict[str, dict[str, Way]] = {
    "transformers": ways_of(OURS, OURS, ALL_COPIES),
    "vllm": {
        **ways_of(VLLM, VLLM, COPIES_OF_VLLM),
        "two ranks to one": Way(TWO_RANKS, VLLM),
        "one rank to two": Way(VLLM, TWO_RANKS),
    },
    "vllm to transformers": {
        **ways_of(VLLM, OURS, COPIES_OF_VLLM),
        "two ranks to one": Way(TWO_RANKS, OURS),
    },
    "transformers to vllm": {
        **ways_of(OURS, VLLM, SOME_COPIES),
        "one rank to two": Way(OURS, TWO_RANKS),
    },
}
"""By engines, then by name."""
