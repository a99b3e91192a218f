"""A model that costs a processor next to nothing, so that its steps can last as long as another's are said to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from kvferry.cli.models import TINY, resolve

__all__ = ["SMALL", "Shape", "make_model"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers, and KV heads (as many as query heads share) of so many elements, each of four bytes."""

    num_layers: int
    num_heads: int
    head_size: int


SMALL = Shape(num_layers=1, num_heads=1, head_size=32)
"""256 bytes of cache per token."""


def make_model(folder: Path, shape: Shape = SMALL) -> Path:
    """Layers with a cache of this shape, and the tokenizer of the tiny model."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(resolve(TINY)[0])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=2 * shape.num_heads,
        num_key_value_heads=shape.num_heads,
        head_dim=shape.head_size,
        max_position_embeddings=8192,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # What has no text is never answered: every token is then a piece of the stream.
        texts = ((i, tokenizer.decode([i], skip_special_tokens=True)) for i in range(len(tokenizer)))
        mute = [i for i, text in texts if not text.strip() or not text.isprintable() or "\ufffd" in text]
        model.lm_head.weight[mute] = 0.0
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
