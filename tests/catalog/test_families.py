"""Every kind of cache and every way that configs arrange their layers, decided by the fields."""

from __future__ import annotations

import pytest
from test_shipped import AUTO

from kvferry import catalog
from kvferry.catalog import Options
from kvferry.errors import ConfigurationError
from kvferry.plan.description.span import shares

BASE = {
    "dtype": "bfloat16",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def entry_of(**fields: object) -> catalog.Entry:
    return catalog.of_config({**BASE, **fields}, "test", AUTO)


def groups_of(**fields: object) -> list[str]:
    return [layer.group for layer in entry_of(**fields).cache.layers]


def axes_of(entry: catalog.Entry, name: str) -> dict[str, int]:
    state = next(kept.state for kept in entry.cache.kept() if kept.state.name == name)
    return {axis.name: axis.extent for axis in state.axes}


def test_keys_and_values_may_have_different_dimensions():
    entry = entry_of(head_dim=16, v_head_dim=12)
    assert axes_of(entry, "model.layers.5.k") == {"head": 2, "dim": 16}
    assert axes_of(entry, "model.layers.5.v") == {"head": 2, "dim": 12}
    assert {kept.divided_axis for kept in entry.cache.kept()} == {"head"}


def test_without_its_own_field_a_head_has_its_share_of_the_hidden_size():
    assert axes_of(entry_of(), "model.layers.0.k") == {"head": 2, "dim": 64 // 8}


def test_without_key_heads_every_query_head_has_its_own():
    assert axes_of(entry_of(num_key_value_heads=None), "model.layers.0.k")["head"] == 8


def test_multi_query_attention_has_one_head():
    assert axes_of(entry_of(multi_query=True), "model.layers.0.k")["head"] == 1
    assert axes_of(entry_of(multi_query=True, new_decoder_architecture=True), "model.layers.0.k")["head"] == 2


@pytest.mark.parametrize(
    ("fields", "full_layers", "limited"),
    [
        ({"sliding_window": 32}, (), "window-32"),
        ({"sliding_window": None}, range(6), ""),
        ({"sliding_window": 32, "use_sliding_window": False}, range(6), ""),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 4}, range(4), "window-32"),
        ({"sliding_window": 32, "sliding_window_pattern": 3}, (2, 5), "window-32"),
        ({"sliding_window": 32, "sliding_window_pattern": "LLG"}, (2, 5), "window-32"),
        ({"sliding_window": 32, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0]}, (0, 5), "window-32"),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"], "sliding_window": 8}, range(5), "window-8"),
        ({"attention_chunk_size": 16, "no_rope_layer_interval": 2}, (1, 3, 5), "chunk-16"),
        ({"attention_chunk_size": 16, "no_rope_layers": [0, 1, 1, 1, 1, 1]}, (0,), "chunk-16"),
        ({"attention_chunk_size": 16, "no_rope_layers": [1] * 6}, (), "chunk-16"),
        ({"attention_chunk_size": None, "no_rope_layers": [1] * 6}, range(6), ""),
    ],
)
def test_attention_within_a_window_or_a_chunk(fields, full_layers, limited):
    entry = entry_of(**fields)
    assert [layer.group for layer in entry.cache.layers] == [
        "full" if layer in full_layers else limited for layer in range(6)
    ]
    for layer in entry.cache.layers:
        limits = {(kept.state.window_tokens, kept.state.chunk_tokens) for kept in layer.kept}
        kind, _, tokens = layer.group.partition("-")
        assert limits == {(int(tokens or 0) * (kind == "window"), int(tokens or 0) * (kind == "chunk"))}


def test_sliding_layers_may_have_other_heads():
    fields = {"sliding_window": 32, "hybrid_layer_pattern": [0, 1] * 3, "head_dim": 16, "v_head_dim": 12}
    entry = entry_of(**fields, swa_num_key_value_heads=4, swa_head_dim=24, swa_v_head_dim=8)
    assert axes_of(entry, "model.layers.0.k") == {"head": 2, "dim": 16}
    assert axes_of(entry, "model.layers.1.k") == {"head": 4, "dim": 24}
    assert axes_of(entry, "model.layers.1.v") == {"head": 4, "dim": 8}


