"""Attention over compressed tokens (DeepSeek V4): the last tokens as they are, and one entry for several of all."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.catalog.config.dtypes import FLOAT8, FLOAT32, PACKED_ROW, Item
from kvferry.catalog.config.fields import Fields
from kvferry.catalog.layers.latent import scales_of
from kvferry.catalog.layers.mixer import Mixer, Reach, reach_of
from kvferry.plan.description.layout import Axis

COMPRESSED = ("compress_ratios", "compress_rates")
"""Fields that say how many tokens share an entry."""

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS = {SPARSE: 4, HEAVY: 128}
"""How many tokens share an entry in the layers of each word, where the config does not say."""

_SCALED_ELEMENTS = 64
"""Elements of a packed row that share a scale of one byte; each row has a byte more (vLLM 0.32, 584 bytes of 512)."""


def words_of_ratios(fields: Fields) -> tuple[str, ...]:
    """The words of layers whose config says of each how many tokens share an entry; none where it does not."""
    word_of = {0: "sliding_attention", 1: "sliding_attention"} | {ratio: word for word, ratio in RATIOS.items()}
    ratios = fields.counts("compress_ratios")
    for ratio in ratios:
        if ratio not in word_of:
            raise fields.wrong("compress_ratios", ratio, "one of " + ", ".join(map(str, word_of)))
    return tuple(word_of[ratio] for ratio in ratios)


def compressed_attention(fields: Fields, word: str, item: Item) -> Iterator[Mixer]:
    """What a layer keeps: a row for keys and values of each token in its window; where it compresses, a row for every
    few tokens and what the next of them is computed from, with the same of an indexer if it chooses among them.

    All heads share them, so every tensor-parallel rank keeps all. As vLLM 0.32 keeps them.
    """
    window, dim = reach_of(fields, "window"), fields.number("head_dim")
    packed = item == PACKED_ROW
    row = Axis("byte", _packed_bytes(fields, dim)) if packed else Axis("dim", dim)
    yield Mixer(window.group, _projections(fields, dim), (window.row("latent", item, (row,), ""),))
    if word not in RATIOS:
        return
    rates = fields.inner("compress_rates")
    ratio = rates.number_or(RATIOS[word], word)
    # The entries of the sparse layers overlap: each is made of twice as many tokens as it stands for.
    overlap = 2 if word == SPARSE else 1
    entries, pending = Reach(f"every-{ratio}", 0, 0, ratio), reach_of_last(overlap * ratio)
    hidden, widths = fields.number("hidden_size"), {"compressor": dim}
    kept = [entries.row("compressed", item, (row,), "")]
    num_parameters = 0
    if word == SPARSE:
        index_dim, heads = fields.number("index_head_dim"), fields.number("index_n_heads")
        fields.skip("index_topk")  # how many entries a token sees
        widths["indexer.compressor"] = index_dim
        num_parameters += fields.number("q_lora_rank") * heads * index_dim + hidden * heads
        kept.append(entries.row("indexer.k", FLOAT8, (Axis("dim", index_dim),), ""))
        kept.append(entries.row("indexer.scale", FLOAT32, (scales_of(index_dim),), ""))
    # Values and their weights in the sum that an entry will be.
    inputs = {name: 2 * overlap * width for name, width in widths.items()}
    num_parameters += hidden * sum(inputs.values())
    yield Mixer(entries.group, num_parameters, tuple(kept))
    states = [pending.row(name, FLOAT32, (Axis("input", size),), "") for name, size in inputs.items()]
    yield Mixer(pending.group, 0, tuple(states))


def reach_of_last(num_tokens: int) -> Reach:
    """The reach of a layer that needs the last tokens alone."""
    return Reach(f"window-{num_tokens}", num_tokens, 0)


def _projections(fields: Fields, dim: int) -> int:
    """Weights of queries, of the row that keys and values share, and of the output, projected in groups of heads."""
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    query_rank = fields.number("q_lora_rank")
    output_rank, groups = fields.number("o_lora_rank"), fields.number("o_groups")
    fields.skip("num_key_value_heads", "qk_rope_head_dim")
    query = query_rank * (hidden + heads * dim)
    return query + hidden * dim + output_rank * (heads * dim + groups * hidden)


def _packed_bytes(fields: Fields, dim: int) -> int:
    """8-bit elements, the rotary ones in 16 bits, and scales."""
    rope_dim = fields.number("qk_rope_head_dim")
    if rope_dim >= dim:
        raise fields.wrong("qk_rope_head_dim", rope_dim, f"less than the {dim} of head_dim")
    return dim + rope_dim + -(-(dim - rope_dim) // _SCALED_ELEMENTS) + 1
