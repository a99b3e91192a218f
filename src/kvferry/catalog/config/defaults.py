"""What the configuration classes of model families assume when a saved config.json does not say.

Nested text configs are saved without the fields that equal their class's defaults, and a few families keep the
arrangement of their layers in code. This table is the only place where a family's name decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.catalog.config.fields import Fields
from kvferry.errors import ConfigurationError

_LLAMA4_TEXT: dict[str, object] = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
}
_GEMMA3_TEXT: dict[str, object] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_DELTA_NET: dict[str, object] = {
    "head_dim": 256,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DEEPSEEK: dict[str, object] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_WINDOWED: dict[str, object] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "bamba": {
        "num_key_value_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK | {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon_h1": {"num_key_value_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4},
    "falcon_mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": _GEMMA3_TEXT,
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2, "num_experts_per_tok": 4},
    "granitemoehybrid": {"mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2},
    "jamba": {
        "num_key_value_heads": 8,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "lfm2": {"conv_L_cache": 3, "num_key_value_heads": 8},
    "llama4_text": _LLAMA4_TEXT,
    "mamba": {"state_size": 16, "conv_kernel": 4, "expand": 2},
    "mamba2": {"state_size": 128, "conv_kernel": 4, "expand": 2, "n_groups": 8, "head_dim": 64, "num_heads": 128},
    "mimo_v2_flash": {"swa_num_key_value_heads": 8, "head_dim": 192, "v_head_dim": 128, "sliding_window": 128},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "nemotron_h": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mlp_hidden_act": "relu2",
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "mamba_ssm_cache_dtype": "float32",
    },
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "qwen2": _WINDOWED,
    "qwen3": _WINDOWED | {"head_dim": 128},
    "qwen3_moe": {"use_sliding_window": False, "num_key_value_heads": 4},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": _DELTA_NET,
    "qwen3_next": _DELTA_NET,
}

_RENAMED: Mapping[str, Mapping[str, str]] = {
    # Models without attention call the state-space heads simply heads.
    "mamba2": {"num_heads": "mamba_num_heads", "head_dim": "mamba_head_dim"},
    "mamba": {"intermediate_size": "mamba_d_inner"},
    "falcon_mamba": {"intermediate_size": "mamba_d_inner"},
    "lfm2": {"block_ff_dim": "intermediate_size"},
}

_TEXT_MODEL: Mapping[str, str] = {
    # The family of a nested text config that does not name its own.
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}

EVERY_LAYER: Mapping[str, str] = {
    # Families whose layers are all alike when the config names none of them.
    "bamba": "mamba",
    "falcon_h1": "hybrid",
    "falcon_mamba": "mamba",
    "granitemoehybrid": "mamba",
    "mamba": "mamba",
    "mamba2": "mamba",
}

PLAIN_MLP = frozenset({"falcon", "gpt_neox", "phi", "starcoder2"})
"""Families whose MLP has two matrices, not three, though its activation does not tell."""

_NESTED = ("text_config", "llm_config", "language_config")
_INHERITED = ("dtype", "torch_dtype", "quantization_config", "vocab_size")

_UNKNOWN: Mapping[str, str] = {
    # Fields of models whose caches this catalog cannot describe: better refused than described wrongly.
    "attn_type_list": "lightning attention",
    "compress_ratios": "attention over compressed tokens",
    "cross_attention_layers": "cross attention",
    "is_encoder_decoder": "an encoder and a decoder",
    "rwkv_version": "RWKV",
}


# Families of encoders: with `is_decoder` they can generate text, and keep a cache then.
_ENCODERS = frozenset(
    (
        "albert",
        "bert",
        "camembert",
        "clip",
        "convbert",
        "data2vec-text",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "esm",
        "eurobert",
        "flaubert",
        "funnel",
        "ibert",
        "jina_bert",
        "layoutlm",
        "layoutlmv3",
        "longformer",
        "luke",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "nystromformer",
        "rembert",
        "roberta",
        "roformer",
        "siglip",
        "squeezebert",
        "vit",
        "wav2vec2",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
    )
)
_HEADS_WITHOUT_TEXT = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)


def _check_generates(source: str, config: Mapping[str, object], family: str) -> None:
    """Raises ConfigurationError for a model that reads text without writing any: its engine keeps no cache."""
    architectures = config.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    is_encoder = family in _ENCODERS and config.get("is_decoder") is not True
    if is_encoder or (names and all(name.endswith(_HEADS_WITHOUT_TEXT) for name in names)):
        raise ConfigurationError(
            f"{source}: this model generates no text, so it has no KV cache to move",
            found=", ".join(names) or f"model_type {family}",
            expected="a model that generates text, such as one whose architecture ends in ForCausalLM",
        )


def language_fields(source: str, config: Mapping[str, object]) -> Fields:
    """The fields of the language model in a config, with its family's defaults where it does not say.

    Raises ConfigurationError when a nested config is no object, or when the model is known to keep what the catalog
    cannot describe.
    """
    fields = Fields(source, config)
    family = fields.word("model_type")
    nested = fields.inner(*_NESTED)
    if nested.values:
        inherited = {name: config[name] for name in _INHERITED if name in config}
        family = nested.word("model_type") or _TEXT_MODEL.get(family, family)
        fields = Fields(nested.source, inherited | dict(nested.values))
    _check_generates(source, config, family)
    for name, what in _UNKNOWN.items():
        if fields.values.get(name):
            raise ConfigurationError(
                f"{source}: the model has {what}, which the catalog cannot describe",
                found=f"field {name}",
                expected="attention, latent attention, state-space layers or gated delta nets",
                hint="describe the cache yourself as a kvferry.plan.description.model.CacheModel",
            )
    values = dict(_DEFAULTS.get(family, {})) | dict(fields.values) | {"model_type": family}
    renamed = _RENAMED.get(family, {})
    return Fields(fields.source, {renamed.get(name, name): value for name, value in values.items()})
