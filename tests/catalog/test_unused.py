"""No field of a config is ignored in silence: it is read, known to mean nothing to a cache, told of, or refused."""

from __future__ import annotations

import json
from math import prod

import pytest
from test_families import BASE

from kvferry import catalog
from kvferry.catalog import Entry, Options
from kvferry.errors import ConfigurationError

AUTO, ASSUMING = Options("auto", draft_layers=False), Options("auto", draft_layers=False, assume_standard=True)
# Eight layers of eight heads of 64 in 16 bits.
EIGHT = {**BASE, "hidden_size": 512, "num_hidden_layers": 8, "num_key_value_heads": None}
LATENT = {"qk_nope_head_dim": 64, "v_head_dim": 64}


def entry_of(options: Options = AUTO, /, **fields: object) -> Entry:
    given = {name: value for name, value in {**EIGHT, **fields}.items() if value is not None}
    return catalog.of_config(given, "test", options)


def bytes_per_token(entry: Entry) -> int:
    rows = [kept.state for kept in entry.cache.kept() if kept.state.per_token]
    return sum(state.item_bytes * prod(axis.extent for axis in state.axes) for state in rows)


def num_states(entry: Entry) -> int:
    return sum(not kept.state.per_token for kept in entry.cache.kept())


@pytest.mark.parametrize(
    ("fields", "expected", "states"),
    [
        ({"model_type": "bailing_moe_linear", "num_key_value_heads": 2, "layer_group_size": 4}, 1024, 6),
        ({**LATENT, "layer_group_size": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16}, 192, 6),
        ({"attn_type_list": [1] * 8, "num_key_value_heads": 2}, 4096, 0),
        ({"attn_type_list": [0] * 6 + [1] * 2, "num_key_value_heads": 2}, 1024, 6),
        ({"num_attention_groups": 2}, 4096, 0),
        ({"layer_types": ["full_attention"] * 9, "num_nextn_predict_layers": 1, "num_key_value_heads": 2}, 4096, 0),
        ({**LATENT, "model_type": "glm_moe_dsa", "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 10_272, 0),
    ],
    ids=["groups", "groups of latents", "one type", "types", "attention groups", "draft's word", "class defaults"],
)  # fmt: skip
def test_what_decides_a_cache_is_read(fields, expected, states):
    """Worked by hand: two bytes an element; 128 bytes and a float32 for the key of an indexer."""
    entry = entry_of(**fields)
    assert (bytes_per_token(entry), num_states(entry)) == (expected, states)


def test_a_linear_layer_keeps_a_matrix_for_each_head():
    entry = entry_of(attn_type_list=[0] * 8)
    state = entry.cache.kept()[0].state
    assert [(axis.name, axis.extent) for axis in state.axes] == [("head", 8), ("key_dim", 64), ("value_dim", 64)]


@pytest.mark.parametrize("types", [[1] * 7, [1] * 7 + [2]])
def test_types_that_nobody_knows_are_refused(types):
    with pytest.raises(ConfigurationError, match=r"attn_type_list cannot be used.*for each of the 8 layers"):
        entry_of(attn_type_list=types)


def test_layers_behind_the_last_whole_group_see_everything_where_the_others_have_convolutions():
    groups = [layer.group for layer in entry_of(layer_group_size=3, short_conv_kernel_size=4, head_dim=64).cache.layers]
    assert groups == ["recurrent", "recurrent", "full"] * 2 + ["full", "full"]


def test_the_last_word_is_the_draft_layers_own():
    words = ["full_attention"] * 8 + ["sliding_attention"]
    fields = {**EIGHT, "layer_types": words, "num_nextn_predict_layers": 1, "sliding_window": 32}
    entry = catalog.of_config(fields, "test", Options("auto", draft_layers=True))
    assert [layer.group for layer in entry.cache.layers] == ["full"] * 8 + ["window-32"]


def test_layers_of_a_kind_may_have_numbers_of_their_own():
    other = {
        "attention_type": "sliding_attention",
        "num_attention_heads": 16,
        "num_attention_groups": 4,
        "head_dim": 32,
    }
    words = ["full_attention", "sliding_attention"] * 4
    entry = entry_of(
        layer_types=words, sliding_window=32, num_attention_groups=2, head_dim=64, attention_other_setting=other
    )
    assert bytes_per_token(entry) == 4 * 2 * 2 * (2 * 64 + 4 * 32)


SPARSE = {"sparse_index_dim": 128, "sparse_num_index_heads": 4, "sparse_topk_blocks": 16, "sparse_block_size": 128}


def test_sparse_layers_keep_a_key_that_all_heads_share():
    """Worked by hand from SGLang's pools: 128 elements in 16 bits for each of five layers."""
    marks = [0] * 3 + [1] * 5
    lists = {"sparse_attention_freq": marks, "sparse_disable_index_value": marks}
    entry = entry_of(num_key_value_heads=2, sparse_attention_config={**SPARSE, **lists, "use_sparse_attention": True})
    assert bytes_per_token(entry) == 8 * 2 * 2 * 64 * 2 + 5 * 128 * 2
    off = entry_of(num_key_value_heads=2, sparse_attention_config={**SPARSE, **lists, "use_sparse_attention": False})
    assert bytes_per_token(off) == 8 * 2 * 2 * 64 * 2
    with pytest.raises(ConfigurationError, match="sparse_disable_index_value"):
        entry_of(sparse_attention_config={**SPARSE, **lists, "sparse_disable_index_value": [0] * 8})


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_shared_experts": 1}


@pytest.mark.parametrize(
    ("name", "alias", "value"),
    [
        ("num_experts_per_tok", "top_k_experts", 2),
        ("num_experts_per_tok", "moe_k", 2),
        ("num_experts_per_tok", "moe_top_k", 2),
        ("num_shared_experts", "moe_num_shared_experts", 3),
        ("shared_expert_intermediate_size", "share_expert_dim", 96),
        ("first_k_dense_replace", "num_dense_layers", 3),
    ],
)
def test_numbers_of_experts_have_more_than_one_name(name, alias, value):
    fields = {other: number for other, number in EXPERTS.items() if other != name}
    known, other = (entry_of(**fields, **{each: value}) for each in (name, alias))
    assert other.num_active_parameters == known.num_active_parameters
    assert not any(alias in note for note in other.notes)


def test_dense_layers_beside_experts_may_have_a_size_of_their_own():
    marks = {**EXPERTS, "moe_layer_freq": [0] * 4 + [1] * 4, "first_k_dense_replace": 4}
    sizes = [entry_of(**marks, dense_intermediate_size=size).num_active_parameters for size in (128, 256)]
    assert sizes[1] - sizes[0] == 4 * 3 * 128 * 512
    assert sizes[0] == entry_of(**marks).num_active_parameters


def test_experts_that_are_switched_off_are_none():
    dense = entry_of().num_active_parameters
    assert entry_of(**EXPERTS, enable_moe_block=False).num_active_parameters == dense
    assert entry_of(**EXPERTS, enable_moe_block=True).num_active_parameters != dense


def test_single_layers_may_have_numbers_of_their_own():
    own = {"1": {"num_key_value_heads": 4, "head_dim": None}, "07": {"num_key_value_heads": 2, "head_dim": 32}}
    entry = entry_of(num_key_value_heads=2, head_dim=64, per_layer_config=own)
    assert bytes_per_token(entry) == (6 * 2 * 64 + 4 * 64 + 2 * 32) * 2 * 2
    with pytest.raises(ConfigurationError, match="head_dim cannot be used; found: 'wide'"):
        entry_of(per_layer_config={"1": {"head_dim": "wide"}})
    with pytest.raises(ConfigurationError, match=r"field first cannot be used.*one of the 8 layers"):
        entry_of(per_layer_config={"first": {"head_dim": 32}})
    with pytest.raises(ConfigurationError, match=r"field per_layer_config\.1\.kv_stride may change"):
        entry_of(per_layer_config={"1": {"kv_stride": 2}})


def test_a_list_of_linear_layers_says_which_ones_are_not():
    """As one of layers with attention does; both count from 1."""
    own = {"num_heads": 8, "head_dim": 64, "short_conv_kernel_size": 4}
    for lists in ({"kda_layers": [1, 2, 3, 5, 6, 7]}, {"full_attn_layers": [4, 8]}):
        groups = [layer.group for layer in entry_of(linear_attn_config={**own, **lists}).cache.layers]
        assert groups == (["recurrent"] * 3 + ["full"]) * 2


def test_experts_may_be_narrower_than_the_model():
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 2048}
    wide, *narrow = (
        entry_of(**experts, **{name: 256} if name else {}).num_active_parameters
        for name in ("", "moe_latent_size", "routed_expert_hidden_size")
    )
    assert narrow[0] == narrow[1] < wide


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_stride", 2),
        ("attention_compression_rate", 4),
        ("compression_factor", 4),
        ("ssm_ranks", 3),
        ("zeta_window", 128),
        ("lookback_layers", [0, 4]),
        ("head_groups", 2),
        ("wibble", [1] * 8),
        ("wobble", {"size": 4}),
        ("linear_attn_config", {"num_wibbles": 4}),
        ("sliding_window_rule", "every other"),
    ],
)
def test_a_field_that_may_change_a_cache_is_refused_by_its_name(name, value):
    with pytest.raises(
        ConfigurationError, match=rf"test: field {name}.* may change what a cache holds.*--assume-stand"
    ):
        entry_of(**{name: value})
    entry = entry_of(ASSUMING, **{name: value})
    assert bytes_per_token(entry) == 16_384
    assert any(name in note and "figures may be wrong" in note for note in entry.notes)


