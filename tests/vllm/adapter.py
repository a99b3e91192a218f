"""A LoRA adapter of the tiny Llama, with random weights: as peft writes it, without peft."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_models import GROUPED

__all__ = ["make_adapter"]

RANK = 8
# What changes a cache: keys and values.
PROJECTIONS = ("k_proj", "v_proj")


def make_adapter(folder: Path, seed: int) -> Path:
    """Equal files for equal seeds."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    hidden, projected = GROUPED["hidden_size"], GROUPED["num_key_value_heads"] * GROUPED["head_dim"]
    weights = {}
    for layer in range(GROUPED["num_hidden_layers"]):
        for name in PROJECTIONS:
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, hidden, generator=random) * 0.2
            weights[f"{place}.lora_B.weight"] = torch.randn(projected, RANK, generator=random) * 0.2
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": list(PROJECTIONS)}))
    return folder
