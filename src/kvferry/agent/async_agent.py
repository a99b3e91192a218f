"""An agent for engines that run on an event loop: fetches are awaited, and freed blocks are reported on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from kvferry.agent.cache import Cache
from kvferry.agent.config import AgentConfig, Notice
from kvferry.agent.loop.agent import open_agent
from kvferry.agent.requests import check_unfetched, check_unleased
from kvferry.errors import TransferError
from kvferry.session.commands import (
    AgentStopped,
    BlocksReleased,
    Fetched,
    FetchFailed,
    FetchReport,
    LeaseEnded,
    Located,
    LocateFailed,
    RemoteEngine,
)
from kvferry.session.events import FetchRequest, LeaseRequest
from kvferry.wire.messages import Reason, Reference

Released = BlocksReleased | LeaseEnded
"""The blocks of a request are its engine's again."""

_Settled = Fetched | FetchFailed


class AsyncAgent:
    """Lives on one event loop, from `start` to `close`; `async with` does both.

    `released` is called on the loop when blocks are the engine's again: with `LeaseEnded` for every lease, and with
    `BlocksReleased` for every fetch that raised TransferError or was cancelled. After a fetch that has succeeded it is
    not called: its blocks are the engine's already.
    """

    def __init__(self, config: AgentConfig, cache: Cache, released: Callable[[Released], None]) -> None:
        """Raises ConfigurationError or TransportError when the agent cannot be set up."""
        self.agent = open_agent(config, cache, self._notice)
        self._released = released
        self._waiting: dict[str, asyncio.Future[_Settled]] = {}
        self._lookups: dict[tuple[str, int], list[asyncio.Future[Located | LocateFailed]]] = {}
        # Requests whose blocks the agent will report as free, unless it stops first.
        self._fetches: set[str] = set()
        self._leases: set[str] = set()
        self._stopped = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def has_stopped(self) -> bool:
        """Whether nothing can move any more."""
        return self._stopped.is_set()

    async def start(self, addresses: Sequence[str] = (), data_parallel_size: int = 1) -> None:
        """Start the agent, as `Agent.start` does; all notices arrive on the running loop."""
        self._loop = asyncio.get_running_loop()
        self.agent.start(addresses, data_parallel_size)

    async def wait_until_stopped(self) -> None:
        """Returns when the agent has stopped, whether by `close` or by a defect."""
        await self._stopped.wait()

    async def close(self) -> None:
        """Stop the agent; fetches that are under way end with an error."""
        await asyncio.to_thread(self.agent.close)
        self._stop()

    def lease(self, request: LeaseRequest) -> Reference:
        """Lease a request's blocks, as `Agent.lease` does. Raises TransferError after the agent has stopped."""
        if self.has_stopped:
            raise _gone()
        check_unleased(request.request_id, self._leases)
        reference = self.agent.lease(request)
        self._leases.add(request.request_id)
        return reference

    async def locate(self, address: str, number: int = 0) -> RemoteEngine:
        """Return the engine whose address this is, as `Agent.locate` does. Raises TransferError when no engine says so
        in time, RequestError for what is no address."""
        if self.has_stopped:
            raise _gone()
        self.agent.locate(address, number)
        future: asyncio.Future[Located | LocateFailed] = self._loop.create_future()
        self._lookups.setdefault((address, number), []).append(future)
        found = await future
        if isinstance(found, LocateFailed):
            raise found.error
        return found.engine

    async def fetch(self, request: FetchRequest) -> FetchReport:
        """Bring a remote cache into own blocks. A cancelled caller aborts the fetch.

        Raises TransferError when the cache does not arrive; another RequestError, as `Agent.fetch` does, when nothing
        was begun: the blocks are still the engine's then.
        """
        request_id = request.request_id
        if self.has_stopped:
            self._released(BlocksReleased(request_id))
            raise _gone()
        # The agent frees an id before this loop hears of it: a late notice must not be taken for the next fetch's.
        check_unfetched(request_id, self._fetches)
        self.agent.fetch(request)
        future: asyncio.Future[_Settled] = self._loop.create_future()
        self._waiting[request_id] = future
        self._fetches.add(request_id)
        try:
            settled = await future
        except asyncio.CancelledError:
            self._let_go(request_id, future)
            raise
        finally:
            self._waiting.pop(request_id, None)
        if isinstance(settled, FetchFailed):
            raise settled.error
        return settled.report

    def _let_go(self, request_id: str, future: asyncio.Future[_Settled]) -> None:
        """Abort a fetch whose caller is gone, or release its blocks if it has succeeded: no notice follows success."""
        if future.done() and not future.cancelled() and isinstance(future.result(), Fetched):
            self._released(BlocksReleased(request_id))
        else:
            self.agent.abort(request_id)

    # --- what has happened ---

    def _notice(self, notice: Notice) -> None:
        """Pass a notice from the agent's thread to the event loop."""
        self._loop.call_soon_threadsafe(self._take, notice)

    def _take(self, notice: Notice) -> None:
        match notice:
            case LeaseEnded(request_id):
                self._leases.discard(request_id)
                self._released(notice)
            case BlocksReleased(request_id):
                self._fetches.discard(request_id)
                self._released(notice)
            case Located(address, number=number) | LocateFailed(address, number=number):
                self._answer(address, number, notice)
            case AgentStopped():
                self._stop()
            case Fetched() | FetchFailed():
                self._settle(notice)

    def _answer(self, address: str, number: int, found: Located | LocateFailed) -> None:
        for future in self._lookups.pop((address, number), ()):
            if not future.done():
                future.set_result(found)

    def _settle(self, settled: _Settled) -> None:
        future = self._waiting.get(settled.request_id)
        if isinstance(settled, Fetched):
            self._fetches.discard(settled.request_id)
        if future is not None and not future.done():
            future.set_result(settled)
        elif isinstance(settled, Fetched):
            # It was fetched after its caller had gone.
            self._released(BlocksReleased(settled.request_id))

    def _stop(self) -> None:
        """Fail all that waits, as transports are closed, and release the blocks to which no source may still write."""
        self._stopped.set()
        for address, number in list(self._lookups):
            self._answer(address, number, LocateFailed(address, _gone(), number))
        for request_id in list(self._waiting):
            self._settle(FetchFailed(request_id, _gone()))
        for request_id in self._fetches - self.agent.written_ids:
            self._released(BlocksReleased(request_id))
        for request_id in self._leases:
            self._released(LeaseEnded(request_id, "stopped"))
        self._fetches.clear()
        self._leases.clear()


def _gone() -> TransferError:
    return TransferError(Reason.ABORTED, "the transfer agent of this engine has stopped")
