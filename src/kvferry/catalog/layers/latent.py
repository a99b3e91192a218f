"""Latent attention (MLA): one compressed row per token for all heads, and the keys of a sparse-attention indexer."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.catalog.config.dtypes import FLOAT8, FLOAT32, PACKED_ROW, Item
from kvferry.catalog.config.fields import Fields
from kvferry.catalog.layers.attention import Reach
from kvferry.plan.description.layout import Axis, State
from kvferry.plan.description.model import Kept

_QUANTISED_ELEMENTS = 128
"""Elements that share one float32 scale, in packed rows as in the indexer's keys."""


@dataclass(frozen=True, slots=True)
class Indexer:
    """Scores which tokens a query attends to; keeps a quantised key per token. `dim` 0: the model has none."""

    num_heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class Latent:
    """Dimensions of latent attention. `query_rank` 0: queries are projected in one step."""

    hidden_size: int
    num_query_heads: int
    query_rank: int
    rank: int
    rope_dim: int
    plain_dim: int
    value_dim: int
    indexer: Indexer


def latent_of(fields: Fields) -> Latent:
    """The latent attention of a config with `kv_lora_rank`."""
    plain_dim = fields.number("qk_nope_head_dim")
    indexer = Indexer(0, 0)
    if fields.has("index_topk"):
        indexer = Indexer(fields.number("index_n_heads"), fields.number("index_head_dim"))
    return Latent(
        hidden_size=fields.number("hidden_size"),
        num_query_heads=fields.number("num_attention_heads"),
        query_rank=fields.count("q_lora_rank"),
        rank=fields.number("kv_lora_rank"),
        rope_dim=fields.count("qk_rope_head_dim"),
        plain_dim=plain_dim,
        value_dim=fields.number_or(plain_dim, "v_head_dim"),
        indexer=indexer,
    )


def indexer_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Per layer whether it has an indexer of its own; the others use the choice of a layer before them."""
    listed = fields.words("indexer_types")
    if listed and len(listed) != num_layers:
        raise fields.wrong("indexer_types", list(listed), f"one entry for each of the {num_layers} layers")
    if listed:
        return tuple(word != "shared" for word in listed)
    pattern = fields.word("index_topk_pattern")
    if pattern:
        marks = pattern.ljust(num_layers, "F")[:num_layers]
        return tuple(mark != "S" for mark in marks)
    every = fields.number_or(1, "index_topk_freq")
    offset = fields.count("index_skip_topk_offset") if fields.has("index_skip_topk_offset") else 2
    return tuple(max(layer - offset + 1, 0) % every == 0 for layer in range(num_layers))


def keep_latent(latent: Latent, prefix: str, item: Item, reach: Reach, with_indexer: bool) -> tuple[Kept, ...]:
    """The latent row of a token, and the indexer's key and scales. Every tensor-parallel rank keeps all of it."""

    def kept(kind: str, element: Item, axis: Axis) -> Kept:
        limits = (reach.window_tokens, reach.chunk_tokens)
        return Kept(State(f"{prefix}.{kind}", element.dtype, element.num_bytes, (axis,), True, *limits), "")

    row = Axis("byte", packed_bytes(latent)) if item == PACKED_ROW else Axis("dim", latent.rank + latent.rope_dim)
    rows = (kept("latent", item, row),)
    if not (with_indexer and latent.indexer.dim):
        return rows
    num_scales = -(-latent.indexer.dim // _QUANTISED_ELEMENTS)
    key = kept("indexer.k", FLOAT8, Axis("dim", latent.indexer.dim))
    return (*rows, key, kept("indexer.scale", FLOAT32, Axis("scale", num_scales)))


def packed_bytes(latent: Latent) -> int:
    """Bytes of a packed row: 8-bit latents, their float32 scales, and the rotary part in 16 bits."""
    return latent.rank + 4 * -(-latent.rank // _QUANTISED_ELEMENTS) + 2 * latent.rope_dim


def latent_parameters(latent: Latent, with_indexer: bool) -> int:
    """Weights of all projections, and of the indexer's."""
    hidden, heads = latent.hidden_size, latent.num_query_heads
    query_dim = heads * (latent.plain_dim + latent.rope_dim)
    query = latent.query_rank * (hidden + query_dim) if latent.query_rank else hidden * query_dim
    down = hidden * (latent.rank + latent.rope_dim)
    up = latent.rank * heads * (latent.plain_dim + latent.value_dim)
    output = heads * latent.value_dim * hidden
    indexer = latent.indexer if with_indexer else Indexer(0, 0)
    index = latent.query_rank * indexer.num_heads * indexer.dim + hidden * (indexer.dim + indexer.num_heads)
    return query + down + up + output + index
