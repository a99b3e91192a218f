"""Before an engine says that it serves it has computed something; a process whose engine has ended ends as well."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from embedded_support import Loop, expect_empty, ids_of, request
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    StableLmConfig,
    StableLmForCausalLM,
)

from kvferry import AgentConfig
from kvferry.cli import console
from kvferry.cli.serve import embedded
from kvferry.cli.serve.command import ServeOptions
from kvferry.cli.server import listening
from kvferry.connectors.jobs import Settings
from kvferry.embedded.engine.async_engine import Engine
from kvferry.errors import ConfigurationError, FerryError
from kvferry.http.access import Access

COMMON = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _deepseek() -> torch.nn.Module:
    """Its keys and values are longer in the cache than what the configuration calls a head."""
    heads = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 32, "num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**COMMON, **heads, **experts, **sizes))


def _stablelm() -> torch.nn.Module:
    """It does not hand on what the attention of a paged cache needs."""
    return StableLmForCausalLM(StableLmConfig(**COMMON, intermediate_size=64, num_key_value_heads=4))


def saved(model: torch.nn.Module, folder: Path, model_path: Path) -> Path:
    """The model in a folder, with the tokenizer of the tiny one."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path / name, folder / name)
    return folder


@pytest.mark.parametrize("made", [_deepseek, _stablelm])
def test_a_model_that_loads_and_does_not_run_is_refused_at_start(
    made: Callable[[], torch.nn.Module], loop: Loop, model_path: Path, tmp_path: Path
) -> None:
    engine = Engine(Settings(str(saved(made(), tmp_path, model_path)), num_blocks=32))
    with pytest.raises(ConfigurationError, match="does not run this model") as raised:
        loop.run(engine.start())
    assert "Error: " in raised.value.found
    assert raised.value.hint
    assert raised.value.found == engine.failure
    expect_empty(loop, engine)


def _gemma4() -> torch.nn.Module:
    """Its layers have heads of two sizes."""
    sizes = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32}
    extra = {"vocab_size_per_layer_input": 1024, "hidden_size_per_layer_input": 8}
    return Gemma4ForCausalLM(Gemma4TextConfig(**COMMON, **sizes, **extra))


def test_a_model_for_which_upstream_makes_no_cache_is_refused(model_path: Path, tmp_path: Path) -> None:
    path = saved(_gemma4(), tmp_path, model_path)
    with pytest.raises(ConfigurationError, match="cannot make a cache") as raised:
        Engine(Settings(str(path), num_blocks=32))
    assert raised.value.found
    assert "\n" not in raised.value.found


def _gpt2() -> torch.nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=1024, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1))


def test_layers_of_models_like_gpt2_are_told_one_by_one(loop: Loop, model_path: Path, tmp_path: Path) -> None:
    engine = Engine(Settings(str(saved(_gpt2(), tmp_path, model_path)), num_blocks=32, layer_wise=True))
    told: list[int] = []

    async def compute() -> None:
        await engine.start()
        await engine.begin(request("early", 20, 1))
        await engine.finish("early", lambda grown: told.append(grown.ahead.num_states))
        engine.release("early")
        await engine.idle()
        await engine.close()

    loop.run(compute())
    assert told == [2, 4]


def test_a_model_whose_layers_are_not_found_is_refused(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(_gpt2(), tmp_path, model_path)
    monkeypatch.setattr(GPT2LMHeadModel, "get_decoder", lambda self: torch.nn.Identity())
    with pytest.raises(ConfigurationError, match=r"cannot be sent one by one.*Identity.*without --layer-wise"):
        Engine(Settings(str(path), num_blocks=32, layer_wise=True))


def test_a_cache_that_holds_no_request_is_refused_at_start(loop: Loop, model_path: Path, tmp_path: Path) -> None:
    """The cache is one sector, and the model has two groups of layers."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"] * 2
    sizes = {"intermediate_size": 64, "num_key_value_heads": 4, "head_dim": 16, "layer_types": kinds}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**COMMON | sizes | {"num_hidden_layers": 7}))
    engine = Engine(Settings(str(saved(model, tmp_path, model_path)), num_blocks=1))
    with pytest.raises(ConfigurationError, match="too small for any request"):
        loop.run(engine.start())


def test_what_is_computed_at_start_leaves_nothing_behind(loop: Loop, model_path: Path) -> None:
    engine = Engine(Settings(str(model_path), num_blocks=32))
    state = engine._core._loop_state
    scheduled: list[int] = []
    state.step_time.scheduled = lambda batch: scheduled.extend(each.query_length for each in batch)  # type: ignore[method-assign]
    loop.run(engine.start())
    assert scheduled == [2, 1]
    expect_empty(loop, engine)
    assert (state.num_computed, state.hold_ids, state.num_told) == ({}, set(), {})
    assert len(loop.run(ids_of(engine.generate(request("all", engine.max_tokens - 1, 1))))) == 1
    loop.run(engine.close())


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """A server tells the collector to leave alone what is there."""
    yield
    gc.unfreeze()


def test_a_process_whose_engine_has_ended_ends_and_says_why(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, unfrozen: None
) -> None:
    engine = Engine(Settings(str(model_path), num_blocks=32))

    def stumble(scheduler: object) -> None:
        raise ArithmeticError("out of coal")

    # The server says that it serves, and then its engine ends.
    monkeypatch.setattr(console, "announce", lambda *_, **__: engine._core._command(stumble))
    options = ServeOptions(model=str(model_path), served_name="tiny", port=0)

    async def serve() -> None:
        with listening.listen(options.host, options.port) as bound:
            served = embedded._serve(options, engine, AgentConfig("e", transport="tcp"), Access(), bound)
            await asyncio.wait_for(served, 60)

    with pytest.raises(FerryError, match="the engine has stopped") as raised:
        asyncio.run(serve())
    assert "out of coal" in raised.value.found
