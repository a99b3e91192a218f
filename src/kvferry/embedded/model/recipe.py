"""What the tiny model is made of: a Llama with random weights and a tokenizer trained on our own text.

Loads torch, so only a process that makes the model or runs it imports this.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|turn|>")
VOCAB_SIZE = 1024
SEED = 20_240_229
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def build(folder: Path) -> None:
    """Write the model and its tokenizer into a folder."""
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
    corpus = resources.files("kvferry.embedded.model").joinpath("corpus.txt").read_text(encoding="utf-8")
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
