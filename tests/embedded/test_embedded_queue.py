"""A decode request that waits for room: its cache waits with it, until it is fetched or the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from embedded_support import DEADLINE_S, Loop, request

from kvferry import AgentConfig
from kvferry.embedded.engine.async_engine import Engine
from kvferry.embedded.request.parse import decode_completion
from kvferry.embedded.serving.chunks import AnswerChunk
from kvferry.embedded.serving.service import ServeInfo, Service
from kvferry.embedded.transfer.agent_transfer import AgentTransfer
from kvferry.kv_transfer_params import room_params
from kvferry.session.timing import Timing

LEASE_S = 3.0
NUM_TOKENS = 40
ROOM = (1 << 62) - 11
IN_A_ROOM = {"kvferry": {"room": ROOM}}


@asynccontextmanager
async def two_services(source: Engine, target: Engine) -> AsyncIterator[tuple[Service, Service]]:
    async with AsyncExitStack() as stack:
        services = []
        for name, engine in (("p", source), ("d", target)):
            config = AgentConfig(name, transport="shm", timing=Timing(lease_s=LEASE_S, heartbeat_s=0.5))
            transfer = AgentTransfer(config, engine.cache(), engine.release)
            await transfer.start()
            stack.push_async_callback(transfer.close)
            services.append(Service(engine, transfer, ServeInfo("tiny", name, 1, policy="fail")))
        yield services[0], services[1]


async def answer(service: Service, params: object) -> AnswerChunk:
    """The last piece of an answer."""
    asked = {"prompt": list(request("", NUM_TOKENS).prompt), "max_tokens": 4, "kv_transfer_params": params}
    call = await service.call("x", decode_completion(json.dumps(asked).encode()))
    async with aclosing(service.answer(call)) as pieces:
        return [piece async for piece in pieces][-1]


async def prefill(service: Service, ours: dict[str, Any]) -> object:
    """The parameters of the decode request."""
    prefilled = await answer(service, {"do_remote_decode": True, **ours})
    place = urlsplit(service.transfer.address)
    return room_params(ROOM, str(place.hostname), place.port or 0) if ours else prefilled.reference


async def until(is_so: Callable[[], bool], pause_s: float = 0.01) -> None:
    """Without a pause nothing on this loop is missed, however soon it is over."""
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():
            await asyncio.sleep(pause_s)


@pytest.mark.parametrize("ours", [{}, IN_A_ROOM], ids=["reference", "room"])
@pytest.mark.slow
def test_a_cache_outlives_its_lease_while_its_request_waits(
    loop: Loop, source: Engine, target: Engine, ours: dict[str, Any]
) -> None:
    async def main() -> None:
        async with two_services(source, target) as (prefiller, decoder):
            await target.reserve(request("held", target.block_usage().capacity[0] * 24 - 1, 1))
            decoding = asyncio.create_task(answer(decoder, await prefill(prefiller, ours)))
            await until(lambda: target.block_usage().num_waiting == 1)
            # Younger than the one that is waited for.
            await prefill(prefiller, {})
            await until(lambda: prefiller.transfer.leases_ended["expired"] > 0)
            target.release("held")
            answered = await decoding
            assert answered.report.tokens_received == NUM_TOKENS - 1
            await source.idle()
            assert dict(prefiller.transfer.leases_ended) == {"expired": 1, "done": 1}

    try:
        loop.run(main())
    finally:
        target.release("held")


@pytest.mark.parametrize("leaves_early", [False, True], ids=["waiting", "looking for the engine"])
def test_a_client_that_leaves_before_there_is_room_leaves_no_lease_behind(
    loop: Loop, source: Engine, target: Engine, leaves_early: bool
) -> None:
    async def main() -> None:
        async with two_services(source, target) as (prefiller, decoder):
            await target.reserve(request("held", target.block_usage().capacity[0] * 24 - 1, 1))
            decoding = asyncio.create_task(answer(decoder, await prefill(prefiller, IN_A_ROOM)))
            agent = decoder.transfer._agent
            if leaves_early:
                await until(lambda: bool(agent._lookups), pause_s=0.0)
            else:
                await until(lambda: target.block_usage().num_waiting == 1)
            decoding.cancel()
            with suppress(asyncio.CancelledError):
                await decoding
            await until(lambda: prefiller.transfer.leases_ended["aborted"] == 1)
            assert not agent.agent._event_loop.target._liveness.queued

    try:
        loop.run(main())
    finally:
        target.release("held")
