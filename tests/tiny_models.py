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
# A model that sees: an image becomes 16 tokens at the beginning of the prompt.
IMAGE_SIZE, NUM_IMAGE_TOKENS = 56, 16
SEEING: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": IMAGE_SIZE,
        "patch_size": 14,
        "initializer_range": SPREAD,
    },
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
        "vocab_size": VOCAB_SIZE + 8,
        "ffn_dim": 512,
        "word_embed_proj_dim": 256,
        "num_hidden_layers": 4,
        "init_std": SPREAD,
    },
    "num_query_tokens": NUM_IMAGE_TOKENS,
    "image_token_index": VOCAB_SIZE,
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


MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("Llama", GROUPED),
    # As many layers, heads and dimensions as Llama 3.1 8B has in its cache.
    "llama_8b_cache": TinyModel(
        "Llama", {**GROUPED, "num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128}
    ),
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
    # In bfloat16 only, on CPUs.
    "mixtral": TinyModel("Mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "blip2": TinyModel("Blip2", SEEING, model_name="Blip2ForConditionalGeneration"),
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
    text = Path(__file__).read_text(encoding="utf-8") + metadata.version("transformers")
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
        if "vision_config" in model.settings:
            _add_processor(folder)


def _add_processor(folder: Path) -> None:
    """What makes an image a part of a prompt, and the token that stands in its place."""
    import transformers

    sides = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.BlipImageProcessorPil(size=sides)
    transformers.Blip2Processor(images, tokenizer, num_query_tokens=NUM_IMAGE_TOKENS).save_pretrained(folder)


def _copy_tokenizer(folder: Path) -> None:
    from kvferry.embedded.model.tiny import ensure_tiny_model

    llama = ensure_tiny_model(folder.parent, lambda _: None)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(llama / name, folder / name)
