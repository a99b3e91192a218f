"""Gemma 3n, whose last layers see the keys and values of earlier ones: there is nothing of theirs to move."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from embedded_loopback import move
from embedded_support import Loop, expect_empty, ids_of, request
from transformers import AutoModelForCausalLM, Gemma3nForCausalLM, Gemma3nTextConfig

from kvferry import catalog
from kvferry.connectors.jobs import Settings
from kvferry.connectors.transformers import features
from kvferry.embedded.engine.async_engine import Engine

KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
# The last two share the caches of layers 2 and 1. Before 5.19, upstream writes and reads copies of them.
OWNERS = (0, 1, 2) if features._LAYERS_WRITE else (0, 1, 2, 3, 4)


@pytest.fixture(scope="module")
def gemma3n_path(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    config = Gemma3nTextConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_kv_shared_layers=2,
        layer_types=KINDS,
        sliding_window=24,
        max_position_embeddings=1024,
        vocab_size_per_layer_input=1024,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 5,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Gemma3nForCausalLM(config)
    folder = tmp_path_factory.mktemp("gemma3n")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def pair(loop: Loop, gemma3n_path: Path) -> Iterator[tuple[Engine, Engine]]:
    source = Engine(Settings(str(gemma3n_path), block_tokens=8, num_blocks=60, max_batch_tokens=32, layer_wise=True))
    target = Engine(Settings(str(gemma3n_path), block_tokens=12, num_blocks=60, max_batch_tokens=64))
    for engine in (source, target):
        loop.run(engine.start())
    yield source, target
    for engine in (source, target):
        expect_empty(loop, engine)
        loop.run(engine.close())


def test_the_states_are_those_that_a_plan_names(pair: tuple[Engine, Engine], gemma3n_path: Path) -> None:
    planned = catalog.read(gemma3n_path, catalog.Options("auto", False)).cache
    theirs = {kept.state.name: kept.state for kept in planned.kept()}
    ours = {state.name: state for state in pair[0].layout().states}
    assert list(ours) == [f"model.layers.{layer}.{part}" for layer in OWNERS for part in "kv"]
    assert {name: ours[name] for name in theirs} == theirs
    assert len(theirs) == 6


def test_a_moved_cache_goes_on_with_the_same_tokens(
    loop: Loop, pair: tuple[Engine, Engine], gemma3n_path: Path
) -> None:
    source, target = pair
    model = AutoModelForCausalLM.from_pretrained(gemma3n_path).eval()

    async def ferry(num_tokens: int) -> list[int]:
        prefilled = await source.prefill(request(f"p{num_tokens}", num_tokens, 1))
        tables = await target.reserve(request(f"d{num_tokens}", num_tokens, 12))
        move((source.layout(), target.layout()), (prefilled.block_tables, tables), num_tokens - 1)
        source.release(f"p{num_tokens}")
        return await ids_of(target.resume(f"d{num_tokens}", num_tokens - 1))

    for num_tokens in (20, 100):
        ids = torch.tensor([request("", num_tokens).prompt])
        greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1}
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
        assert loop.run(ferry(num_tokens)) == theirs[0, num_tokens:].tolist()


def test_what_is_told_layer_by_layer_ends_with_the_last_that_keeps_something(
    loop: Loop, pair: tuple[Engine, Engine]
) -> None:
    told: list[int] = []

    async def compute() -> None:
        await pair[0].begin(request("early", 20, 1))
        await pair[0].finish("early", lambda grown: told.append(grown.ahead.num_states))
        pair[0].release("early")

    loop.run(compute())
    assert told[-1] == 2 * len(OWNERS)
    assert sorted(told) == told