def test_layers_that_reuse_the_cache_of_earlier_ones_keep_nothing():
    entry = entry_of(num_kv_shared_layers=2)
    assert entry.cache.num_layers == 6
    assert {layer.layer for layer in entry.cache.layers} == {0, 1, 2, 3}


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
INDEXER = {"index_topk": 8, "index_head_dim": 192, "index_n_heads": 4, "q_lora_rank": 32}


def test_a_latent_row_is_the_same_on_every_rank():
    entry = entry_of(**LATENT)
    assert axes_of(entry, "model.layers.0.latent") == {"dim": 576}
    assert {kept.divided_axis for kept in entry.cache.kept()} == {""}


@pytest.mark.parametrize(
    ("fields", "with_indexer"),
    [
        ({}, range(6)),
        ({"index_topk_freq": 2}, (0, 1, 3, 5)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2)),
        ({"index_topk_pattern": "FSS"}, (0, 3, 4, 5)),
        ({"indexer_types": ["full", "shared"] * 3}, (0, 2, 4)),
    ],
)
def test_layers_share_the_choice_of_an_indexer(fields, with_indexer):
    entry = entry_of(**LATENT, **INDEXER, **fields)
    assert [len(layer.kept) for layer in entry.cache.layers] == [
        3 if layer in with_indexer else 1 for layer in range(6)
    ]
    assert axes_of(entry, "model.layers.0.indexer.k") == {"dim": 192}
    assert axes_of(entry, "model.layers.0.indexer.scale") == {"scale": 2}


def test_weights_of_an_indexer_count_once_per_indexer():
    # Query to the indexer's heads, and hidden size to its key and head weights.
    per_layer = 32 * 4 * 192 + 64 * (192 + 4)
    plain = entry_of(**LATENT, q_lora_rank=32).num_active_parameters
    assert entry_of(**LATENT, **INDEXER, index_topk_pattern="FSSSSS").num_active_parameters == plain + per_layer


MAMBA2 = {
    "mamba_n_heads": 16,
    "mamba_d_head": "auto",
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


def test_mamba_2_divides_heads_and_groups():
    entry = entry_of(**MAMBA2, attn_layer_indices=[1, 4])
    assert [layer.group for layer in entry.cache.layers] == ["full" if i in (1, 4) else "recurrent" for i in range(6)]
    assert axes_of(entry, "model.layers.0.conv.x") == {"head": 16, "head_dim": 8, "width": 3}
    assert axes_of(entry, "model.layers.0.conv.b") == {"group": 2, "state": 5, "width": 3}
    assert axes_of(entry, "model.layers.0.conv.c") == {"group": 2, "state": 5, "width": 3}
    assert axes_of(entry, "model.layers.0.ssm") == {"head": 16, "head_dim": 8, "state": 5}
    assert [kept.divided_axis for kept in entry.cache.layers[0].kept] == ["head", "group", "group", "head"]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16])
