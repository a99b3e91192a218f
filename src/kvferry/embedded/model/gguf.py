"""Gemma 3 270M out of its packages: put together, dequantised, and saved as transformers and vLLM load it.

Loads torch, so only a process that makes the model imports this.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from kvferry.embedded.model.trained import PACKAGE
from kvferry.errors import ConfigurationError

PACKED = "packed.gguf"


def build(folder: Path) -> None:
    """Write the model and its tokenizer into a folder. Raises ConfigurationError when the packages' parts are not those
    that were published."""
    logging.disable_progress_bar()
    packed = folder / PACKED
    try:
        importlib.import_module(PACKAGE).assemble(packed)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigurationError(
            f"the parts of {PACKAGE} do not make its model", found=str(error), hint="install kvferry[demo] again"
        ) from error
    try:
        _save_tokenizer(folder)
        _save_model(folder)
    finally:
        packed.unlink()


def _save_tokenizer(folder: Path) -> None:
    """Save a tokenizer that adds the token that begins a text. The packed form does not, so its answers degenerate."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=PACKED)
    begin = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)


def _save_model(folder: Path) -> None:
    """Save the model as if it was never quantised: what is loaded from a packed form refuses to be saved."""
    packed = AutoModelForCausalLM.from_pretrained(folder, gguf_file=PACKED, dtype=torch.float32)
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(packed).__name__]
    with torch.device("meta"):
        plain = type(packed)(config)
    plain.load_state_dict(packed.state_dict(), assign=True)
    plain.generation_config = packed.generation_config
    plain.save_pretrained(folder)
