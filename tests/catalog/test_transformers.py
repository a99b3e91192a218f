"""transformers as an independent reader: its configs, its parameter counts, and the caches that it really allocates."""

from __future__ import annotations

import dataclasses
import warnings
from math import prod

import pytest
import torch
from test_families import BASE
from test_shipped import AUTO, FIGURES, config_of
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, __version__
from transformers.configuration_utils import remap_legacy_layer_types
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from kvferry import catalog
from kvferry.catalog.config.class_defaults import UNKNOWN, class_values
from kvferry.catalog.config.families import _FAMILIES, language_fields
from kvferry.catalog.layers.layer_types import layers_of
from kvferry.catalog.layers.mlp import _CHOSEN, _EXPERTS
from kvferry.connectors.transformers.features import NEWEST
from kvferry.errors import ConfigurationError

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "dtype": "float32",
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
MAMBA2 = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10}
FAMILIES = {
    "llama": {},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
    "gemma2": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 2},
    "gemma4_text": {
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_oss": {"num_local_experts": 2, **MOE},
    "cohere2": {"sliding_window_pattern": 2, "sliding_window": 16},
    "olmo3": {"sliding_window": 16},
    "mimo_v2_flash": {
        "v_head_dim": 4,
        "n_routed_experts": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        **MOE,
    },
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 16, "no_rope_layer_interval": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 6, "num_experts": 2},
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 6,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 8, **MAMBA2},
    "bamba": {"attn_layer_indices": [1], **MAMBA2},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 6,
        "mamba_headdim": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "qwen3_next": {"num_experts": 4, "shared_expert_intermediate_size": 8, **DELTA, **MOE},
    "lfm2": {"full_attn_idxs": [1]},
}


# Families that transformers knows by another name, if only for what is compared here.
ALIKE = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}


def loaded(config: dict[str, object]):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoConfig.for_model(**config)


def text_config_of(name: str) -> dict[str, object]:
    """The config of a shipped model's language model, for a class of transformers."""
    config = config_of(name)
    config = dict(config.get("text_config", config))
    family = str(config["model_type"])
    return {**config, "model_type": ALIKE.get(family, family)}


def heads_of(theirs: PreTrainedConfig) -> set[int]:
    """How many heads keys have in its layers, some of which may have numbers of their own."""
    theirs.allow_global_per_layer_attribute_access = True
    own = [theirs.per_layer_config[layer].num_key_value_heads for layer in range(theirs.num_hidden_layers)]
    return {getattr(theirs, "swa_num_key_value_heads", theirs.num_key_value_heads), *own}


# Of the others no class is in transformers.
KNOWN = [name for name in FIGURES if text_config_of(name)["model_type"] in CONFIG_MAPPING]
# Their classes build a model from more than a config of the language model says, or of more than attention and MLPs, or
# build none of text alone.
NOT_BUILT = {"gemma-3n-e4b", "hunyuan-a13b", "kimi-k3", "mistral-small-4", "step-3.7-flash"}


@pytest.mark.parametrize("name", KNOWN)
def test_a_shipped_config_has_the_geometry_that_transformers_reads(name):
    theirs = loaded(text_config_of(name))
    fields = language_fields(name, config_of(name))
    entry = catalog.read(name, AUTO)
    assert entry.cache.num_layers == theirs.num_hidden_layers
    keys = [kept.state for kept in entry.cache.kept() if kept.state.name.endswith(".k") and len(kept.state.axes) == 2]
    assert {state.axes[0].extent for state in keys} <= heads_of(theirs)
    words = getattr(theirs, "layer_types", None)
    if words:
        assert remap_legacy_layer_types([layer.word for layer in layers_of(fields)]) in (words, ["full_attention"] * 61)


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in NOT_BUILT])
def test_all_parameters_are_those_of_the_model_that_transformers_builds(name):
    """With every expert chosen and the input embedding added, the estimate is the size of the whole model."""
    config = text_config_of(name)
    theirs = loaded(dict(config))
    experts = [config[field] for field in _EXPERTS if field in config]
    config.update({field: experts[0] for field in _CHOSEN if field in config})
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(theirs)
    whole = sum(parameter.numel() for parameter in model.parameters())
    looked_up = 0 if theirs.tie_word_embeddings else theirs.vocab_size * theirs.hidden_size
    entry = catalog.of_config(config, name, AUTO)
    assert entry.num_active_parameters + looked_up == pytest.approx(whole, rel=0.001)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_have_the_shapes_that_transformers_allocates(family):
    config = {**TINY, **FAMILIES[family], "model_type": family}
    theirs = loaded({**config, "pad_token_id": 0})
    entry = catalog.of_config(config, family, AUTO)
    num_tokens = 3
    model = AutoModelForCausalLM.from_config(theirs).eval()
    with torch.no_grad():
        cache = model(torch.arange(1, 1 + num_tokens)[None], use_cache=True).past_key_values
    kept: dict[int, dict[str, tuple[int, ...]]] = {}
    for layer in entry.cache.layers:
        for each in layer.kept:
            shape = tuple(axis.extent for axis in each.state.axes)
            kept.setdefault(layer.layer, {})[each.state.name.split(".", 3)[3]] = shape
    for layer, allocated in enumerate(cache.layers):
        ours = kept.get(layer, {})
        for kind, tensor in (("k", vars(allocated).get("keys")), ("v", vars(allocated).get("values"))):
            shape = None if tensor is None else (tensor.shape[1], tensor.shape[3])
            assert ours.get(kind) == shape
        # transformers keeps all inputs of the convolution, vLLM (and we) all but the newest.
        convolved = [shape for name, shape in ours.items() if name.startswith("conv")]
        theirs_convolved = _first(vars(allocated).get("conv_states"))
        assert sum(prod(shape) for shape in convolved) == prod(theirs_convolved[:-1]) * max(0, theirs_convolved[-1] - 1)
        assert sorted(ours.get("ssm", (0,))) == sorted(_first(vars(allocated).get("recurrent_states"))[1:])