@pytest.mark.parametrize(
    "name",
    [
        "recurrent_dtype",
        "ssm_expand_factor",
        "latent_scale",
        "attention_group_limit",
        "index_topk_blocks",
        "chunk_alpha",
    ],
)
def test_a_word_of_caches_counts_more_than_what_a_name_ends_with(name):
    with pytest.raises(ConfigurationError, match=name):
        entry_of(**{name: 2})


def test_other_numbers_of_queries_decide_keys_where_these_have_none():
    """Keys that are as many as queries are as many in each layer as queries there, which is not described."""
    queries = {"num_attention_heads_per_layer": [8, 4] * 4}
    assert bytes_per_token(entry_of(**queries, num_key_value_heads=2, head_dim=64)) == 4096
    for fields in ({"head_dim": 64}, {"num_key_value_heads": 2}):
        with pytest.raises(ConfigurationError, match="num_attention_heads_per_layer"):
            entry_of(**queries, **fields)


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_what_is_switched_off_is_no_reason_to_doubt(value):
    assert entry_of(kv_stride=value).notes == entry_of().notes


@pytest.mark.parametrize("name", ["wibble", "n_frobs", "moe_wibble", "num_dense_experts"])
def test_other_fields_that_nobody_reads_are_told_of(name):
    entry = entry_of(**{name: 3})
    assert bytes_per_token(entry) == 16_384
    assert any(name in note for note in entry.notes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_dropout", 0.1),
        ("attention_bias", True),
        ("attn_logit_softcapping", 50.0),
        ("query_pre_attn_scalar", 256),
        ("layer_norm_epsilon", 1e-6),
        ("rope_parameters", {"full_attention": {"rope_theta": 1}}),
        ("vision_config", {"num_hidden_layers": 3}),
        ("image_token_index", 5),
        ("quantization_config", {"quant_method": "fp8"}),
        ("initializer_range", 0.02),
        ("partial_rotary_factor", 0.5),
        ("ignore_index", -100),
        ("indexer_rope_interleave", True),
        ("index_share_for_mtp_iteration", True),
        ("mtp_magic_layers", 1),
        ("attn_res_block_size", 12),
        ("mla_use_nope", True),
        ("moe_router_dtype", "float32"),
    ],
)
def test_what_means_nothing_to_a_cache_says_nothing(name, value):
    assert entry_of(**{name: value}).notes == entry_of().notes


