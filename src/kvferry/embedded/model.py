"""A tiny but real model, made on this machine: a Llama with random weights and a tokenizer trained on our own text.

Its answers mean nothing, yet every part is what a large model has: the same code computes its cache, and a wrong
byte in it changes the answer. Nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

__all__ = ["TINY_MODEL_NAME", "ensure_tiny_model"]

# The number is the recipe's: raise it when what is made changes, so that an old copy is not taken for the new one.
TINY_MODEL_NAME = "kvferry-tiny-1"
SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|turn|>")
VOCAB_SIZE = 1024
SEED = 20_240_229
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def ensure_tiny_model(directory: Path, progress: Callable[[str], None]) -> Path:
    """The folder of the tiny model inside `directory`; makes it when it is not there (a few seconds).

    Safe when several processes do it at once: each builds its own copy, the first to finish is kept. `progress`
    gets a sentence when there is something to wait for. Raises OSError when the folder cannot be written.
    """
    target = directory / TINY_MODEL_NAME
    if (target / "config.json").is_file():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    progress(f"making a tiny model in {target} (once)")
    draft = Path(tempfile.mkdtemp(prefix=".tiny-", dir=directory))
    try:
        _build(draft)
        _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    progress(f"the tiny model is ready in {target}")
    return target


def _publish(draft: Path, target: Path) -> None:
    """A rename either shows the whole folder or fails because somebody else's is there already."""
    draft.chmod(0o755)
    try:
        os.rename(draft, target)
    except OSError:
        if not (target / "config.json").is_file():
            raise


def _build(folder: Path) -> None:
    logging.disable_progress_bar()
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    _model(tokenizer).save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that every string has an encoding and a token may end inside a character."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = resources.files("kvferry.embedded").joinpath("corpus.txt").read_text(encoding="utf-8")
    bpe.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", bos_token="<|begin|>", eos_token="<|end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.08,  # wider than usual: else nearly every prompt gets the same answer
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config)
    # A score of zero never wins against hundreds of random ones: answers are printable and seldom end early.
    with torch.no_grad():
        model.lm_head.weight[_unprintable(tokenizer)] = 0.0
    model.generation_config.do_sample = False
    return model


def _unprintable(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    texts = ((i, tokenizer.decode([i], skip_special_tokens=True)) for i in range(len(tokenizer)))
    return [i for i, text in texts if not text or not text.replace("\n", " ").isprintable() or "\ufffd" in text]
