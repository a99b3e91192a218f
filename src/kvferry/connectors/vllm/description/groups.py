"""What vLLM's cache groups are to us. Both halves of the connector use it, in their own processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, iter_layer_specs

from kvferry.layout import TokenRange


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What of a group's tokens moves. `index` is its place in vLLM's `kv_cache_groups`, whose block tables it uses.

    `whole_tokens` is not 0 where the inside of a block is not known: whole pieces of so many tokens move then, and
    the group counts pieces where others count tokens. `window_tokens` and `chunk_tokens` limit which ones.
    """

    index: int
    whole_tokens: int = 0
    window_tokens: int = 0
    chunk_tokens: int = 0

    def range(self, tokens: TokenRange) -> TokenRange:
        """What to move of this group when `tokens` are wanted: the same, or the pieces that hold them."""
        if not self.whole_tokens:
            return tokens
        first = _seen_from(tokens, self.window_tokens, self.chunk_tokens)
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


def has_windows(kv_cache_config: KVCacheConfig) -> bool:
    """Whether some layer has a window or chunks, so that a fetch begins behind the first token of a request."""
    specs = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
    return any(any(_limits(layer)) for spec in specs for layer in iter_layer_specs(spec))


def _forgets(spec: Any) -> bool:
    return isinstance(spec, MambaSpec) or any(_limits(spec))


def seen_from(spec: Any, tokens: TokenRange) -> int:
    """The first of these tokens that a layer still sees from behind the last one. Of a specification for layers of
    several kinds, the windows and chunks are those of some."""
    return _seen_from(tokens, *_limits(spec))


def _seen_from(tokens: TokenRange, window: int, chunk: int) -> int:
    first = tokens.first
    if window:
        first = max(first, tokens.last - (window - 1))
    if chunk:
        first = max(first, tokens.last // chunk * chunk)
    return min(first, tokens.last)


def _limits(spec: Any) -> tuple[int, int]:
    return (getattr(spec, "sliding_window", None) or 0), (getattr(spec, "attention_chunk_size", None) or 0)
