"""One tiny model and two engines for the whole session; every test must leave both empty."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from embedded_loopback import Loopback, Offers
from embedded_server import Served, serve
from embedded_support import Loop, expect_empty
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

from kvferry.connectors.jobs import Settings
from kvferry.embedded.engine.async_engine import Engine
from kvferry.embedded.http.app import create_app
from kvferry.embedded.model.tiny import ensure_tiny_model
from kvferry.embedded.serving.service import ServeInfo

COMMON = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 50,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _gemma() -> torch.nn.Module:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**COMMON, num_hidden_layers=4, layer_types=kinds, query_pre_attn_scalar=16)
    return Gemma3ForCausalLM(config)


def _mistral() -> torch.nn.Module:
    return MistralForCausalLM(MistralConfig(**COMMON, num_hidden_layers=2))


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(tmp_path_factory.mktemp("models"), lambda sentence: None)


@pytest.fixture(params=[_gemma, _mistral], ids=["gemma", "mistral"])
def sliding_path(request: pytest.FixtureRequest, tmp_path: Path, model_path: Path) -> Path:
    """A model some of whose layers, or all, see a window of 50 tokens only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = request.param()
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path / name, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="session")
def engines(loop: Loop, model_path: Path) -> Iterator[tuple[Engine, Engine]]:
    """A source and a target with different blocks, batches and pools."""
    source = Engine(Settings(str(model_path), block_tokens=16, num_blocks=320, max_batch_tokens=256))
    target = Engine(Settings(str(model_path), block_tokens=24, num_blocks=200, max_batch_tokens=512))
    for engine in (source, target):
        loop.run(engine.start())
    yield source, target
    for engine in (source, target):
        loop.run(engine.close())


@pytest.fixture
def source(loop: Loop, engines: tuple[Engine, Engine]) -> Iterator[Engine]:
    yield engines[0]
    expect_empty(loop, engines[0])


@pytest.fixture
def target(loop: Loop, engines: tuple[Engine, Engine]) -> Iterator[Engine]:
    yield engines[1]
    expect_empty(loop, engines[1])


@pytest.fixture(scope="session")
def services(loop: Loop, engines: tuple[Engine, Engine]) -> Iterator[tuple[Served, Served]]:
    """Both engines behind HTTP; what the first offers the second can fetch."""
    offers = Offers(engines[0].layout(), engines[0].release)
    stack = AsyncExitStack()

    async def start(engine: Engine) -> Served:
        transfer = Loopback(engine, offers, asyncio.Event(), asyncio.Event())
        transfer.gate.set()
        transfer.fence.set()
        info = ServeInfo(model="tiny", engine_id="e", created=1)
        return Served(engine, transfer, await stack.enter_async_context(serve(create_app(engine, transfer, info))))

    yield loop.run(start(engines[0])), loop.run(start(engines[1]))
    loop.run(stack.aclose())


@pytest.fixture
def prefiller(source: Engine, services: tuple[Served, Served]) -> Served:
    return services[0]


@pytest.fixture
def decoder(target: Engine, services: tuple[Served, Served]) -> Served:
    return services[1]
