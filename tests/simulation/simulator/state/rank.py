"""What one rank of one incarnation of an engine has at the moment: plain records, which networks, checks and engines
look at and change. None of them knows what the sessions of a rank do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.description.prompt import PromptName
from kvferry.plan.description.tokens import TokenRange
from kvferry.session.commands import BlocksReleased, Fetched, FetchFailed
from kvferry.session.events import LeaseRequest
from kvferry.session.keys import ClaimKey, PeerKey, ReadKey, SlotKey
from kvferry.wire.messages import Party, Reference
from simulator.state.inbox import Inbox
from simulator.state.memory import BlockPool, RankMemory, Tables
from simulator.state.naming import request_of


@dataclass(slots=True)
class LeasedBlocks:
    """Blocks that the engine keeps until `LeaseEnded`; who has said that they read them."""

    wanted: LeaseRequest
    tables: Tables
    readers: set[int] = field(default_factory=set)
    claims: set[tuple[Party, str]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class WantedCache:
    """What is to be fetched: `salt` says which bytes are the right ones, `prompt` is what the target calls them. With
    `expected` nothing stands in the way."""

    request_id: str
    reference: Reference
    addresses: tuple[str, ...]
    ranges: tuple[TokenRange, ...]
    salt: int
    prompt: PromptName
    expected: bool


@dataclass(slots=True)
class Fetching:
    """One rank's part of an attempt. `status`: waiting, fetched or failed. `notify` is told what its session says about
    it, `killed` that the rank is gone."""

    wanted: WantedCache
    tables: Tables
    notify: Callable[[Fetched | FetchFailed | BlocksReleased], None]
    killed: Callable[[], None]
    status: str = "waiting"
    began: float = 0.0
    stopped_s: float = 0.0


@dataclass(slots=True, eq=False)
class Copy:
    """A gather or a scatter. `source` and `target` are indices of bytes, of which `moved` have moved; `fails_at` is the
    number of bytes after which it ends with an error. A gather may go to the slot of `far`, a target."""

    key: SlotKey
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    step_s: float
    fails_at: int
    far: Rank | None = None
    moved: int = 0

    @property
    def is_gather(self) -> bool:
        """Whether it is a source's."""
        return not isinstance(self.key.work, ReadKey)

    @property
    def in_slot(self) -> NDArray[np.int64]:
        """The bytes of the slot that it touches."""
        return self.target if self.is_gather else self.source


@dataclass(slots=True, eq=False)
class Rank:
    """`engine_name` is the machine, `party.engine_id` who it says it is. `slots` are those of its staging memory that
    are held, as indices of bytes, and `copies` what is gathered or scattered. With `outlived` the memory of a process
    that is not `alive` can still be read."""

    engine_name: str
    party: Party
    memory: RankMemory
    pool: BlockPool
    inbox: Inbox
    name: str = field(init=False)
    address: str = field(init=False)
    peer_key: PeerKey = field(init=False)
    descriptor: bytes = field(init=False)
    alive: bool = True
    outlived: bool = False
    leased: dict[str, LeasedBlocks] = field(default_factory=dict)
    fetching: dict[str, Fetching] = field(default_factory=dict)
    freed_at: dict[str, float] = field(default_factory=dict)
    slots: dict[SlotKey, range] = field(default_factory=dict)
    copies: dict[SlotKey, Copy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = f"{self.engine_name}.{self.party.rank}"
        self.address = f"sim://{self.engine_name}/{self.party.rank}"
        self.peer_key = PeerKey(self.address, self.party.engine_id, self.party.epoch)
        self.descriptor = f"{self.name}#{self.party.epoch}".encode()

    def slot(self, key: SlotKey) -> range:
        """The bytes of a slot that is held under this name; empty when none is."""
        return self.slots.get(key, range(0))

    def slots_of(self, request_id: str) -> list[SlotKey]:
        """The slots for what a request reads."""
        works = [(key, key.work) for key in self.slots]
        return [key for key, work in works if isinstance(work, ReadKey) and request_of(work.claim_id) == request_id]

    def scatters_for(self, request_id: str) -> list[Copy]:
        """What still brings bytes from slots into the blocks of a request."""
        works = [(copy, copy.key.work) for copy in self.copies.values()]
        reads = [(copy, work) for copy, work in works if isinstance(work, ReadKey)]
        return [copy for copy, work in reads if request_of(work.claim_id) == request_id]

    def gathers_for(self, lease_id: str) -> list[Copy]:
        """What still looks at the blocks of a lease."""
        works = [(copy, copy.key.work) for copy in self.copies.values()]
        return [copy for copy, work in works if isinstance(work, ClaimKey) and work.lease_id == lease_id]

    def keeps(self, lease_id: str) -> bool:
        """Whether the blocks of a lease are still the lease's."""
        return any(leased.wanted.lease_id == lease_id for leased in self.leased.values())

    def free(self, tables: Tables) -> None:
        """Blocks come back, and somebody else has them at once."""
        if tables:
            self.memory.overwrite(tables)
            self.pool.give_back(tables)


@dataclass(slots=True, eq=False)
class Access:
    """How a peer reaches the memory of a rank, and whether it still may. With `is_near` it also gathers straight into
    slots of its staging memory."""

    rank: Rank
    descriptor: bytes
    is_valid: bool = True
    is_near: bool = True