def test_mamba_2_can_be_shared_among_more_ranks_than_it_has_groups(num_ranks):
    """Each rank holds the group that its heads use, as in vLLM: heads of a group are neighbours."""
    entry = entry_of(**MAMBA2, attn_layer_indices=[])
    x, b, _, _ = entry.cache.layers[0].kept
    for rank, (heads, groups) in enumerate(
        zip(
            shares(x.state.axes[0].extent, num_ranks, "heads"),
            shares(b.state.axes[0].extent, num_ranks, "groups"),
            strict=True,
        )
    ):
        used = {head // (16 // 2) for head in range(heads.start, heads.stop)}
        assert used == set(range(groups.start, groups.stop)), rank


def test_both_mixers_in_one_layer_are_two_caches_of_it():
    entry = entry_of(model_type="falcon_h1", **MAMBA2, attn_layer_indices=None)
    assert [(layer.layer, layer.group) for layer in entry.cache.layers] == [
        (layer, group) for layer in range(6) for group in ("full", "recurrent")
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"hybrid_override_pattern": "M*-E*M"}, [(0, "recurrent"), (1, "full"), (4, "full"), (5, "recurrent")]),
        ({"layers_block_type": ["mamba", "attention", "mlp", "moe", "mamba2", "hybrid"]}, [
            (0, "recurrent"), (1, "full"), (4, "recurrent"), (5, "full"), (5, "recurrent")
        ]),
        ({"attn_layer_period": 3, "attn_layer_offset": 2}, [
            (0, "recurrent"), (1, "recurrent"), (2, "full"), (3, "recurrent"), (4, "recurrent"), (5, "full")
        ]),
    ],
)  # fmt: skip
def test_hybrids_name_their_layers_in_three_ways(fields, expected):
    moe = {"n_routed_experts": 4, "num_experts_per_tok": 2}
    assert [(layer.layer, layer.group) for layer in entry_of(**MAMBA2, **fields, **moe).cache.layers] == expected


def test_mamba_1_divides_channels():
    entry = entry_of(attn_layer_indices=[0], mamba_d_state=16, mamba_d_conv=4, mamba_expand=2)
    assert axes_of(entry, "model.layers.1.conv") == {"channel": 128, "width": 3}
    assert axes_of(entry, "model.layers.1.ssm") == {"channel": 128, "state": 16}
    assert {kept.divided_axis for kept in entry.cache.layers[1].kept} == {"channel"}


def test_models_without_attention():
    plain = {"dtype": "float16", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2}
    first = catalog.of_config({**plain, "model_type": "falcon_mamba", "intermediate_size": 96}, "first", AUTO)
    assert axes_of(first, "model.layers.1.conv") == {"channel": 96, "width": 3}
    assert first.num_active_parameters == 2 * 96 * (3 * 64 + 4 + 16 + 2 * 4 + 2 * 16) + 100 * 64
    second = catalog.of_config(
        {**plain, "model_type": "mamba2", "num_heads": 16, "head_dim": 8, "n_groups": 1}, "second", AUTO
    )
    assert axes_of(second, "model.layers.1.ssm") == {"head": 16, "head_dim": 8, "state": 128}
    assert first.cache.bytes_per_token == second.cache.bytes_per_token == 0


DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}


def test_a_gated_delta_net_divides_its_heads():
    entry = entry_of(**DELTA, full_attention_interval=3)
    assert groups_of(**DELTA, full_attention_interval=3) == ["recurrent", "recurrent", "full"] * 2
    assert axes_of(entry, "model.layers.0.conv.q") == {"head": 4, "key_dim": 16, "width": 3}
    assert axes_of(entry, "model.layers.0.conv.k") == {"head": 4, "key_dim": 16, "width": 3}
    assert axes_of(entry, "model.layers.0.conv.v") == {"head": 8, "value_dim": 24, "width": 3}
    assert axes_of(entry, "model.layers.0.ssm") == {"head": 8, "value_dim": 24, "key_dim": 16}
    assert {kept.divided_axis for kept in entry.cache.layers[0].kept} == {"head"}


