"""Blocks that a fetch leaves unwritten in part, which vLLM takes for whole: they must not stay in its prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig, iter_layer_specs

from kvferry.connectors.vllm.description.groups import seen_from
from kvferry.layout import TokenRange

Evict = Callable[[set[int]], None]


def _nothing(_: set[int]) -> None:
    """Evict nothing, of a cache that is not known yet."""


class UnfilledBlocks:
    """Of layers with a window or chunks only what later tokens see is fetched. The block in which that begins is new,
    and has nothing before it. Where vLLM has put such layers into one group with others, nor have the blocks before.

    When the fetch has ended, vLLM puts all full blocks of the request into its prefix cache. Another request that has
    fewer tokens in common would read what was never written. A block holds `block_size` tokens of each of
    `context_parallel` ranks.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, context_parallel: int = 1) -> None:
        groups = kv_cache_config.transfer_groups
        self._layers = [tuple(iter_layer_specs(group.kv_cache_spec)) for group in groups]
        self._block_tokens = [group.kv_cache_spec.block_size * context_parallel for group in groups]
        self._unfilled: dict[str, set[int]] = {}
        # Those of them whose fetch has ended.
        self._received: set[str] = set()
        self._evict: Evict = _nothing

    def bind(self, evict: Evict) -> None:
        """Set what takes blocks, by their ids, out of the prefix cache."""
        self._evict = evict

    def fetch(self, request_id: str, tables: Sequence[Sequence[int]], tokens: TokenRange) -> None:
        """Note that these tokens are fetched into the blocks of `tables`, those of the groups that move; 0 is none."""
        blocks = {
            block
            for layers, size, table in zip(self._layers, self._block_tokens, tables, strict=True)
            for block in table[tokens.first // size : -(-_whole_from(layers, tokens) // size)]
        }
        if blocks := blocks - {0}:
            self._unfilled[request_id] = blocks

    def received(self, request_ids: Iterable[str]) -> None:
        """The fetches of these requests have ended: vLLM puts their blocks into the prefix cache when it comes to them,
        and may then have no room for them for a while."""
        self._received.update(self._unfilled.keys() & request_ids)

    def scheduled(self) -> None:
        """A step has been planned. Another request may be looked at before those that wait for room."""
        for request_id in self._received:
            self._evict(self._unfilled[request_id])

    def end(self, request_id: str) -> None:
        """The fetch has ended, and vLLM has put its blocks into the prefix cache; or the request has."""
        self._received.discard(request_id)
        if blocks := self._unfilled.pop(request_id, None):
            self._evict(blocks)


def _whole_from(layers: Sequence[Any], tokens: TokenRange) -> int:
    """The first token from which on each of these layers gets all of a range."""
    return max((seen_from(spec, tokens) for spec in layers), default=tokens.first)
