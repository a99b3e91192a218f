"""Attention layers: from vLLM's logical `[B, H, N, C]` view, whatever its strides, to states per token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvferry.connectors.vllm.description.cpu_block_layout import Affine, Tile, probe
from kvferry.connectors.vllm.description.parts import Cache, Part, Parts, cache_item, dtype_word, unsupported
from kvferry.connectors.vllm.features import is_divided_by_tokens, is_indexer
from kvferry.layout import UNSHARED, Axis, CacheGroup, Span, State, TokenShare, shares

_PLAIN = frozenset({"FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"})
"""Backends that keep `[token, key | value]` in a head: they split C at `head_size` and look no further."""

_CPU = "CPU_ATTN"


def attention_parts(cache: Cache) -> Parts:
    """Keys and values. Where a backend packs a block in its own way, the block is one indivisible state."""
    spec = cache.spec
    _check_shape(cache, (spec.head_size + spec.head_size_v) * spec.dtype.itemsize)
    if spec.num_head_slots not in (None, spec.num_kv_heads):
        what = "its backend packs heads in its own way"
        raise unsupported(cache.layer, spec, what, found=f"{spec.num_head_slots} head slots, {cache.facts.backend}")
    item, limits = cache_item(cache), _limits(cache)
    inside = _inside(cache)
    if inside is None:
        return _whole(cache, limits)
    axes, span = _heads(cache)
    block, head, _, _ = cache.byte_strides
    parts = []
    for kind, dim, place in (("k", spec.head_size, inside[0]), ("v", spec.head_size_v, inside[1])):
        state = State(f"{cache.prefix}.{kind}", *item, (axes, Axis("dim", dim)), True, *limits)
        offset, token_stride, dim_stride = (step * item[1] for step in (place.offset, place.token_step, place.dim_step))
        parts.append(Part(state, offset, (span, Span(0, dim)), (head, dim_stride), block, token_stride))
    return Parts(_group(cache), tuple(parts))


def latent_parts(cache: Cache) -> Parts:
    """One row per token, or for several, for all heads, the same on every tensor-parallel rank; or an indexer's keys
    and scales."""
    spec, words = cache.spec, cache.layer.split(".")
    if spec.model_version not in (None, "deepseek_v4"):
        raise unsupported(
            cache.layer, spec, "kvferry does not know how its rows are packed", found=str(spec.model_version)
        )
    if getattr(spec, "bounded_replay", False):
        raise unsupported(cache.layer, spec, "what it keeps is computed again from where a prompt goes on")
    if is_indexer(spec, cache.facts.backend) or "indexer" in words:
        cache = replace(cache, prefix=f"{cache.prefix}.indexer")
    if is_indexer(spec, cache.facts.backend) or (spec.model_version and spec.state_content_bytes):
        # Values of a block come first, its scales behind them, in an order that depends on the device.
        return _whole(cache, _limits(cache), _kind(spec, words))
    item = cache_item(cache)
    row_bytes = spec.state_content_size_bytes
    _check_shape(cache, row_bytes)
    if cache.tensor.shape[1] != 1:
        raise unsupported(
            cache.layer,
            spec,
            "a latent cache with several heads is not supported",
            found=str(tuple(cache.tensor.shape)),
        )
    axis = Axis("byte" if spec.state_content_bytes else "dim", row_bytes // item[1])
    name, limits = f"{cache.prefix}.{_kind(spec, words)}", _limits(cache)
    state = State(name, *item, (axis,), True, *limits, compress_ratio=int(spec.tokens_per_state))
    block, _, token, _ = cache.byte_strides
    part = Part(state, 0, (Span(0, axis.extent),), (item[1],), block, token)
    return Parts(_group(cache), (part,))


def _kind(spec: Any, words: list[str]) -> str:
    """What a latent cache keeps, of several that a layer may have."""
    if "compressor" in words:
        return "compressor"
    return "compressed" if spec.tokens_per_state > 1 else "latent"


def _check_shape(cache: Cache, content_bytes: int) -> None:
    """The tensor must be what the specification says, with its content in one piece."""
    spec, tensor = cache.spec, cache.tensor
    ratio = spec.tokens_per_state
    is_whole = ratio == 1 or (
        isinstance(spec, MLAAttentionSpec) and ratio == int(ratio) and not spec.block_size % ratio
    )
    if not is_whole or (spec.state_content_bytes not in (None, content_bytes)):
        raise unsupported(cache.layer, spec, "several tokens or formats share one row")
    rows = spec.block_size // int(ratio) // cache.kernel_blocks
    expected = (cache.num_blocks * cache.kernel_blocks, spec.num_heads, rows)
    found = (*tensor.shape[:3], tensor.shape[-1] * tensor.element_size())
    if tensor.dim() != 4 or found != (*expected, content_bytes) or tensor.stride(-1) != 1:
        what = f"expected blocks, heads, tokens and bytes {(*expected, content_bytes)} with a stride of 1 in the last"
        raise unsupported(cache.layer, spec, what, found=f"{tuple(tensor.shape)}, strides {tensor.stride()}")


def _limits(cache: Cache) -> tuple[int, int]:
    """Window and chunk of a layer, from its own specification or, where groups were merged, from the layer."""
    spec = cache.spec
    # Of a merged specification the window is that of some of its layers: only the layer knows whether it is one.
    merged = type(spec).__name__ in ("FullAttentionSpec", "MLAAttentionSpec")
    if merged and cache.layer not in (cache.engine.layers or {}) and (spec.sliding_window or spec.attention_chunk_size):
        raise unsupported(
            cache.layer, spec, "the size of its window is unknown: vLLM has no such layer", found=str(spec)
        )
    if merged:
        return cache.facts.window_tokens, cache.facts.chunk_tokens
    return int(getattr(spec, "sliding_window", 0) or 0), int(getattr(spec, "attention_chunk_size", 0) or 0)


def _heads(cache: Cache) -> tuple[Axis, Span]:
    """The axis over all ranks and this rank's span of it; ranks in excess of the heads hold copies."""
    local, ranks, total = cache.spec.num_kv_heads, cache.engine.tensor_parallel, cache.engine.num_heads
    # Some layers have other heads than the model says. With one head here, only the model can say how many there are.
    if ranks == 1 or local > 1:
        total = local * ranks
    if not total or max(1, total // ranks) != local or (total % ranks and ranks % total):
        found = f"{local} heads on each of {ranks} ranks, {total} in the model"
        raise unsupported(cache.layer, cache.spec, "its heads are not divided evenly among the ranks", found=found)
    span = shares(total, ranks, f"axis head of layer {cache.layer}")[cache.engine.tensor_rank]
    return Axis("head", total), span


def _group(cache: Cache) -> CacheGroup:
    # The last block of a request is its own, and vLLM writes every slot before it reads it.
    spec, share = cache.spec, _share(cache)
    if spec.tokens_per_state != 1 and share != UNSHARED:
        raise unsupported(cache.layer, spec, "entries of several tokens cannot be divided by tokens")
    rows = spec.block_size // int(spec.tokens_per_state)
    return CacheGroup(rows, cache.num_blocks, 0, cache.kernel_blocks, share, tail_is_free=True)


def _share(cache: Cache) -> TokenShare:
    engine = cache.engine
    if not is_divided_by_tokens(cache.spec) or engine.context_parallel == 1:
        return UNSHARED
    return TokenShare(engine.context_parallel, engine.context_rank, engine.run_tokens)


def _inside(cache: Cache) -> tuple[Affine, Affine] | None:
    """Where keys and values lie in a head's part of a kernel block, in elements; None when only vLLM knows."""
    spec, tensor, backend = cache.spec, cache.tensor, cache.facts.backend
    if backend in _PLAIN:
        step = tensor.stride(2)
        return Affine(0, step, 1), Affine(spec.head_size, step, 1)
    if backend != _CPU or spec.head_size != spec.head_size_v:
        return None
    if tensor.stride(2) != tensor.shape[3]:
        raise unsupported(cache.layer, spec, "the tile of a head is not contiguous", found=str(tensor.stride()))
    written = spec.dtype if spec.kv_quant_mode.name == "NONE" else getattr(torch, cache.engine.model_dtype)
    tile = Tile(cache.facts.isa, written, spec.dtype, _cache_word(cache), tensor.shape[2], spec.head_size)
    try:
        return probe(tile)
    except RuntimeError as error:
        found = f"{tile.isa}: {str(error).splitlines()[0]}"
        raise unsupported(cache.layer, spec, "vLLM's cache operator rejects its blocks", found=found) from error


def _cache_word(cache: Cache) -> str:
    return "auto" if cache.spec.kv_quant_mode.name == "NONE" else cache.engine.cache_dtype


def _whole(cache: Cache, limits: tuple[int, int], kind: str = "latent") -> Parts:
    """A head's part of a kernel block as bytes in an order that only engines with the same packing share. A layer with
    several such caches has one of each `kind`.

    The dtype's name says which packing and how many tokens, so that others are refused with both names.
    """
    spec, tensor = cache.spec, cache.tensor
    if _share(cache) != UNSHARED:
        raise unsupported(cache.layer, spec, "packed blocks cannot be divided by tokens")
    tokens, content = tensor.shape[2], tensor.shape[3] * tensor.element_size()
    block, head, token, _ = cache.byte_strides
    if token != content:
        raise unsupported(cache.layer, spec, "the tile of a head is not contiguous", found=str(tensor.stride()))
    word = f"{_whole_dtype(cache)}:{cache.facts.isa or cache.facts.backend or 'unknown'}:block{tokens}"
    axes, spans, strides = [Axis("byte", tokens * content)], [Span(0, tokens * content)], [1]
    if not isinstance(spec, MLAAttentionSpec):
        axis, span = _heads(cache)
        axes, spans, strides = [axis, *axes], [span, *spans], [head, *strides]
    name = f"{cache.prefix}.kv_block" if kind == "latent" else f"{cache.prefix}.{kind}.kv_block"
    state = State(name, word, 1, tuple(axes), True)
    # Pieces are counted where other groups count tokens; a piece is a kernel block.
    group = CacheGroup(cache.kernel_blocks, cache.num_blocks, 0, cache.kernel_blocks)
    part = Part(state, 0, tuple(spans), tuple(strides), block, block)
    return Parts(group, (part,), tokens * int(spec.tokens_per_state), limits)


def _whole_dtype(cache: Cache) -> str:
    if isinstance(cache.spec, MLAAttentionSpec):
        return dtype_word(cache.spec.dtype)
    return cache_item(cache)[0]