@pytest.mark.parametrize("field", ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"])
def test_the_state_may_have_a_dtype_of_its_own(field):
    entry = entry_of(**DELTA, full_attention_interval=3, **{field: "float32"})
    dtypes = {kept.state.name.rsplit(".", 1)[1]: kept.state.dtype for kept in entry.cache.layers[0].kept}
    assert dtypes == {"q": "bfloat16", "k": "bfloat16", "v": "bfloat16", "ssm": "float32"}


@pytest.mark.parametrize("nested", [True, False])
def test_kimi_mixes_latent_attention_with_delta_attention_in_float32(nested):
    own = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "full_attn_layers": [4], "kda_layers": [1, 2]}
    flat = {"linear_num_heads": 4, "linear_head_dim": 8, "linear_conv_kernel_dim": 4}
    flat_layers = {"layer_types": ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 2}
    entry = entry_of(**LATENT, **({"linear_attn_config": own} if nested else flat | flat_layers))
    assert [layer.group for layer in entry.cache.layers] == ["recurrent"] * 3 + ["full"] + ["recurrent"] * 2
    assert axes_of(entry, "model.layers.0.conv.v") == {"head": 4, "value_dim": 8, "width": 3}
    assert entry.cache.layers[0].kept[3].state.dtype == "float32"
    assert axes_of(entry, "model.layers.3.latent") == {"dim": 576}


def test_gates_may_be_as_large_as_the_output():
    """Of low rank a gate of delta attention has 8 times the inputs and the outputs, else their product."""
    own = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "full_attn_layers": [4, 6]}
    plain = entry_of(**LATENT, linear_attn_config=own)
    gated = entry_of(**LATENT, linear_attn_config={**own, "use_full_rank_gate": True}, mla_use_output_gate=True)
    assert gated.cache == plain.cache
    heads, value_dim = BASE["num_attention_heads"], LATENT["v_head_dim"]
    more = 4 * (64 * 32 - 8 * (64 + 32)) + 2 * 64 * heads * value_dim
    assert gated.num_active_parameters - plain.num_active_parameters == more


def test_keys_and_values_of_full_layers_may_share_a_projection():
    fields = {"layer_types": ["full_attention"] + ["sliding_attention"] * 5, "sliding_window": 8, "head_dim": 16}
    plain, shared = (entry_of(**fields, attention_k_eq_v=equal) for equal in (False, True))
    assert shared.cache == plain.cache
    assert plain.num_active_parameters - shared.num_active_parameters == 64 * 2 * 16


def test_sliding_layers_may_have_more_query_heads():
    fields = {"layer_types": ["full_attention"] + ["sliding_attention"] * 5, "sliding_window": 8, "head_dim": 16}
    more = entry_of(**fields, num_sliding_attention_heads=12)
    assert more.cache == entry_of(**fields).cache
    assert more.num_active_parameters - entry_of(**fields).num_active_parameters == 5 * 64 * 4 * 2 * 16
    alone = entry_of(head_dim=16, num_sliding_attention_heads=12)
    assert alone.num_active_parameters == entry_of(head_dim=16).num_active_parameters


def test_layers_share_nothing_where_sharing_is_off():
    assert entry_of(use_cla=False, cla_share_factor=2).cache == entry_of().cache
    with pytest.raises(ConfigurationError, match="cla_share_factor"):
        entry_of(use_cla=True, cla_share_factor=2)


def test_a_short_convolution_keeps_its_last_inputs():
    entry = entry_of(model_type="lfm2", full_attn_idxs=[0], conv_L_cache=3)
    assert axes_of(entry, "model.layers.1.conv") == {"channel": 64, "width": 2}
    assert groups_of(model_type="lfm2", full_attn_idxs=[0], conv_L_cache=3) == ["full"] + ["recurrent"] * 5


DRAFT = ["draft.layers.0.k", "draft.layers.0.v"]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"num_nextn_predict_layers": 2}, [*DRAFT, "draft.layers.1.k", "draft.layers.1.v"]),
        ({"mtp_num_hidden_layers": 1}, DRAFT),
        ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}, DRAFT),
        ({"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["moe"]}, []),
        ({"num_nextn_predict_layers": 0}, []),
    ],
)  # fmt: skip
def test_draft_layers(fields, names):
    entry = catalog.of_config({**BASE, **fields}, "test", Options("auto", draft_layers=True))
    assert [kept.state.name for kept in entry.cache.kept()][12:] == names
    assert {layer.layer for layer in entry.cache.layers[6:]} <= {5}