def test_a_field_of_draft_layers_counts_where_these_are_asked_for():
    options = Options("auto", draft_layers=True)
    with pytest.raises(ConfigurationError, match="field mtp_magic_layers"):
        catalog.of_config({**EIGHT, "mtp_magic_layers": 1}, "test", options)


def test_what_is_listed_says_more_than_a_rule():
    """A list of indexers and one of experts, beside the rules that they follow; windows beside a chunk of as much."""
    rules = {"index_topk_freq": 2, "index_skip_topk_offset": 1, "moe_layer_freq": 1, "first_k_dense_replace": 1}
    listed = {"indexer_types": ["full", "shared"] * 4, "mlp_layer_types": ["dense"] * 8, "num_experts": 4}
    entry = entry_of(model_type="glm_moe_dsa", kv_lora_rank=512, num_experts_per_tok=2, **LATENT, **rules, **listed)
    assert bytes_per_token(entry) == 8 * 2 * (512 + 64) + 4 * 132
    drafts = Options("auto", draft_layers=True)
    config = {**EIGHT, "model_type": "glm_moe_dsa", "kv_lora_rank": 512, "num_experts_per_tok": 2, **LATENT, **listed}
    config |= {"index_share_for_mtp_iteration": True, "num_nextn_predict_layers": 1}
    assert bytes_per_token(catalog.of_config(config, "test", drafts)) == 9 * 2 * (512 + 64) + 5 * 132
    assert not [note for note in entry.notes if "nobody" in note]
    windows = {"hybrid_layer_pattern": [0, 1] * 4, "sliding_window": 32, "attention_chunk_size": 32}
    assert [layer.group for layer in entry_of(**windows).cache.layers] == ["full", "window-32"] * 4


