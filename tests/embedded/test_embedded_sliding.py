"""Models with sliding windows: two cache groups, rings among them, moved by their description alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from embedded_loopback import move
from embedded_support import Loop, collect, expect_empty, ids_of, request
from transformers import AutoModelForCausalLM

from kvferry.connectors.jobs import Settings
from kvferry.embedded.engine.async_engine import Engine


def test_rings_move_between_engines(loop: Loop, sliding_path: Path) -> None:
    source = Engine(Settings(str(sliding_path), block_tokens=16, num_blocks=60, max_batch_tokens=64))
    target = Engine(Settings(str(sliding_path), block_tokens=8, num_blocks=160, max_batch_tokens=128))
    model = AutoModelForCausalLM.from_pretrained(sliding_path).eval()

    async def ferry(num_tokens: int) -> tuple[list[int], list[int]]:
        plain = await ids_of(target.generate(request(f"plain{num_tokens}", num_tokens, 20)))
        prefilled = await source.prefill(request(f"p{num_tokens}", num_tokens, 1))
        tables = await target.reserve(request(f"d{num_tokens}", num_tokens, 20))
        move((source.layout(), target.layout()), (prefilled.block_tables, tables), num_tokens - 1)
        source.release(f"p{num_tokens}")
        resumed = await collect(target.resume(f"d{num_tokens}", num_tokens - 1))
        assert resumed[0].num_computed == 1
        return plain, [token.token_id for token in resumed]

    for engine in (source, target):
        loop.run(engine.start())
    for num_tokens in (1, 30, 49, 50, 51, 200):
        plain, resumed = loop.run(ferry(num_tokens))
        assert resumed == plain
        ids = torch.tensor([request("", num_tokens).prompt])
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=-1
        )
        assert plain == theirs[0, num_tokens:].tolist()
    for engine in (source, target):
        expect_empty(loop, engine)
        loop.run(engine.close())


def test_of_a_ring_that_is_written_over_nothing_is_told_before_the_end(loop: Loop, sliding_path: Path) -> None:
    """A window of 50 tokens, steps of 16: what a prompt of 51 tokens has computed first is gone when it is done."""
    source = Engine(Settings(str(sliding_path), block_tokens=8, num_blocks=160, max_batch_tokens=16))
    told: list[int] = []

    async def compute(num_tokens: int) -> list[int]:
        told.clear()
        await source.begin(request(f"r{num_tokens}", num_tokens, 1))
        prefilled = await source.finish(f"r{num_tokens}", lambda grown: told.append(grown.num_tokens))
        assert prefilled.num_tokens == num_tokens
        source.release(f"r{num_tokens}")
        return told

    loop.run(source.start())
    assert loop.run(compute(50)) == [16, 32, 48]
    assert loop.run(compute(51)) == []
    expect_empty(loop, source)
    loop.run(source.close())


def test_a_full_pool_of_two_groups_never_starves(loop: Loop, sliding_path: Path) -> None:
    """More requests than fit, of lengths on both sides of the window: all of them are answered."""
    engine = Engine(Settings(str(sliding_path), block_tokens=8, num_blocks=40, max_batch_tokens=64))

    async def crowd() -> None:
        sizes = [(5, 90), (60, 30), (120, 20), (3, 3), (45, 60), (10, 10)] * 3
        work = [ids_of(engine.generate(request(f"r{i}", n, new, seed=i))) for i, (n, new) in enumerate(sizes)]
        answers = await asyncio.gather(*work)
        assert [len(answer) for answer in answers] == [new for _, new in sizes]

    loop.run(engine.start())
    loop.run(crowd())
    expect_empty(loop, engine)
    loop.run(engine.close())


def test_many_short_prompts_are_held_at_once_and_the_longest_one_after_them(loop: Loop, sliding_path: Path) -> None:
    """The longest sequence alone needs nearly the whole pool, and most of it for the layers that see everything."""
    engine = Engine(Settings(str(sliding_path), block_tokens=8, num_blocks=40, max_batch_tokens=256))

    async def fill() -> list[int]:
        for i in range(5):
            await engine.prefill(request(f"short{i}", 60, 1, seed=i))
        held = engine._core.num_held_sectors()
        assert sum(held) <= engine._core.num_sectors
        assert held[0] == engine.block_usage().allocated[0] == 5 * 7
        late = asyncio.create_task(ids_of(engine.generate(request("longest", engine.max_tokens - 1, 1))))
        await asyncio.sleep(0)
        assert engine.block_usage().num_waiting == 1
        for i in range(5):
            engine.release(f"short{i}")
        return await late

    loop.run(engine.start())
    assert len(loop.run(fill())) == 1
    expect_empty(loop, engine)
    loop.run(engine.close())
