"""A transfer within one process: the real planner over the engines' own descriptions, executed with memmove."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry import FetchReport, FirstToken, PeerReport, Reason
from kvferry.embedded.engine.async_engine import Engine
from kvferry.embedded.engine.records import Grown
from kvferry.embedded.transfer.agent_transfer import ReceivedCache
from kvferry.errors import RequestError, TransferError
from kvferry.kv_transfer_params import room_names
from kvferry.plan.description.layout import Layout
from kvferry.plan.description.prompt import Prompt
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.blocks import BlockTables
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route


def move(layouts: tuple[Layout, Layout], tables: tuple[BlockTables, BlockTables], num_tokens: int) -> tuple[int, int]:
    """Copy the first tokens of a request from one engine's blocks to another's; returns (bytes, rows)."""
    source, target = layouts
    program = bind(route([source], [target]).between(0, 0), source, target)
    copies = copies_for(program, *tables, [TokenRange(0, num_tokens)] * len(target.groups))
    for source_address, target_address, length in zip(copies.source, copies.target, copies.length, strict=True):
        ctypes.memmove(int(target_address), int(source_address), int(length))
    return copies.num_bytes, len(copies)


@dataclass
class Promise:
    """What is still computed. `told` has how far it was, each time that somebody said; `over` is set at its end."""

    num_tokens: int
    told: list[int] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Offers:
    """What the source offers, by reference. `request_ids` are the engine's own, where references name rooms."""

    layout: Layout
    free: Callable[[str], None]
    tables: dict[str, BlockTables] = field(default_factory=dict)
    promised: dict[str, Promise] = field(default_factory=dict)
    request_ids: dict[str, str] = field(default_factory=dict)

    def name_of(self, request_id: str) -> str:
        return next((name for name, known in self.request_ids.items() if known == request_id), request_id)

    def release(self, name: str) -> None:
        """The lease of this name is over."""
        self.free(self.request_ids.pop(name, name))


@dataclass
class Loopback:
    """Both sides of a transfer for one engine. `gate` holds fetches back, `fence` the end of quarantines."""

    engine: Engine
    offers: Offers
    gate: asyncio.Event
    fence: asyncio.Event
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    quarantined: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    forgone: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    peers: tuple[PeerReport, ...] = ()
    address: str = "tcp://[::1]:7007"
    first_tokens: list[FirstToken | None] = field(default_factory=list)
    _fencing: asyncio.Task[None] | None = None

    @property
    def failure(self) -> str:
        return ""

    async def offer(
        self, request_id: str, block_tables: list[list[int]], prompt: Prompt, first: FirstToken | None = None
    ) -> dict[str, object]:
        self.offers.tables[request_id] = block_tables
        self.first_tokens.append(first)
        return {"do_remote_prefill": True, "remote_request_id": request_id}

    async def promise(self, request_id: str, prompt: Prompt, room: int | None = None) -> dict[str, object]:
        name = request_id if room is None else room_names(room)[0]
        if name in self.offers.request_ids:
            raise RequestError("a bootstrap room is in use", found=name)
        self.offers.request_ids[name] = request_id
        self.offers.promised[name] = Promise(prompt.num_tokens)
        return {"do_remote_prefill": True, "remote_request_id": name}

    def grow(self, request_id: str, grown: Grown, first: FirstToken | None = None) -> None:
        self.first_tokens += [] if first is None else [first]
        name = self.offers.name_of(request_id)
        promise = self.offers.promised[name]
        promise.told.append(grown.num_tokens)
        if grown.num_tokens == promise.num_tokens:
            self.offers.tables[name] = grown.block_tables
            promise.over.set()

    async def hold(self, request_id: str, params: object) -> object:
        self.held.add(request_id)
        return params

    async def fetch(
        self, request_id: str, params: object, block_tables: list[list[int]], prompt: Prompt
    ) -> ReceivedCache:
        self.held.remove(request_id)
        self.entered.set()
        self.quarantined.append(request_id)
        await self.gate.wait()
        named = params.get("remote_request_id") if isinstance(params, dict) else None
        remote = named if isinstance(named, str) else ""
        if remote in self.offers.promised:
            await self.offers.promised[remote].over.wait()
        if remote not in self.offers.tables:
            self._fencing = asyncio.create_task(self._end_quarantine())
            raise TransferError("unknown_lease", "nobody offers this request", found=repr(named))
        self.quarantined.remove(request_id)
        num_tokens = prompt.num_tokens
        tables = (self.offers.tables.pop(remote), block_tables)
        num_bytes, num_rows = move((self.offers.layout, self.engine.layout()), tables, num_tokens)
        self.offers.release(remote)
        report = FetchReport(num_tokens, num_bytes, num_rows, "loopback", "", "direct", {"wire": 0.0})
        return ReceivedCache("e", report)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        promise = self.offers.promised.get(self.offers.name_of(request_id))
        if promise is not None and not promise.over.is_set():
            promise.over.set()
            self.quarantined.append(request_id)
        self._fencing = asyncio.create_task(self._end_quarantine())

    def decline(self, request_id: str, params: object) -> None:
        self.held.discard(request_id)
        self.forgone.append(request_id)

    def withdraw(self, params: object) -> bool:
        remote = params.get("remote_request_id") if isinstance(params, dict) else None
        if remote is None:
            raise TransferError(Reason.MALFORMED, "invalid kv_transfer_params")
        if remote not in self.offers.tables:
            return False
        del self.offers.tables[remote]
        self.offers.release(remote)
        return True

    async def _end_quarantine(self) -> None:
        await self.fence.wait()
        for request_id in self.quarantined:
            self.engine.release(request_id)
            self.offers.request_ids.pop(self.offers.name_of(request_id), None)
        self.quarantined.clear()


class NoTransfer:
    """Nobody to exchange caches with: whoever asks for that is told so."""

    failure = ""
    peers = ()
    address = "tcp://127.0.0.1:7007"

    async def offer(self, *_: object) -> dict[str, object]:
        raise TransferError("no_transfer", "this engine is not connected to other engines")

    def abort(self, request_id: str) -> None:
        return