def test_a_field_by_its_familys_own_name_is_the_configs():
    read = {field.name: field for field in entry_of(model_type="lfm2", block_ff_dim=96, intermediate_size=None).fields}
    assert (read["intermediate_size"].value, read["intermediate_size"].said_by) == (96, "config")


def test_a_null_and_another_name_leave_a_field_to_its_class(tmp_path):
    """Only the class knows which layers of this family see everything."""
    given = {name: value for name, value in EIGHT.items() if value is not None and name != "dtype"}
    path = tmp_path / "config.json"
    more = {"model_type": "cwm", "layer_types": None, "sliding_window": 32, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(given | more))
    entry = catalog.read(path, AUTO)
    assert [layer.group for layer in entry.cache.layers] == (["full"] + ["window-32"] * 3) * 2
    assert not any("dtype" in note for note in entry.notes)


def test_what_a_class_says_of_answers_is_not_told(tmp_path, capfd):
    given = {name: value for name, value in EIGHT.items() if value is not None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given | {"model_type": "llama", "bos_token_id": 10**6}))
    assert bytes_per_token(catalog.read(path, AUTO)) == 16_384
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("family", ["never-heard-of", "gemma2"])
def test_without_help_of_a_class_our_table_counts(family, tmp_path):
    """Nobody knows the one, and the other's class refuses what is written there: as without transformers."""
    given = {name: value for name, value in EIGHT.items() if value is not None} | {"rms_norm_eps": "small"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given | {"model_type": family}))
    entry = catalog.read(path, AUTO)
    assert not any("transformers" in note for note in entry.notes)
    assert bytes_per_token(entry) == (8 * 2 * 8 * 256 * 2 if family == "gemma2" else 16_384)


def test_many_unknown_fields_are_counted():
    with pytest.raises(ConfigurationError, match=r"kv_0: 1.*and 14 more") as caught:
        entry_of(**{f"kv_{number}": 1 for number in range(20)})
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "name",
    ["kv_quant_groups", "kv_head_multiplier", "num_layers_factor", "cache_scale", "state_multiplier", "kv_tokens"],
)
def test_a_word_of_caches_counts_more_than_one_of_numbers(name):
    with pytest.raises(ConfigurationError, match=name):
        entry_of(**{name: 2})