# Attention of BASE and its vocabulary; the rest is MLP.
WITHOUT_MLP = 6 * 64 * (8 * 8 + 2 * (8 + 8) + 8 * 8) + 100 * 64
EXPERT, DENSE = 3 * 64 * 16, 3 * 64 * 128
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SPARSE = 64 * 4 + 2 * EXPERT


@pytest.mark.parametrize(
    ("fields", "mlp"),
    [
        ({}, 6 * DENSE),
        ({"hidden_act": "relu2"}, 6 * 2 * 64 * 128),
        ({"model_type": "starcoder2"}, 6 * 2 * 64 * 128),
        ({"intermediate_size": [64] * 3 + [192] * 3}, 6 * DENSE),
        ({"intermediate_size": None, "shared_intermediate_size": 128}, 6 * DENSE),
        (ROUTED, 6 * SPARSE),
        ({"num_local_experts": 4, "num_experts_per_tok": 2}, 6 * (64 * 4 + 2 * DENSE)),
        ({**ROUTED, "first_k_dense_replace": 2}, 2 * DENSE + 4 * SPARSE),
        ({**ROUTED, "moe_layer_freq": 3}, 4 * DENSE + 2 * SPARSE),
        ({**ROUTED, "moe_layer_freq": [0, 1, 1, 1, 1, 1]}, DENSE + 5 * SPARSE),
        ({**ROUTED, "mlp_layer_types": ["dense"] + ["sparse"] * 5}, DENSE + 5 * SPARSE),
        ({**ROUTED, "moe_layers": [1]}, 5 * DENSE + SPARSE),
        ({**ROUTED, "moe_layers_enum": "1, 4"}, 4 * DENSE + 2 * SPARSE),
        ({**ROUTED, "moe_layer_start_index": 2}, 2 * DENSE + 4 * SPARSE),
        ({**ROUTED, "moe_layer_start_index": 1, "moe_layer_end_index": -1}, DENSE + 5 * SPARSE),
        (
            {**ROUTED, "moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 2},
            4 * DENSE + 2 * SPARSE,
        ),
        ({**ROUTED, "enable_moe_block": True}, 6 * (DENSE + SPARSE)),
        ({**ROUTED, "num_experts_per_tok": [2] * 6, "moe_intermediate_size": [16] * 6}, 6 * SPARSE),
        ({**ROUTED, "num_shared_expert": [2] * 6}, 6 * (SPARSE + 2 * EXPERT)),
        # Two thirds of 128 are 85, and 96 is the next multiple of 32.
        ({"block_auto_adjust_ff_dim": True, "block_multiple_of": 32}, 6 * 3 * 64 * 96),
        ({"block_auto_adjust_ff_dim": False, "block_multiple_of": 32}, 6 * DENSE),
        ({**ROUTED, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, 4 * DENSE + 2 * SPARSE),
        ({**ROUTED, "expert_layer_period": 3, "expert_layer_offset": 1}, 4 * DENSE + 2 * SPARSE),
        ({**ROUTED, "n_shared_experts": 2}, 6 * (SPARSE + 2 * EXPERT)),
        ({**ROUTED, "shared_expert_intermediate_size": 32}, 6 * (SPARSE + 2 * EXPERT)),
        ({**ROUTED, "intermediate_size_mlp": 128}, 6 * (SPARSE + EXPERT)),
        ({**ROUTED, "moe_latent_size": 32}, 6 * (64 * 4 + 2 * 64 * 32 + 2 * 3 * 32 * 16)),
        ({"layer_types": ["attention"] * 6, "num_experts": 0}, 6 * DENSE),
    ],
)
def test_weights_of_mlps_and_chosen_experts(fields, mlp):
    assert entry_of(**fields).num_active_parameters == WITHOUT_MLP + mlp


def test_layers_that_are_only_an_mlp():
    moe = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    active = entry_of(hybrid_override_pattern="*--EE-", num_hidden_layers=None, **moe).num_active_parameters
    assert active == 64 * (8 * 8 + 2 * 16 + 8 * 8) + 3 * DENSE + 2 * SPARSE + 100 * 64


def test_where_only_some_layers_add_attention_the_mlp_comes_with_it():
    words = ["mamba", "hybrid", "mamba", "mamba", "mamba", "hybrid"]
    hybrid = entry_of(**MAMBA2, layers_block_type=words).num_active_parameters
    assert hybrid - entry_of(**MAMBA2, attn_layer_indices=[]).num_active_parameters == (
        2 * 64 * (8 * 8 + 2 * 16 + 8 * 8) + (2 - 6) * DENSE
    )


@pytest.mark.parametrize("outer", ["text_config", "llm_config", "language_config"])
def test_a_text_config_may_be_nested_and_inherits_the_dtype(outer):
    inner = {name: value for name, value in BASE.items() if name not in ("dtype", "vocab_size")}
    whole = {"model_type": "llava", "torch_dtype": "float16", "vocab_size": 100, outer: inner}
    entry = catalog.of_config(whole, "test", AUTO)
    assert {kept.state.dtype for kept in entry.cache.kept()} == {"float16"}
    assert entry.notes == ()


def test_a_nested_config_without_a_family_has_that_of_its_model():
    inner = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 128}
    entry = catalog.of_config({"model_type": "gemma3", "text_config": inner}, "test", AUTO)
    assert entry.cache.groups() == ("window-4096", "full")
    assert axes_of(entry, "model.layers.0.k") == {"head": 4, "dim": 256}


def test_notes_say_what_the_config_left_open():
    config = {name: value for name, value in BASE.items() if name != "dtype"}
    config["quantization_config"] = {"kv_cache_scheme": {"num_bits": 8}}
    entry = catalog.of_config(config, "test", AUTO)
    assert [note.partition(":")[0] for note in entry.notes] == [
        "the config has no dtype",
        "the checkpoint has scales for a quantized cache",
    ]


WINDOW = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 4}


