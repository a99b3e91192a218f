"""The engine: right tokens, and every block given back whatever happens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from embedded_loopback import move
from embedded_support import Loop, collect, expect_empty, ids_of, request
from transformers import AutoModelForCausalLM
from transformers.generation.continuous_batching import ContinuousBatchingManager

from kvferry.connectors.jobs import Settings
from kvferry.embedded.engine.async_engine import Engine
from kvferry.errors import ConfigurationError, FerryError, PromptTooLongError, RequestError


def test_greedy_tokens_equal_generate(loop: Loop, source: Engine, model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    for num_tokens in (1, 16, 50):
        ours = loop.run(ids_of(source.generate(request(f"greedy-{num_tokens}", num_tokens, 24))))
        ids = torch.tensor([request("", num_tokens).prompt])
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=-1
        )
        assert ours == theirs[0, num_tokens:].tolist()


def test_requests_at_the_same_time_do_not_mix(loop: Loop, source: Engine) -> None:
    async def alone_and_together() -> tuple[list[list[int]], list[list[int]]]:
        alone = [await ids_of(source.generate(request(f"alone-{i}", 20 + i, seed=i))) for i in range(4)]
        work = [ids_of(source.generate(request(f"together-{i}", 20 + i, seed=i))) for i in range(4)]
        return alone, list(await asyncio.gather(*work))

    alone, together = loop.run(alone_and_together())
    assert alone == together
    assert len({tuple(answer) for answer in alone}) == 4


def test_the_answer_ends_with_a_stop_token(loop: Loop, source: Engine) -> None:
    whole = loop.run(collect(source.generate(request("free", 30, 12))))
    assert [token.finish_reason for token in whole[:-1]] == [""] * 11
    assert whole[-1].finish_reason == "length"
    stop = replace(request("stopped", 30, 12), stop_token_ids=frozenset({whole[5].token_id}))
    stopped = loop.run(collect(source.generate(stop)))
    first = next(i for i, token in enumerate(whole) if token.token_id == whole[5].token_id)
    assert [token.token_id for token in stopped] == [token.token_id for token in whole[: first + 1]]
    assert stopped[-1].finish_reason == "stop"


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 24, 25, 2000])
def test_what_one_engine_computed_another_goes_on_with(
    loop: Loop, source: Engine, target: Engine, num_tokens: int
) -> None:
    """The description alone moves the cache: the resumed answer is the plain one, and one token was computed."""

    async def ferry() -> None:
        plain = await collect(target.generate(request("plain", num_tokens, 12)))
        prefilled = await source.prefill(request("p", num_tokens, 1))
        tables = await target.reserve(request("d", num_tokens, 12))
        layouts = (source.layout(), target.layout())
        num_bytes, _ = move(layouts, (prefilled.block_tables, tables), num_tokens - 1)
        source.release("p")
        resumed = await collect(target.resume("d", num_tokens - 1))
        assert [token.token_id for token in resumed] == [token.token_id for token in plain]
        assert prefilled.first.token_id == plain[0].token_id
        assert num_bytes == (num_tokens - 1) * 4 * 2 * 4 * 64 * 4  # layers, k and v, heads, dim, float32
        assert {token.num_computed for token in resumed} == {1}
        assert {token.num_computed for token in plain} == {num_tokens}
        assert prefilled.first.num_computed == num_tokens

    loop.run(ferry())


def test_a_cache_that_did_not_arrive_changes_the_answer(loop: Loop, source: Engine, target: Engine) -> None:
    """Proves that the test above would notice: without the copy the blocks hold something else."""

    async def without_copy() -> tuple[list[int], list[int]]:
        plain = await ids_of(target.generate(request("plain", 100, 12)))
        await ids_of(target.generate(request("noise", 300, 12, seed=5)))
        await target.reserve(request("d", 100, 12))
        return plain, await ids_of(target.resume("d", 99))

    plain, resumed = loop.run(without_copy())
    assert plain != resumed


def test_blocks_are_held_until_released(loop: Loop, source: Engine) -> None:
    async def hold() -> None:
        prefilled = await source.prefill(request("held", 40, 1))
        assert [len(table) for table in prefilled.block_tables] == [3]
        assert prefilled.block_tables[0] == tuple(sorted(prefilled.block_tables[0]))
        ledger = source.block_usage()
        assert (ledger.granted, ledger.allocated, ledger.num_leased) == ((3,), (3,), 1)
        for _ in range(2):
            source.release("held")
        await source.idle()

    loop.run(hold())


def test_release_from_another_thread_and_of_unknown_requests(loop: Loop, source: Engine) -> None:
    loop.run(source.prefill(request("held", 40, 1)))
    source.release("nobody")
    source.release("held")
    expect_empty(loop, source)


def test_closing_an_answer_frees_its_blocks(loop: Loop, source: Engine) -> None:
    async def leave() -> None:
        tokens = source.generate(request("left", 40, 500))
        async for token in tokens:
            assert not token.finish_reason
            break
        await tokens.aclose()
        await source.idle()

    loop.run(leave())


def test_cancelling_a_prefill_frees_its_blocks(loop: Loop, source: Engine) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(source.prefill(request("gone", 3000, 1)))
        while not any(source.block_usage().allocated):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await source.idle()

    loop.run(cancel())


def test_released_while_running_ends_the_answer_with_an_error(loop: Loop, source: Engine) -> None:
    async def end() -> None:
        tokens = source.generate(request("ended", 40, 500))
        await anext(tokens)
        source.release("ended")
        with pytest.raises(RequestError, match="ended"):
            await collect(tokens)

    loop.run(end())


def test_requests_wait_for_room_in_their_order(loop: Loop, source: Engine) -> None:
    """Held and reserved blocks fill the pool; without admission this ends the engine's thread."""

    async def wait() -> None:
        blocks = source.block_usage().capacity[0]
        await source.prefill(request("held", (blocks - 4) * 16, 1))
        await source.reserve(request("reserved", 16, 17))
        waiting = [asyncio.create_task(ids_of(source.generate(request(f"w{i}", 60, 8)))) for i in range(3)]
        await asyncio.sleep(0)
        assert source.block_usage().num_waiting == 3
        source.release("held")
        answers = await asyncio.gather(*waiting)
        assert [len(answer) for answer in answers] == [8, 8, 8]
        source.release("reserved")
        assert source.failure == ""

    loop.run(wait())


