"""Pools with a row for every token: keys and values, latents, and the keys of an indexer.

A pool keeps rows `[slot, head, dim]` per layer, keys and values apart, or one latent row per slot. A page is as many
slots that follow one another as it has tokens; page 0 takes what is written for padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.connectors.sglang.description.parts import Component, Part, RankFacts, unsupported, word_of
from kvferry.layout import Axis, CacheGroup, Span, State, shares

INDEX_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Rows:
    """A pool of rows: which layers of the model are in it, in its order, and what limits the tokens that they see."""

    pool: Any
    layers: Sequence[int]
    num_heads: int
    window_tokens: int = 0


def paged(rows: Rows, facts: RankFacts, kind: str = "") -> Component:
    """All states of a pool, by its exact class: another one may arrange its memory in any way. Raises LayoutError."""
    pool, page_size = rows.pool, int(rows.pool.page_size)
    match type(pool).__name__:
        case "MHATokenToKVPool":
            parts = list(_keys_and_values(rows, facts))
        case "MLATokenToKVPool":
            parts = list(_latents(rows))
        case "DSATokenToKVPool":
            parts = [*_latents(rows), *_index_keys(rows)]
        case name:
            raise unsupported("this kind of pool cannot be described", name)
    if not parts:
        raise unsupported("a pool of this rank keeps no layer", type(pool).__name__)
    # SGLang gives the last page of a request to nobody else, and writes a slot before it reads it.
    group = CacheGroup(page_size, min(part.num_blocks for part in parts), 0, tail_is_free=True)
    # The scales of an indexer lie in the buffer of its keys.
    buffers = frozenset(part.tensor.data_ptr() for part in parts if not part.state.name.endswith("indexer.scale"))
    return Component(kind, group, tuple(parts), buffers)


def _keys_and_values(rows: Rows, facts: RankFacts) -> Iterator[Part]:
    pool = rows.pool
    if pool.kv_cache_layout != "nhd":
        raise unsupported("rows of a page are not arranged token by token", pool.kv_cache_layout)
    for name in ("k_scale_buffer", "native_k_scale_buffer", "dq_k_buffer"):
        if getattr(pool, name, None) is not None:
            raise unsupported("a quantized cache has numbers beside its keys and values", f"{pool.dtype}, {name}")
    span = shares(rows.num_heads, facts.tensor_parallel, "axis head")[facts.tensor_rank]
    if pool.head_num != span.stop - span.start:
        found = f"{pool.head_num} heads on each of {facts.tensor_parallel} ranks, {rows.num_heads} in the model"
        raise unsupported("its heads are not divided evenly among the ranks", found)
    for layer, keys, values in zip(rows.layers, pool.k_buffer, pool.v_buffer, strict=True):
        for kind, tensor in (("k", keys), ("v", values)):
            dim = tensor.shape[-1]
            axes = (Axis("head", rows.num_heads), Axis("dim", dim))
            yield _part(rows, f"model.layers.{layer}.{kind}", tensor, axes, (span, Span(0, dim)))


def _latents(rows: Rows) -> Iterator[Part]:
    for layer, tensor in zip(rows.layers, rows.pool.kv_buffer, strict=True):
        # A latent row has one head, which needs no axis.
        dim = tensor.shape[-1]
        yield _part(rows, f"model.layers.{layer}.latent", tensor, (Axis("dim", dim),), (Span(0, dim),))


def _part(rows: Rows, name: str, tensor: torch.Tensor, axes: tuple[Axis, ...], spans: tuple[Span, ...]) -> Part:
    item_bytes = tensor.element_size()
    if tensor.stride(-1) != 1:
        raise unsupported("the elements of a row are not contiguous", f"{name}: strides {tensor.stride()}")
    dtype = word_of(rows.pool.dtype if rows.pool.dtype.itemsize == item_bytes else tensor.dtype)
    state = State(name, dtype, item_bytes, axes, True, rows.window_tokens)
    token_stride = tensor.stride(0) * item_bytes
    strides = tuple(stride * item_bytes for stride in tensor.stride()[-len(axes) :])
    page_stride = token_stride * int(rows.pool.page_size)
    return Part(state, tensor, spans, strides, page_stride, token_stride)


def _index_keys(rows: Rows) -> Iterator[Part]:
    """The keys of a sparse-attention indexer. A page has its tokens' keys one after another, and then their scales."""
    pool = rows.pool
    # Some versions of SGLang always have as many keys to a page as tokens, whatever a key is for.
    num_keys = int(getattr(pool, "index_page_size", pool.page_size))
    if pool.index_kpool != 1 or num_keys != pool.page_size:
        found = f"a key for {pool.index_kpool} tokens, {num_keys} keys to a page of {pool.page_size} tokens"
        raise unsupported("keys of the indexer are not kept token by token", found)
    for layer, pages in zip(rows.layers, pool.index_k_with_scale_buffer, strict=True):
        # A layer that uses the choice of the one before it has no keys of its own.
        if pages.shape[0]:
            yield from _index_states(pool, f"model.layers.{layer}.indexer", pages)


def _index_states(pool: Any, prefix: str, pages: torch.Tensor) -> Iterable[Part]:
    key_bytes = int(pool.index_head_dim)
    scale_bytes = key_bytes // int(pool.quant_block_size) * INDEX_SCALE_BYTES
    start = 0
    for name, dtype, size, item_bytes in (
        ("k", "float8_e4m3fn", key_bytes, 1),
        ("scale", "float32", scale_bytes, INDEX_SCALE_BYTES),
    ):
        dim = size // item_bytes
        state = State(f"{prefix}.{name}", dtype, item_bytes, (Axis("dim", dim),), True)
        yield Part(state, pages[:, start:], (Span(0, dim),), (item_bytes,), pages.stride(0), size)
        start += int(pool.page_size) * size