def test_what_lies_beside_a_nested_language_model_counts_too():
    nested = {
        "model_type": "wrapper",
        "text_config": EIGHT,
        "vision_config": {"num_hidden_layers": 2},
        "hidden_act": "x",
    }
    assert catalog.of_config(nested, "test", AUTO).notes == ()
    with pytest.raises(ConfigurationError, match="field kv_sharing_factor"):
        catalog.of_config({**nested, "kv_sharing_factor": 2}, "test", AUTO)


def test_what_was_read_is_told_with_what_it_decides():
    read = {field.name: field for field in entry_of(model_type="glm_moe_dsa", kv_lora_rank=512, **LATENT).fields}
    assert (read["num_hidden_layers"].value, read["num_hidden_layers"].decides) == (8, ("which layers there are",))
    assert read["kv_lora_rank"].said_by == "config"
    assert (read["index_topk"].value, read["index_topk"].said_by) == (2048, "table")
    assert "num_key_value_heads" not in read


def test_what_a_config_leaves_out_is_told_with_who_says_it(tmp_path):
    """Of a file, the model's own class where transformers is installed, as here."""
    given = {name: value for name, value in EIGHT.items() if value is not None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given | {"model_type": "gemma2"}))
    entry = catalog.read(path, AUTO)
    assert bytes_per_token(entry) == 8 * 2 * 4 * 256 * 2
    assert [layer.group for layer in entry.cache.layers] == ["window-4096", "full"] * 4
    (note,) = entry.notes
    assert note.startswith("left out by the config, and taken from its class in transformers: ")
    assert "head_dim" in note


def test_the_first_gpts_have_other_names_for_the_same():
    """Their MLP has two matrices, and where nothing is said, four times the width."""
    entry = catalog.of_config(
        {"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 64, "vocab_size": 100, "n_inner": None},
        "test",
        AUTO,
    )
    assert bytes_per_token(entry) == 3 * 2 * 64 * 2
    assert entry.num_active_parameters == 3 * (4 * 64 * 64 + 2 * 4 * 64 * 64) + 100 * 64


def test_a_key_by_which_blocks_are_chosen_is_read_as_transformers_saves_it():
    sparse = ["full_attention"] * 3 + ["minimax_m3_sparse"] * 5
    index = {"index_n_heads": 4, "index_block_size": 128, "index_topk_blocks": 16, "index_local_blocks": 1}
    entry = entry_of(num_key_value_heads=2, layer_types=sparse, index_head_dim=128, **index)
    assert bytes_per_token(entry) == 8 * 2 * 2 * 64 * 2 + 5 * 128 * 2
    with pytest.raises(ConfigurationError, match="field index_head_dim is missing"):
        entry_of(num_key_value_heads=2, layer_types=sparse, **index)
    plain = entry_of(num_key_value_heads=2, layer_types=["full_attention"] * 8, index_head_dim=128, **index)
    assert bytes_per_token(plain) == 8 * 2 * 2 * 64 * 2
    with pytest.raises(ConfigurationError, match="field index_block_size may change"):
        entry_of(num_key_value_heads=2, index_block_size=128)


def test_the_mlp_of_a_dense_model_may_be_called_shared():
    """As in Granite's hybrids without experts, which name both sizes."""
    sizes = {
        "intermediate_size": 999,
        "shared_intermediate_size": 256,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    }
    entry = entry_of(num_key_value_heads=8, **sizes)
    assert not entry.notes
    assert entry.num_active_parameters == 8 * (4 * 512 * 512 + 3 * 512 * 256) + 100 * 512


def test_draft_heads_may_have_several_layers_each():
    drafts = Options("auto", draft_layers=True)
    entry = entry_of(drafts, num_key_value_heads=2, num_mtp_modules=3, mtp_transformer_layers=2, use_mtp=True)
    assert bytes_per_token(entry) == (8 + 6) * 2 * 2 * 64 * 2


def test_what_a_class_nests_and_a_file_does_not_is_not_asked_about():
    given = {**EIGHT, "num_key_value_heads": 2, "model_type": "step3p7"}
    completed = {**given, "text_config": {"hidden_size": 4096, "magic_layers": 3}}
    assert bytes_per_token(catalog.of_config(given, "test", AUTO, completed)) == 8 * 2 * 2 * 64 * 2
