"""Attention over compressed tokens, as in DeepSeek V4: figures worked out from vLLM 0.32's own specifications."""

from __future__ import annotations

import pytest
from test_families import BASE

from kvferry import catalog
from kvferry.catalog import Entry, Options
from kvferry.errors import ConfigurationError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.tokens import TokenRange

AUTO = Options("auto", draft_layers=False)
FLASH = {
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_nextn_predict_layers": 1,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
}


def entry_of(options: Options = AUTO, /, **fields: object) -> Entry:
    given = {name: value for name, value in {**FLASH, **fields}.items() if value is not None}
    return catalog.of_config(given, "test", options)


def of_layer(entry: Entry, number: int) -> dict[str, tuple[int, int, int]]:
    """Bytes, window and tokens an entry of each state of a layer."""
    return {
        kept.state.name.removeprefix(f"model.layers.{number}."): (
            kept.num_bytes,
            kept.state.window_tokens,
            kept.state.compress_ratio,
        )
        for layer in entry.cache.layers
        if layer.layer == number
        for kept in layer.kept
    }


def test_each_kind_of_layer_keeps_what_vllm_keeps():
    """A row of 512 for keys and values together; 4 tokens an entry overlap, 128 do not; a key of 128 bytes and a scale;
    of each token of an entry that is not complete, float32 values and weights."""
    entry = entry_of()
    window, packed = {"latent": (1024, 128, 1)}, ("compressed", "indexer.k", "indexer.scale")
    assert of_layer(entry, 0) == window
    assert of_layer(entry, 1) == window | {
        **dict(zip(packed, ((1024, 0, 4), (128, 0, 4), (4, 0, 4)), strict=True)),
        "compressor": (2 * 2 * 512 * 4, 8, 1),
        "indexer.compressor": (2 * 2 * 128 * 4, 8, 1),
    }
    assert of_layer(entry, 2) == window | {"compressed": (1024, 0, 128), "compressor": (2 * 512 * 4, 128, 1)}
    assert entry.cache.lasting_bytes_per_token == 2 * (1024 + 128 + 4) // 4 + 1024 // 128
    assert not entry.notes


def test_all_heads_share_everything():
    assert {kept.divided_axis for kept in entry_of().cache.kept()} == {""}


def test_ratios_are_read_from_what_transformers_saves_too():
    words = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 64}
    saved = entry_of(compress_ratios=None, layer_types=[*words, words[1]], compress_rates=rates)
    assert of_layer(saved, 1) == of_layer(entry_of(), 1)
    assert of_layer(saved, 2)["compressed"] == (1024, 0, 64)
    assert of_layer(saved, 2)["compressor"] == (4096, 64, 1)


def test_the_draft_layer_has_a_ratio_of_its_own():
    entry = entry_of(Options("auto", draft_layers=True))
    drafts = [kept.state for kept in entry.cache.kept() if kept.state.name.startswith("draft.")]
    assert [(state.name, state.window_tokens) for state in drafts] == [("draft.layers.0.latent", 128)]


def test_a_packed_row_has_584_bytes():
    entry = entry_of(Options("fp8_ds_mla", draft_layers=False))
    assert of_layer(entry, 1)["latent"] == (448 + 2 * 64 + 8, 128, 1)
    assert of_layer(entry, 1)["compressed"] == (584, 0, 4)
    assert of_layer(entry, 1)["compressor"] == (8192, 8, 1)


def test_active_parameters_of_the_whole_model_are_near_the_published_13_billion():
    ratios = [0, 0, *[4, 128] * 20, 4, 0]
    entry = entry_of(num_hidden_layers=43, compress_ratios=ratios)
    assert entry.num_active_parameters == pytest.approx(13e9, rel=0.05)


def test_a_long_prompt_moves_entries_and_what_the_next_ones_need():
    (layout,) = describe(entry_of().cache, EngineShape(1, 1, 128, 10, "token-major"), 1 << 20)
    moved = {state.name: len(state.seen_by_next(TokenRange(0, 1030))) for state in layout.states}
    assert moved["model.layers.1.latent"] == 127
    assert moved["model.layers.1.compressed"] == 257
    assert moved["model.layers.1.compressor"] == 7
    assert moved["model.layers.2.compressed"] == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compress_ratios": [0, 4, 2, 4]}, "found: 2; expected: one of 0, 1, 4, 128"),
        ({"compress_ratios": [4, 4]}, "field layer_types cannot be used; found: list of 2"),
        ({"compress_ratios": "4"}, "a list of at most"),
        ({"head_dim": None}, "field head_dim is missing"),
        ({"index_head_dim": None}, "field index_head_dim is missing"),
        ({"sliding_window": None}, "field sliding_window or sliding_window_size is missing"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ConfigurationError) as caught:
        entry_of(**fields)
    assert message in str(caught.value)


def test_a_packed_row_needs_elements_beside_the_rotary_ones():
    with pytest.raises(ConfigurationError, match="qk_rope_head_dim"):
        entry_of(Options("fp8_ds_mla", draft_layers=False), qk_rope_head_dim=512)


def test_others_say_nothing_of_it():
    entry = catalog.of_config(BASE, "test", AUTO)
    assert {kept.state.compress_ratio for kept in entry.cache.kept()} == {1}