def test_a_waiting_request_can_be_released_and_cancelled(loop: Loop, source: Engine) -> None:
    async def wait() -> None:
        blocks = source.block_usage().capacity[0]
        await source.prefill(request("held", blocks * 16 - 1, 1))
        released = asyncio.create_task(source.prefill(request("released", 20, 1)))
        cancelled = asyncio.create_task(source.prefill(request("cancelled", 20, 1)))
        await asyncio.sleep(0)
        assert source.block_usage().num_waiting == 2
        source.release("released")
        cancelled.cancel()
        outcomes = await asyncio.gather(released, cancelled, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [RequestError, asyncio.CancelledError]
        source.release("held")

    loop.run(wait())


def test_what_can_never_fit_is_refused(loop: Loop, source: Engine, target: Engine) -> None:
    assert source.max_tokens == 320 * 16
    assert target.max_tokens == 200 * 24
    longest = request("longest", source.max_tokens - 1, 1)
    assert len(loop.run(ids_of(source.generate(longest)))) == 1
    with pytest.raises(PromptTooLongError, match=f"at most {source.max_tokens}"):
        loop.run(ids_of(source.generate(request("longer", source.max_tokens, 1))))


@pytest.mark.parametrize("prompt", [(), (-1,), (1, 1024), (5, 2**70)])
def test_prompts_that_would_break_the_engine_are_refused(loop: Loop, source: Engine, prompt: tuple[int, ...]) -> None:
    with pytest.raises(RequestError):
        loop.run(source.prefill(replace(request("bad", 1), prompt=prompt)))


def test_resume_needs_a_reservation_and_a_token_to_compute(loop: Loop, source: Engine) -> None:
    async def wrong() -> None:
        with pytest.raises(RequestError, match="reserved"):
            await collect(source.resume("nobody", 0))
        await source.reserve(request("d", 10))
        for num_received in (-1, 10):
            with pytest.raises(RequestError, match="last token"):
                await collect(source.resume("d", num_received))
        with pytest.raises(RequestError, match="in use"):
            await source.reserve(request("d", 10))
        source.release("d")

    loop.run(wrong())


def test_a_dead_engine_ends_its_requests_and_says_so(loop: Loop, model_path: Path) -> None:
    engine = Engine(Settings(str(model_path), num_blocks=32))

    async def die() -> None:
        await engine.start()
        await engine.prefill(request("held", 20, 1))
        await engine.reserve(request("reserved", 20, 4))
        waiting = asyncio.create_task(ids_of(engine.generate(request("waiting", 28 * 16, 4))))
        running = engine.generate(request("running", 20, 200))
        await anext(running)

        def stumble(scheduler: object) -> None:
            raise ArithmeticError("out of coal")

        engine._core._command(stumble)
        for work in (collect(running), waiting):
            with pytest.raises(FerryError, match="out of coal"):
                await work
        assert "out of coal" in engine.failure
        await engine.idle()
        with pytest.raises(FerryError, match="not running"):
            await engine.prefill(request("later", 20, 1))
        engine.release("held")
        await engine.close()

    loop.run(die())
    assert engine.block_usage().granted == (0,)


def test_closing_ends_open_requests(loop: Loop, model_path: Path) -> None:
    engine = Engine(Settings(str(model_path), num_blocks=64))

    async def close() -> None:
        await engine.start()
        tokens = engine.generate(request("open", 20, 900))
        await anext(tokens)
        await engine.close()
        with pytest.raises(FerryError):
            await collect(tokens)
        await engine.close()

    loop.run(close())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "/nowhere/at-all"}, "cannot load"),
        ({"block_tokens": 2}, "too small"),
        ({"num_blocks": 0}, "positive"),
        ({"dtype": "float33"}, "unknown dtype"),
        ({"dtype": "int8"}, "unknown dtype"),
        ({"num_blocks": 2**40}, "cannot make a cache"),
        ({"device": "gpu"}, "unknown device; found: gpu"),
        ({"device": "cuda:99"}, "this device is not here; found: cuda:99"),
        ({"device": "meta"}, "unknown device; found: meta"),
        ({"device": "cuda", "layer_wise": True}, "layers cannot be sent one by one from this device"),
        ({"buffer_device": "cuda"}, "cannot use this buffer device"),
        ({"staging_memory": "device"}, "staging memory can only lie on a device whose memory is registered"),
    ],
)
def test_settings_that_cannot_work_are_refused(model_path: Path, change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Engine(replace(Settings(str(model_path)), **change))


@pytest.mark.parametrize(
    ("owner", "name", "words"),
    [
        (torch.nn.Module, "to", "does not fit on the device; .*; hint: a device with more free memory"),
        (ContinuousBatchingManager, "_create_batch_processor", "cannot make a cache .* hint: a smaller cache"),
    ],
)
def test_a_device_that_is_full_is_named_with_what_to_do(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, words: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(ConfigurationError, match=words):
        Engine(Settings(str(model_path)))
