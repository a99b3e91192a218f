"""A token's position is all that says how it is turned: not what is computed beside it, nor in how many pieces."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from embedded_support import Loop, expect_empty, ids_of, request
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PhimoeConfig, PhimoeForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from kvferry.connectors.jobs import Settings
from kvferry.connectors.transformers.context import context_of
from kvferry.embedded.engine.async_engine import Engine
from kvferry.errors import PromptTooLongError

ORIGINAL, WHOLE = 64, 1024
COMMON = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": WHOLE,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0, 1.5, 2.0, 3.0, 6.0, 12.0, 20.0, 32.0]}
# What each kind of positions needs, and how many tokens a sequence may have.
KINDS = {
    "default": ({}, WHOLE),
    "linear": ({"factor": 4.0}, WHOLE),
    "dynamic": ({"factor": 4.0}, WHOLE),
    "yarn": ({"factor": 16.0, "original_max_position_embeddings": ORIGINAL}, WHOLE),
    "longrope": ({**FACTORS, "original_max_position_embeddings": ORIGINAL}, ORIGINAL),
    "llama3": (
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        WHOLE,
    ),
    "proportional": ({"factor": 2.0}, WHOLE),
}


def _rope(kind: str) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10000.0, **KINDS[kind][0]}


def test_no_kind_of_positions_is_new() -> None:
    """One that is must be looked at: whether what is beside a token changes how it is turned."""
    assert set(ROPE_INIT_FUNCTIONS) == set(KINDS) - {"default"}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_turned_alike_beside_the_longest_sequence(kind: str) -> None:
    config = LlamaConfig(**COMMON, rope_parameters=_rope(kind))
    _expect_turned_alike(LlamaRotaryEmbedding(config), config, KINDS[kind][1])


def test_tokens_are_turned_alike_where_lengths_have_scales_of_their_own() -> None:
    rope = _rope("longrope") | {"short_mscale": 1.0, "long_mscale": 1.5}
    config = PhimoeConfig(**COMMON, rope_parameters=rope)
    _expect_turned_alike(PhimoeRotaryEmbedding(config), config, ORIGINAL)


def _expect_turned_alike(rotary: torch.nn.Module, config: object, max_tokens: int) -> None:
    """Positions of one step follow one another, whichever requests they are of."""
    assert context_of(config).max_tokens == max_tokens
    few, last = torch.arange(40)[None], torch.tensor([[max_tokens - 1]])
    alone = rotary(torch.zeros(1), few)
    beside = rotary(torch.zeros(1), torch.cat((few, last), dim=1))
    after = rotary(torch.zeros(1), few)
    for turned in (beside, after):
        assert all(torch.equal(ours, theirs[:, :40]) for ours, theirs in zip(alone, turned, strict=True))


def test_kinds_that_differ_between_layers_are_looked_at_one_by_one() -> None:
    config = LlamaConfig(**COMMON)
    config.rope_parameters = {"full_attention": _rope("longrope"), "sliding_attention": _rope("default")}
    assert context_of(config).max_tokens == ORIGINAL


def test_a_model_that_longrope_does_not_extend_has_its_whole_context() -> None:
    rope = _rope("longrope") | {"original_max_position_embeddings": WHOLE}
    context = context_of(Phi3Config(**COMMON, original_max_position_embeddings=WHOLE, rope_parameters=rope))
    assert (context.max_tokens, context.reason) == (WHOLE, "this is the context length of the model")


def _phi3() -> torch.nn.Module:
    return Phi3ForCausalLM(
        Phi3Config(**COMMON, original_max_position_embeddings=ORIGINAL, rope_parameters=_rope("longrope"))
    )


def _phimoe() -> torch.nn.Module:
    rope = _rope("longrope") | {"short_mscale": 1.0, "long_mscale": 1.5}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return PhimoeForCausalLM(PhimoeConfig(**COMMON, **experts, rope_parameters=rope))


def _dynamic() -> torch.nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(**COMMON | {"max_position_embeddings": ORIGINAL}, rope_parameters=_rope("dynamic"))
    )


@pytest.mark.parametrize("made", [_phi3, _phimoe, _dynamic])
def test_answers_are_those_of_the_model_alone(made, loop: Loop, model_path: Path, tmp_path: Path) -> None:
    """Beside others up to the longest sequence, and computed in pieces; a longer one is refused."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = made().eval()
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path / name, tmp_path / name)
    engine = Engine(Settings(str(tmp_path), dtype="float32", block_tokens=16, num_blocks=64, max_batch_tokens=16))
    shapes = [(40, 24), (20, 12), (50, 14)]

    async def together() -> list[list[int]]:
        await engine.start()
        return await asyncio.gather(*(ids_of(engine.generate(request(f"r{n}", n, new))) for n, new in shapes))

    for (num_tokens, num_new), answer in zip(shapes, loop.run(together()), strict=True):
        ids = torch.tensor([request("", num_tokens).prompt])
        greedy = {"max_new_tokens": num_new, "do_sample": False, "eos_token_id": -1}
        assert answer == model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)[0, num_tokens:].tolist()
    with pytest.raises(PromptTooLongError, match=f"at most {ORIGINAL} together"):
        loop.run(ids_of(engine.generate(request("long", 40, 25))))
    expect_empty(loop, engine)
    loop.run(engine.close())
