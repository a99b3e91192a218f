"""Nothing in a config is trusted: whatever it says, it is described or refused with the field's name."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import BASE, DELTA, INDEXER, LATENT, MAMBA2
from test_shipped import AUTO, FIGURES, config_of

from kvferry import catalog
from kvferry.catalog import Options
from kvferry.errors import ConfigurationError

MAMBA1 = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": None}, "field num_hidden_layers is missing"),
        ({"num_hidden_layers": "many"}, "found: 'many'; expected: a whole number"),
        ({"num_hidden_layers": True}, "field num_hidden_layers cannot be used; found: True"),
        ({"num_hidden_layers": 4.0}, "found: 4.0"),
        ({"num_hidden_layers": 0}, "found: 0; expected: a whole number from 1"),
        ({"num_hidden_layers": -1}, "found: -1"),
        ({"num_hidden_layers": 1_000_000}, "at most 4096 layers"),
        ({"num_hidden_layers": 10**5000}, "a number of more than 64 bits"),
        ({"num_hidden_layers": "x" * 10**6}, "field num_hidden_layers cannot be used"),
        ({"num_attention_heads": None}, "field num_attention_heads is missing"),
        ({"num_attention_heads": 7}, "the number of query heads per key head is not a whole number; found: 7 / 2"),
        ({"num_attention_heads": 6}, "hidden_size per head is not a whole number; found: 64 / 6"),
        ({"vocab_size": None}, "field vocab_size is missing"),
        ({"hidden_size": 2**24 + 1}, "expected: a whole number from 1 to 16777216"),
        ({"dtype": "int3"}, "found: 'int3'; expected: float32, float"),
        ({"dtype": 16}, "field dtype cannot be used; found: 16; expected: a word"),
        ({"multi_query": "yes"}, "expected: true or false"),
        ({"layer_types": "full_attention"}, "a list of at most"),
        ({"layer_types": [1] * 6}, "a list of words"),
        ({"layer_types": ["full_attention"] * 5}, "found: list of 5; expected: one entry for each of the 6"),
        ({"layer_types": ["full_attention"] * 5 + ["magic"]}, "found: 'magic'; expected: one of attention, full"),
        ({"layer_types": ["full_attention"] * 5000, "num_hidden_layers": None}, "found: list of 5000"),
        ({"layer_types": ["sliding_attention"] * 6}, "field sliding_window or sliding_window_size is missing"),
        ({"layer_types": ["mamba"] * 6}, "field mamba_d_state or ssm_state_size or linear_num_value_heads"),
        ({"hybrid_override_pattern": "M*-X"}, "M for mamba"),
        ({"hybrid_override_pattern": "M" * 5000}, "at most 4096 marks"),
        ({"sliding_window": 8, "hybrid_layer_pattern": [1]}, "a number for each of the 6 layers"),
        ({"sliding_window": 8, "sliding_window_pattern": "LX"}, "L for sliding_attention"),
        ({"sliding_window": 8, "sliding_window_pattern": 0}, "field sliding_window_pattern cannot be used; found: 0"),
        ({"attention_chunk_size": 8}, "field no_rope_layer_interval is missing"),
        ({**MAMBA1, "mamba_d_state": None, "ssm_state_size": 8}, "field layer_types or layers_block_type"),
        ({**MAMBA1, "attn_layer_indices": [], "mamba_d_conv": 1}, "at least 2: a convolution"),
        ({**MAMBA2, "attn_layer_indices": [], "mamba_n_groups": 3}, "state-space heads per group"),
        ({**MAMBA2, "attn_layer_indices": [], "mamba_expand": 1, "hidden_size": 63}, "inner size per head"),
        ({**DELTA, "full_attention_interval": 2, "linear_conv_kernel_dim": 1}, "at least 2"),
        ({**DELTA, "full_attention_interval": 2, "linear_num_key_heads": 3}, "value heads per key head"),
        ({**LATENT, "qk_nope_head_dim": None}, "field qk_nope_head_dim is missing"),
        ({**LATENT, **INDEXER, "index_head_dim": None}, "field index_head_dim is missing"),
        ({**LATENT, "indexer_types": ["full"]}, "one entry for each of the 6 layers"),
        ({"num_kv_shared_layers": 6}, "fewer than the 6 layers"),
        ({"num_experts": 8, "num_experts_per_tok": None}, "field num_experts_per_tok or"),
        ({"text_config": [1]}, "an object with fields of its own"),
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"model_type": "bert"}, "this model generates no text"),
        ({"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]}, "found: XLMRobertaModel"),
        ({"architectures": ["ModernBertForMaskedLM"]}, "this model generates no text"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises(ConfigurationError) as caught:
        catalog.of_config({**BASE, **fields}, "models/tiny/config.json", AUTO)
    assert str(caught.value).startswith("models/tiny/config.json")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_too_many_draft_layers_are_refused():
    with pytest.raises(ConfigurationError, match="num_nextn_predict_layers"):
        catalog.of_config({**BASE, "num_nextn_predict_layers": 10**7}, "test", Options("auto", draft_layers=True))


def test_an_unknown_cache_dtype_is_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"found: fp3; expected: auto or float32, .*fp8_ds_mla"):
        catalog.read("qwen3-8b", Options("fp3", draft_layers=False))


def test_packed_rows_are_for_latent_attention():
    with pytest.raises(ConfigurationError, match="only latent attention can be kept as fp8_ds_mla"):
        catalog.read("qwen3-8b", Options("fp8_ds_mla", draft_layers=False))


def test_a_wrong_name_lists_close_ones():
    with pytest.raises(ConfigurationError, match=r"lama-3\.1-8b.*hint: did you mean llama-3\.1-8b, llama-.* or llama-"):
        catalog.read("lama-3.1-8b", AUTO)
    with pytest.raises(ConfigurationError, match=r"hint: did you mean mixtral-8x7b, mixtral-8x22b or "):
        catalog.read("mixtral-8x8b", AUTO)
    with pytest.raises(
        ConfigurationError, match=r"hint: did you mean seed-oss-36b\?; to plan for any model of the Hub"
    ):
        catalog.read("someone/seed-oss-37b", AUTO)
    with pytest.raises(ConfigurationError, match=r"expected: a config\.json, .* hint: pass the path"):
        catalog.read("zzz", AUTO)


@pytest.mark.parametrize("name", ["qwen3-999b", "zzz", "Kimi-K2.4"])
def test_a_wrong_name_is_answered_in_lines_that_fit_a_screen(name):
    """The message of a command begins each of them with ten columns and two spaces."""
    with pytest.raises(ConfigurationError) as caught:
        catalog.read(name, AUTO)
    error = caught.value
    assert max(map(len, (error.found, error.expected, error.hint))) <= 80 - 12


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a JSON object"),
        (b"{", "is not a JSON object"),
        (b"[1]", "is not a JSON object"),
        (b'{"a": "\xff"}', "is not a JSON object"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is not a JSON object"),
        (b" " * (4 * 2**20 + 1), "too large for a config"),
        (b"{}", "field num_hidden_layers is missing"),
    ],
)
def test_a_file_that_is_no_config(content, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message) as caught:
        catalog.read(path, AUTO)
    assert str(path) in str(caught.value)


def test_a_file_may_begin_with_the_mark_of_its_encoding(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASE), encoding="utf-8-sig")
    assert catalog.read(path, AUTO).cache == catalog.of_config(BASE, "test", AUTO).cache


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        catalog.read(tmp_path, AUTO)


def test_a_path_that_no_file_can_have():
    with pytest.raises(ConfigurationError):
        catalog.read("a\0b", AUTO)
    with pytest.raises(ConfigurationError):
        catalog.read("x" * 5000, AUTO)


def test_a_config_must_be_an_object():
    with pytest.raises(ConfigurationError, match="must be a JSON object; found: list"):
        catalog.of_config([], "test", AUTO)  # type: ignore[arg-type]


WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.integers(),
    st.sampled_from([2**16, 2**24, 2**63, 10**400]),
    st.floats(),
    st.sampled_from(["", "auto", "M*-E", "LLG", "FSF", "bfloat16", "float32", "hybrid", "mamba"]),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-2, 8), st.text(max_size=3), st.none()), max_size=8),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", "mamba", "hybrid", "conv", "moe"]), max_size=8),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
KNOWN = sorted(
    {name for config in FIGURES for name in (config_of(config) | config_of(config).get("text_config", {}))}
    | set(BASE) | set(MAMBA2) | set(DELTA) | set(LATENT) | set(INDEXER)
    | {"layer_types", "mtp_layers_block_type", "sliding_window_pattern", "hybrid_layer_pattern", "conv_L_cache"}
    | {"linear_attn_config", "quantization_config", "index_topk_freq", "index_topk_pattern", "num_kv_shared_layers"}
    | {"moe_layers", "mlp_layer_types", "max_window_layers", "mamba_ssm_dtype", "global_head_dim", "multi_query"}
)  # fmt: skip


@settings(max_examples=400)
@given(
    st.sampled_from(sorted(FIGURES)),
    st.dictionaries(st.sampled_from(KNOWN), WRONG, max_size=4),
    st.sets(st.sampled_from(KNOWN), max_size=3),
    st.booleans(),
)
def test_a_spoilt_config_is_described_or_refused(name, spoilt, missing, draft_layers):
    config = config_of(name)
    inner = config.get("text_config", config)
    assert isinstance(inner, dict)
    inner.update(spoilt)
    for field in missing:
        inner.pop(field, None)
    try:
        entry = catalog.of_config(config, name, Options("auto", draft_layers))
    except ConfigurationError:
        return
    assert entry.num_active_parameters > 0
    assert len({kept.state.name for kept in entry.cache.kept()}) == len(entry.cache.kept())


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=4), inner),
    max_leaves=12,
)


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(KNOWN), JSON), st.sampled_from(["auto", "fp8_ds_mla", "float8_e5m2"]))
def test_any_object_is_described_or_refused(config, cache_dtype):
    with contextlib.suppress(ConfigurationError):
        catalog.of_config(config, "any", Options(cache_dtype, draft_layers=True))


def test_a_shipped_name_comes_before_a_folder_of_the_same_name(tmp_path, monkeypatch):
    folder = tmp_path / "qwen3-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASE), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert catalog.read("qwen3-8b", AUTO).cache.num_layers == 36
    assert catalog.read("./qwen3-8b", AUTO).cache.num_layers == 6


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, "found: no model_type, and nothing else"),
        ({"a": 1, "b": [2]}, "found: no model_type, and a, b"),
        ({"model_type": "dinov2", "num_hidden_layers": 2, "patch_size": 14}, "model_type dinov2, a model of images"),
        ({"_class_name": "UNet2DConditionModel"}, "a model of a diffusion pipeline, by its _class_name"),
        (
            {"model_type": "clip", "text_config": {**BASE, "model_type": "clip_text_model"}},
            "generates no text.*found: model_type clip",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"model_type": "minicpm3", **BASE, **LATENT}, "different caches of this model.*vLLM.*SGLang"),
    ],
)
def test_what_is_no_language_model_is_told_what_it_is(config, kind):
    with pytest.raises(ConfigurationError, match=kind) as caught:
        catalog.of_config(config, "models/other/config.json", AUTO)
    assert "pass the model's own" not in str(caught.value)
    assert "\n" not in str(caught.value)