@pytest.mark.parametrize(("family", "groups"), [("qwen3", ("full", "window-16")), ("qwen3_moe", ("window-16",))])
def test_not_every_family_has_layers_before_those_with_a_window(family, groups):
    assert entry_of(model_type=family, head_dim=8, **WINDOW).cache.groups() == groups


@pytest.mark.parametrize("listed", [{}, {"layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2}])
def test_cohere_says_the_pattern_of_its_windows_in_words_of_its_own_too(listed):
    own = {"layer_switch": 3, "order_of_interleaved_layers": "local_attn_first", "use_parallel_block": True}
    own |= {"sliding_window": 16, "sliding_window_pattern": 3, "use_embedding_sharing": True}
    entry = entry_of(model_type="cohere2", **own, **listed)
    assert entry.cache.groups() == ("window-16", "full")
    assert entry.notes == ()


def test_a_value_size_of_zero_is_that_of_the_keys():
    """DeepSeek-VL2 says so where it has no latents."""
    sizes = {"kv_lora_rank": None, "v_head_dim": 0, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "use_mla": False}
    assert axes_of(entry_of(**sizes), "model.layers.0.v") == axes_of(entry_of(), "model.layers.0.v")


def test_the_draft_heads_of_mimo_have_its_windows():
    """As in vLLM's mimo_v2_mtp.py."""
    own = {"swa_num_key_value_heads": 4, "swa_num_attention_heads": 8, "swa_head_dim": 8, "swa_v_head_dim": 8}
    own |= {"model_type": "mimo_v2_flash", "head_dim": 8, "v_head_dim": 8, "sliding_window": 16}
    config = {**BASE, **own, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 1], "num_nextn_predict_layers": 1}
    *_, draft = catalog.of_config(config, "test", Options("auto", draft_layers=True)).cache.layers
    assert draft.group == "window-16"