def _first(states: dict[int, torch.Tensor | None] | None) -> tuple[int, ...]:
    """The shape of a layer's state, in front of it the batch of one."""
    state = states[0] if states else None
    return (1, 0) if state is None else tuple(state.shape)


# Later versions of transformers count the token itself. Published models have the field.
COUNTED_OTHERWISE = {("mimo_v2_flash", "sliding_window", 129)}


@pytest.mark.parametrize("family", [name for name, family in _FAMILIES.items() if family.defaults])
def test_defaults_are_those_of_the_configuration_class(family):
    """A field that the class does not have is about the arrangement of the layers, which must then be the class's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoConfig.for_model(family)
    declared = {field.name: field.default for field in dataclasses.fields(theirs)}
    for name, value in _FAMILIES[family].defaults.items():
        if name in declared and (family, name, declared[name]) not in COUNTED_OTHERWISE:
            assert declared[name] == value, name
    config = {"model_type": family, "num_hidden_layers": theirs.num_hidden_layers, "num_attention_heads": 8}
    words = getattr(theirs, "layer_types", None)
    if words and family not in ("nemotron_h", "mimo_v2_flash"):
        ours = remap_legacy_layer_types([layer.word for layer in layers_of(language_fields(family, config))])
        indexed = family == "deepseek_v32"
        assert ours == (["full_attention"] * len(words) if indexed else words)


@pytest.mark.parametrize("family", sorted(MODEL_FOR_MASKED_LM_MAPPING_NAMES))
def test_a_family_that_fills_in_masks_is_refused(family):
    """Of those that transformers knows; an encoder with a decoder is refused for that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = CONFIG_MAPPING[family]().to_dict()
    with pytest.raises(ConfigurationError):
        catalog.of_config({name: value for name, value in config.items() if name != "architectures"}, family, AUTO)


# Of pictures, sounds and pages, and one whose code is on the Hub.
@pytest.mark.parametrize("family", ["clip", "jina_bert", "layoutlmv3", "siglip", "vit", "wav2vec2"])
def test_an_encoder_that_fills_in_no_masks_is_refused(family):
    with pytest.raises(ConfigurationError, match="generates no text"):
        catalog.of_config({**BASE, "model_type": family}, family, AUTO)


@pytest.mark.parametrize("family", [name for name, family in _FAMILIES.items() if family.encoder])
def test_an_encoder_is_described_as_a_decoder_only(family):
    if family not in CONFIG_MAPPING and tuple(map(int, __version__.split(".")[:2])) < NEWEST:
        pytest.skip(f"transformers {__version__} does not have it")
    assert family in CONFIG_MAPPING or family == "jina_bert"
    with pytest.raises(ConfigurationError, match="generates no text"):
        catalog.of_config({**BASE, "model_type": family}, family, AUTO)
    if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        described = catalog.of_config({**BASE, "model_type": family, "is_decoder": True}, family, AUTO)
        assert described.cache.num_layers == BASE["num_hidden_layers"]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_next", "num_hidden_layers": 4097},
        {"model_type": "llama", "num_labels": 10_000_000},
        {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10_000_000}},
    ],
    ids=lambda config: config["model_type"],
)
def test_no_class_is_asked_that_would_make_lists_longer_than_any_model(config):
    assert class_values(config) is UNKNOWN
