"""From vLLM's cache groups and block tables to ours. Both halves of the connector use it, in their own processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, iter_layer_specs

from kvferry.plan.tokens import TokenRange

__all__ = ["GroupFacts", "forgets", "group_facts", "may_grow"]


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """How a block table of vLLM becomes one of ours.

    `index` is the group's place in `kv_cache_groups`. `kind` is `tokens`, or `fixed` for states of fixed size, which
    move with one block per request. `block_tokens` are the tokens of a block over all ranks that share them out;
    `num_scratch_blocks` at a table's end belong to speculative decoding and never move.

    `whole_tokens` is not 0 where the inside of a block is not known: whole pieces of so many tokens move then, and
    the group counts pieces where others count tokens. `window_tokens` and `chunk_tokens` limit which ones.
    """

    index: int
    kind: str
    block_tokens: int
    num_scratch_blocks: int = 0
    whole_tokens: int = 0
    window_tokens: int = 0
    chunk_tokens: int = 0

    def table(self, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The block table of a request that has computed `num_tokens` tokens."""
        if self.kind == "tokens":
            return list(block_ids)
        at = max(num_tokens - 1, 0) // self.block_tokens
        return list(block_ids[at : at + 1])

    def range(self, tokens: TokenRange) -> TokenRange:
        """What to move of this group when `tokens` are wanted: the same, or the pieces that hold them."""
        if not self.whole_tokens:
            return tokens
        first = tokens.first
        if self.window_tokens:
            first = max(first, tokens.last - (self.window_tokens - 1))
        if self.chunk_tokens:
            first = max(first, tokens.last // self.chunk_tokens * self.chunk_tokens)
        first = min(first, tokens.last)
        if first == tokens.last:
            return TokenRange(0, 0)
        return TokenRange(first // self.whole_tokens, -(-tokens.last // self.whole_tokens))


def may_grow(kv_cache_config: KVCacheConfig) -> bool:
    """Whether what is computed of a prompt stays as it is while the rest is computed, so that it may be read meanwhile.

    Windows, chunks and recurrent states are written over. Memory that vLLM clears for a request that takes it over is
    cleared before it tells us that it has been taken over.
    """
    return not forgets(kv_cache_config) and not kv_cache_config.needs_kv_cache_zeroing


def forgets(kv_cache_config: KVCacheConfig) -> bool:
    """Whether some group gives up what it knows before its request ends: by a window, by chunks, or as a state."""
    specs = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
    return len(specs) > 1 or any(_forgets(layer) for spec in specs for layer in iter_layer_specs(spec))


def _forgets(spec: Any) -> bool:
    limits = getattr(spec, "sliding_window", None), getattr(spec, "attention_chunk_size", None)
    return isinstance(spec, MambaSpec) or any(limits)


def group_facts(kv_cache_config: KVCacheConfig, context_parallel: int = 1) -> tuple[GroupFacts, ...]:
    """One per transferable group, in vLLM's order; what lies inside blocks only the worker knows."""
    return tuple(
        _facts(index, kv_cache_config.kv_cache_groups[index].kv_cache_spec, context_parallel)
        for index in kv_cache_config.transfer_group_ids
    )


def _facts(index: int, spec: Any, context_parallel: int) -> GroupFacts:
    first = next(iter(iter_layer_specs(spec)))
    if isinstance(first, MambaSpec):
        return GroupFacts(index, "fixed", spec.block_size, first.num_speculative_blocks)
    ranks = context_parallel if first.dcp_sharded else 1
    return GroupFacts(index, "tokens", spec.block_size * ranks)
