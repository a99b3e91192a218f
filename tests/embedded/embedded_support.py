"""What the tests of the embedded engine share: an event loop in a thread, requests, and the empty-handed check."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from kvferry.embedded.engine.async_engine import Engine
from kvferry.embedded.engine.records import Request, Token

Result = TypeVar("Result")
# A busy machine takes half a minute to compute a prompt that fills the context.
DEADLINE_S = 150.0


class Loop:
    """An event loop in a thread of its own, so that blocking clients can be used in tests."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, DEADLINE_S), self.loop).result()

    def close(self) -> None:
        self.run(self.loop.shutdown_asyncgens())
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def expect_empty(loop: Loop, engine: Engine) -> None:
    loop.run(engine.idle())
    ledger = engine.block_usage()
    assert not any(ledger.granted), ledger
    assert not any(ledger.allocated), ledger
    assert (ledger.num_waiting, ledger.num_leased) == (0, 0)


def request(name: str, num_tokens: int, max_new_tokens: int = 8, seed: int = 0) -> Request:
    prompt = tuple(4 + (seed + 7 * i + i * i // 3) % 1000 for i in range(num_tokens))
    return Request(name, prompt, max_new_tokens, frozenset())


async def collect(tokens: AsyncIterator[Token]) -> list[Token]:
    return [token async for token in tokens]


async def ids_of(tokens: AsyncIterator[Token]) -> list[int]:
    return [token.token_id async for token in tokens]
