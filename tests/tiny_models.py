"""Tiny models with the real architectures' configurations and random weights, made once per machine.

Their answers mean nothing, but they depend on every byte of the cache, and vLLM runs the same code for them as for the
models they imitate. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import tiny_processors
from tiny_processors import IMAGE_SIZE, NUM_IMAGE_TOKENS, PATCH_SIZE, PROCESSORS, SOUND

__all__ = ["MODELS", "VOCAB_SIZE", "TinyModel", "model_folder"]

VOCAB_SIZE = 1024
SEED = 20_260_101
# Wider than the usual 0.02, else nearly every prompt gets the same answer.
SPREAD = 0.08
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": 16384,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {**COMMON, "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 4}
# All layers are dense: vLLM's experts on the CPU have no float32, which comparing needs, and no part in the cache.
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 4,
    "n_group": 2,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    **COMMON,
    **EXPERTS,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    # The real ones: vLLM's kernels on GPUs have no others.
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
NEMOTRON: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 6,
    "hybrid_override_pattern": "M*-M*-",
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "conv_kernel": 4,
    "chunk_size": 128,
    "mlp_hidden_act": "relu2",
}
FALCON: dict[str, Any] = {
    **GROUPED,
    "mamba_d_ssm": 512,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 128,
}
# Models that see or hear. Their processors have more tokens than the tokenizer.
WITH_MEDIA = VOCAB_SIZE + 8
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
    "initializer_range": SPREAD,
}
SEEING: dict[str, Any] = {
    "vision_config": VISION,
    "qformer_config": {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "encoder_hidden_size": 64,
        "initializer_range": SPREAD,
    },
    "text_config": {
        **COMMON,
        "model_type": "opt",
        "vocab_size": WITH_MEDIA,
        "ffn_dim": 512,
        "word_embed_proj_dim": 256,
        "num_hidden_layers": 4,
        "init_std": SPREAD,
    },
    "num_query_tokens": NUM_IMAGE_TOKENS,
    "image_token_index": VOCAB_SIZE,
}
# The tokens of an image have places in a plane, and those behind it go on from there. vLLM gives every other layer a
# window, as it would for a Llama.
SEEING_IN_PLANES: dict[str, Any] = {
    "vision_config": {**VISION, "spatial_merge_size": 2},
    "text_config": {
        **GROUPED,
        "vocab_size": WITH_MEDIA,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0, "mrope_section": [8, 12, 12]},
        "sliding_window": 192,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "image_token_id": VOCAB_SIZE,
    "vision_start_token_id": VOCAB_SIZE + 1,
    "vision_end_token_id": VOCAB_SIZE + 2,
}
MAX_SOUND_TOKENS = SOUND["chunk_length"] * 50
HEARING: dict[str, Any] = {
    "audio_config": {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": SOUND["feature_size"],
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "d_model": 64,
        "max_source_positions": MAX_SOUND_TOKENS,
        "initializer_range": SPREAD,
    },
    "text_config": {**GROUPED, "model_type": "qwen2", "vocab_size": WITH_MEDIA},
    "audio_token_index": VOCAB_SIZE,
    "initializer_range": SPREAD,
}
TRANSCRIBING: dict[str, Any] = {
    "vocab_size": WITH_MEDIA,
    "num_mel_bins": SOUND["feature_size"],
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 512,
    "d_model": 256,
    "max_source_positions": MAX_SOUND_TOKENS,
    "init_std": SPREAD,
    **{name: COMMON[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    "decoder_start_token_id": 1,
}
# vLLM's own rotary kernel for CPUs is wrong for interleaved positions. Latent attention with AMX has bfloat16 only,
# so the plain one is asked for, which does neither prefix caching nor chunked prefill.
LATENT_FLAGS = (
    "--compilation-config",
    '{"custom_ops":["-rotary_embedding"]}',
    "--attention-backend",
    "CPU_MLA",
    "--no-enable-prefix-caching",
    "--no-enable-chunked-prefill",
)
# With prefix caching, prompts longer than the chunk crash vLLM's CPU back end for Mamba.
HYBRID_FLAGS = ("--no-enable-prefix-caching",)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """What transformers builds (`Config` and `ForCausalLM` are appended), and what vLLM needs to run it: on a CPU
    `cpu_flags`, on a GPU whose attention has no float32 another dtype, `gpu_dtype`.

    `block_tokens` is the block size its attention has on the CPU back end; 0 lets vLLM choose, who sizes the blocks of
    hybrids after their states.
    """

    family: str
    settings: dict[str, Any]
    cpu_flags: tuple[str, ...] = ()
    block_tokens: int = 128
    config_name: str = ""
    model_name: str = ""
    gpu_dtype: str = "float32"

    @property
    def config_class(self) -> str:
        return self.config_name or f"{self.family}Config"

    @property
    def model_class(self) -> str:
        return self.model_name or f"{self.family}ForCausalLM"


def with_media(family: str, settings: dict[str, Any]) -> TinyModel:
    return TinyModel(family, settings, model_name=f"{family}ForConditionalGeneration")


MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("Llama", GROUPED),
    # As many layers, heads and dimensions as Llama 3.1 8B has in its cache.
    "llama_8b_cache": TinyModel(
        "Llama", {**GROUPED, "num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128}
    ),
    # Kernels for TPUs keep its heads padded to four times their size.
    "llama_narrow": TinyModel("Llama", {**GROUPED, "num_key_value_heads": 2, "head_dim": 32}),
    "qwen3": TinyModel("Qwen3", GROUPED),
    "mistral": TinyModel("Mistral", {**GROUPED, "sliding_window": 192}),
    "gemma3": TinyModel(
        "Gemma3",
        {**GROUPED, "num_hidden_layers": 6, "sliding_window": 192, "sliding_window_pattern": 3},
        config_name="Gemma3TextConfig",
    ),
    # SGLang keeps its windows in a part of the cache of their own.
    "mellum": TinyModel(
        "Mellum",
        {
            **GROUPED,
            "num_hidden_layers": 6,
            "sliding_window": 192,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense"] * 6,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
        },
    ),
    "deepseek_v2": TinyModel(
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "topk_method": "greedy"},
        LATENT_FLAGS,
        block_tokens=16,
        gpu_dtype="bfloat16",
    ),
    "deepseek_v3": TinyModel(
        "DeepseekV3",
        {**LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        LATENT_FLAGS,
        block_tokens=16,
        gpu_dtype="bfloat16",
    ),
    "nemotron_h": TinyModel("NemotronH", {**NEMOTRON, "n_groups": 2}, HYBRID_FLAGS, 0),
    "nemotron_h_one_group": TinyModel("NemotronH", {**NEMOTRON, "n_groups": 1}, HYBRID_FLAGS, 0),
    "blip2": with_media("Blip2", SEEING),
    "paddle_ocr": with_media("PaddleOCRVL", SEEING_IN_PLANES),
    "qwen2_audio": with_media("Qwen2Audio", HEARING),
    "whisper": with_media("Whisper", TRANSCRIBING),
    "falcon_h1": TinyModel("FalconH1", {**FALCON, "mamba_n_groups": 2}, HYBRID_FLAGS, 0),
    "falcon_h1_one_group": TinyModel("FalconH1", {**FALCON, "mamba_n_groups": 1}, HYBRID_FLAGS, 0),
}


def model_folder(name: str) -> Path:
    """The folder of a tiny model ; makes it when it is not there (a few seconds).

    The folder's name holds a hash of this recipe and of the library that builds it: nothing stale is ever used, and
    deleting the folder only costs the time of making it again. Safe when several processes do it at once.
    """
    folder = Path.home() / ".cache" / "kvferry" / "tiny-models" / _recipe() / name
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
        try:
            _build(MODELS[name], draft)
            _publish(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def _recipe() -> str:
    sources = (__file__, tiny_processors.__file__)
    text = "".join(Path(source).read_text(encoding="utf-8") for source in sources) + metadata.version("transformers")
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _publish(draft: Path, folder: Path) -> None:
    try:
        os.rename(draft, folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def _build(model: TinyModel, folder: Path) -> None:
    # The libraries' own deprecations are none of ours, and warnings are errors here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        config = getattr(transformers, model.config_class)(**model.settings, dtype="float32")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            built = getattr(transformers, model.model_class)(config)
        built.save_pretrained(folder)
        _copy_tokenizer(folder)
        if model.model_class.endswith("ForConditionalGeneration"):
            PROCESSORS[model.family](folder).save_pretrained(folder)
            _mend_names(folder / "model.safetensors")


def _mend_names(weights: Path) -> None:
    """transformers 5.19 writes `model` twice in the names of Qwen2-Audio, which no engine reads."""
    from safetensors.torch import load_file, save_file

    tensors = {name.replace(".model.model.", ".model."): tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})


def _copy_tokenizer(folder: Path) -> None:
    from kvferry.embedded.model.tiny import ensure_tiny_model

    llama = ensure_tiny_model(folder.parent, lambda _: None)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(llama / name, folder / name)
