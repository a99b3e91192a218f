"""Attention with keys and values per head: full, within a sliding window, or within a chunk."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.catalog.config.dtypes import Item
from kvferry.catalog.config.fields import Fields
from kvferry.plan.description.layout import Axis, State
from kvferry.plan.description.model import Kept


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a token sees, and the name of the cache group of all layers that see as far."""

    group: str
    window_tokens: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Heads and dimensions over all ranks. `gated`: the query projection also yields a gate of its own size."""

    hidden_size: int
    num_query_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    gated: bool


def reach_of(fields: Fields, kind: str) -> Reach:
    """The reach of a layer whose attention is `full`, `window` or `chunk`."""
    if kind == "window":
        tokens = fields.number("sliding_window", "sliding_window_size")
        return Reach(f"window-{tokens}", tokens, 0)
    if kind == "chunk":
        tokens = fields.number("attention_chunk_size")
        return Reach(f"chunk-{tokens}", 0, tokens)
    return Reach("full", 0, 0)


def attention_of(fields: Fields, kind: str) -> Attention:
    """The attention of a layer. Some models give their sliding (`swa_`) or full (`global_`) layers other heads."""
    swa = ("swa_",) if kind == "window" else ()
    hidden_size = fields.number("hidden_size")
    num_query_heads = fields.number(*_variants("num_attention_heads", swa))
    num_heads = fields.number_or(num_query_heads, *_head_fields(fields, kind, swa))
    # Multi-query attention of the first Falcon generation: one head, whatever the count says.
    if fields.flag("multi_query", False) and not fields.flag("new_decoder_architecture", False):
        num_heads = 1
    fields.quotient(num_query_heads, num_heads, "the number of query heads per key head")
    own_dim = ("global_head_dim",) if kind == "full" else ()
    key_dim = fields.count(*own_dim, *_variants("head_dim", swa), "attention_head_dim") or fields.quotient(
        hidden_size, num_query_heads, "hidden_size per head"
    )
    return Attention(
        hidden_size,
        num_query_heads,
        num_heads,
        key_dim,
        value_dim=fields.number_or(key_dim, *_variants("v_head_dim", swa)),
        gated=fields.flag("attn_output_gate", False),
    )


def keep_attention(attention: Attention, prefix: str, item: Item, reach: Reach) -> tuple[Kept, ...]:
    """Key and value of a token; tensor parallelism divides the heads."""

    def kept(kind: str, dim: int) -> Kept:
        axes = (Axis("head", attention.num_heads), Axis("dim", dim))
        limits = (reach.window_tokens, reach.chunk_tokens)
        return Kept(State(f"{prefix}.{kind}", item.dtype, item.num_bytes, axes, True, *limits), "head")

    return kept("k", attention.key_dim), kept("v", attention.value_dim)


def attention_parameters(attention: Attention) -> int:
    """Weights of the four projections."""
    query = attention.num_query_heads * attention.key_dim * (2 if attention.gated else 1)
    output = attention.num_query_heads * attention.value_dim
    keys_and_values = attention.num_heads * (attention.key_dim + attention.value_dim)
    return attention.hidden_size * (query + keys_and_values + output)


def _variants(name: str, prefixes: tuple[str, ...]) -> tuple[str, ...]:
    return (*(prefix + name for prefix in prefixes), name)


def _head_fields(fields: Fields, kind: str, swa: tuple[str, ...]) -> tuple[str, ...]:
    common = (*_variants("num_key_value_heads", swa), "num_kv_heads", "multi_query_group_num")
    # Gemma 4 gives its full layers fewer heads where they share one projection for keys and values.
    own = kind == "full" and fields.flag("attention_k_eq_v", False)
    return ("num_global_key_value_heads", *common) if own else common
