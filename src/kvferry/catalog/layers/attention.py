"""Attention with keys and values per head: full, within a sliding window, or within a chunk."""

from __future__ import annotations

from kvferry.catalog.config.dtypes import Item
from kvferry.catalog.config.fields import Fields
from kvferry.catalog.layers.latent import SPARSE_BLOCKS
from kvferry.catalog.layers.mixer import Mixer, reach_of
from kvferry.plan.description.layout import Axis

HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "num_attention_groups", "num_query_groups")
"""Names of how many heads keys and values have."""
DIMS = ("attention_head_dim", "kv_channels", "dim_head")
"""Other names of a head's size."""


def attention(fields: Fields, kind: str, item: Item, has_indexer: bool = False) -> Mixer:
    """Key and value of a token, whose heads tensor parallelism divides; and the weights of the four projections.

    An indexer of sparse attention adds a key that all heads share, in the cache's element as SGLang 0.5.23 keeps it.
    Some models give their sliding (`swa_`) or full (`global_`) layers other heads.
    """
    reach, swa = reach_of(fields, kind), ("swa_",) if kind == "window" else ()
    hidden_size = fields.number("hidden_size")
    # Those of sliding layers change nothing that full ones do.
    fields.skip("num_sliding_attention_heads")
    sliding = ("num_sliding_attention_heads",) if kind == "window" else ()
    num_query_heads = fields.number(*sliding, *_variants("num_attention_heads", swa))
    heads, dims = _head_fields(fields, kind, swa), (*_variants("head_dim", swa), *DIMS)
    num_heads = fields.number_or(num_query_heads, *heads)
    # Multi-query attention of the first Falcon generation: one head, whatever the count says.
    if fields.flag("multi_query", False) and not fields.flag("new_decoder_architecture", False):
        num_heads = 1
    fields.quotient(num_query_heads, num_heads, "the number of query heads per key head")
    own_dim = ("global_head_dim",) if kind == "full" else ()
    key_dim = fields.count(*own_dim, *dims)
    key_dim = key_dim or fields.quotient(hidden_size, num_query_heads, "hidden_size per head")
    if fields.has(*own_dim, *dims) and fields.has(*heads):
        # Other numbers of queries change only what is computed.
        fields.skip("num_attention_heads_per_layer", "attention_hidden_size")
    value_dim = fields.count(*_variants("v_head_dim", swa)) or key_dim
    # The query projection may also yield a gate of its own size.
    query_dim = key_dim * (2 if fields.flag("attn_output_gate", False) else 1)
    projected = key_dim if _is_shared(fields, kind) else key_dim + value_dim
    num_parameters = hidden_size * (num_query_heads * (query_dim + value_dim) + num_heads * projected)
    head = Axis("head", num_heads)
    kept = [reach.row(name, item, (head, Axis("dim", dim)), "head") for name, dim in (("k", key_dim), ("v", value_dim))]
    sparse = fields.inner("sparse_attention_config")
    if has_indexer and (sparse.values or SPARSE_BLOCKS in fields.words("layer_types")):
        dim = sparse.number("sparse_index_dim") if sparse.values else fields.number("index_head_dim")
        kept.append(reach.row("indexer.k", item, (Axis("dim", dim),), ""))
    return Mixer(reach.group, num_parameters, tuple(kept))


def _variants(name: str, prefixes: tuple[str, ...]) -> tuple[str, ...]:
    return (*(prefix + name for prefix in prefixes), name)


def _head_fields(fields: Fields, kind: str, swa: tuple[str, ...]) -> tuple[str, ...]:
    common = (*_variants("num_key_value_heads", swa), *HEADS[1:])
    return ("num_global_key_value_heads", *common) if _is_shared(fields, kind) else common


def _is_shared(fields: Fields, kind: str) -> bool:
    """Whether keys and values share one projection, as in the full layers of Gemma 4, which then have fewer heads."""
    return kind == "full" and fields.flag("attention_k_eq_v", False)
