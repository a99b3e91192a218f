"""Latent attention (MLA): one compressed row per token for all heads, and the keys of a sparse-attention indexer."""

from __future__ import annotations

from kvferry.catalog.config.dtypes import FLOAT8, FLOAT32, PACKED_ROW, Item
from kvferry.catalog.config.fields import Fields
from kvferry.catalog.layers.mixer import Mixer, Reach, reach_of
from kvferry.plan.description.layout import Axis
from kvferry.plan.description.model import Kept

SPARSE_BLOCKS = "minimax_m3_sparse"
"""How transformers calls layers that choose blocks of tokens by keys of their own."""

_OF_BLOCKS = ("index_n_heads", "index_block_size", "index_topk_blocks", "index_local_blocks")
"""Fields of how blocks are chosen, by several heads of queries that share one key."""

_QUANTISED_ELEMENTS = 128
"""Elements that share one float32 scale, in packed rows as in the indexer's keys."""


def latent_attention(fields: Fields, kind: str, item: Item, has_indexer: bool) -> Mixer:
    """The latent row of a token, and the weights of all projections, of a config with `kv_lora_rank`.

    Every tensor-parallel rank keeps all of it. Without `q_lora_rank` queries are projected in one step.
    """
    reach, plain_dim = reach_of(fields, kind), fields.number("qk_nope_head_dim")
    indexer_heads, indexer_dim = _indexer(fields)
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    rank, query_rank = fields.number("kv_lora_rank"), fields.count("q_lora_rank")
    rope_dim = fields.count("qk_rope_head_dim")
    # Heads of keys and values are those of the projections, of which nothing is kept.
    fields.skip("head_dim", "num_key_value_heads", "num_kv_heads", "qk_head_dim")
    value_dim = fields.number_or(plain_dim, "v_head_dim")

    query_dim = heads * (plain_dim + rope_dim)
    query = query_rank * (hidden + query_dim) if query_rank else hidden * query_dim
    down, up = hidden * (rank + rope_dim), rank * heads * (plain_dim + value_dim)
    output = heads * value_dim * hidden
    # A gate of the output is as large as its projection.
    gate = output if fields.flag("mla_use_output_gate", False) else 0
    num_parameters = query + down + up + output + gate

    # A packed row has 8-bit latents, their float32 scales, and the rotary part in 16 bits.
    packed_bytes = rank + 4 * -(-rank // _QUANTISED_ELEMENTS) + 2 * rope_dim
    row = Axis("byte", packed_bytes) if item == PACKED_ROW else Axis("dim", rank + rope_dim)
    kept = [reach.row("latent", item, (row,), "")]
    if has_indexer and indexer_dim:
        num_parameters += query_rank * indexer_heads * indexer_dim + hidden * (indexer_dim + indexer_heads)
        kept += _indexer_keys(reach, indexer_dim)
    return Mixer(reach.group, num_parameters, tuple(kept))


def _indexer(fields: Fields) -> tuple[int, int]:
    """Heads and dimension of what scores which tokens a query attends to; zeros where the model has none."""
    # It says which steps of a draft choose tokens anew. The keys to choose by are kept in any case.
    fields.skip("index_share_for_mtp_iteration")
    if not fields.has("index_topk"):
        return 0, 0
    return fields.number("index_n_heads"), fields.number("index_head_dim")


def _indexer_keys(reach: Reach, dim: int) -> tuple[Kept, Kept]:
    """A quantised key per token, and its scales."""
    key, scales = Axis("dim", dim), scales_of(dim)
    return reach.row("indexer.k", FLOAT8, (key,), ""), reach.row("indexer.scale", FLOAT32, (scales,), "")


def scales_of(dim: int) -> Axis:
    """The scales of a quantised key of `dim` elements."""
    return Axis("scale", -(-dim // _QUANTISED_ELEMENTS))


def indexer_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Per layer whether it has an indexer of its own; the others use the choice of a layer before them."""
    sparse = fields.inner("sparse_attention_config")
    if sparse.values:
        fields.skip("index_head_dim", *_OF_BLOCKS)
        return _sparse_layers(sparse, num_layers)
    if "index_topk_blocks" in fields.values and len(words := fields.words("layer_types")) == num_layers:
        fields.skip(*_OF_BLOCKS, *(() if SPARSE_BLOCKS in words else ("index_head_dim",)))
        return tuple(word == SPARSE_BLOCKS for word in words)
    listed = fields.words("indexer_types")
    if listed and len(listed) != num_layers:
        raise fields.wrong("indexer_types", list(listed), f"one entry for each of the {num_layers} layers")
    if listed:
        fields.skip("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
        return tuple(word != "shared" for word in listed)
    pattern = fields.word("index_topk_pattern")
    if pattern:
        marks = pattern.ljust(num_layers, "F")[:num_layers]
        return tuple(mark != "S" for mark in marks)
    every = fields.number_or(1, "index_topk_freq")
    offset = fields.count("index_skip_topk_offset") if fields.has("index_skip_topk_offset") else 2
    return tuple(max(layer - offset + 1, 0) % every == 0 for layer in range(num_layers))


def _sparse_layers(sparse: Fields, num_layers: int) -> tuple[bool, ...]:
    """Per layer whether it chooses blocks of tokens by keys of its own. An indexer with its own values is an error."""
    sparse.skip(
        *(f"sparse_{name}" for name in ("block_size", "topk_blocks", "init_block", "local_block", "score_type"))
    )
    sparse.skip("sparse_num_index_heads")  # heads of queries, which share one key
    if not sparse.flag("use_sparse_attention", True):
        sparse.skip(*sparse.values)
        return (False,) * num_layers
    marks, without_values = (sparse.counts(f"sparse_{name}") for name in ("attention_freq", "disable_index_value"))
    if len(marks) != num_layers:
        raise sparse.wrong("sparse_attention_freq", list(marks), f"a number for each of the {num_layers} layers")
    if without_values != marks:
        raise sparse.wrong("sparse_disable_index_value", list(without_values), "the same as sparse_attention_freq")
    return tuple(bool(mark) for mark in marks)
