"""The agent of one of SGLang's scheduler processes: what it leases and fetches, and what has become of it.

SGLang polls on its scheduler's thread, which must never wait. So what the agent says, on its own thread, is kept here
until it is asked for.
"""

from __future__ import annotations

import logging
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import msgspec
import torch

from kvferry import (
    Agent,
    AgentConfig,
    AgentStopped,
    BlocksReleased,
    Cache,
    Fetched,
    FetchFailed,
    FetchReport,
    FetchRequest,
    FirstToken,
    HoldRequest,
    LeaseEnded,
    LeaseProgress,
    LeaseRequest,
    Located,
    LocateFailed,
    Notice,
    Prompt,
    Reason,
    Reference,
    RemoteEngine,
    TokenRange,
    new_epoch,
    open_agent,
    read_token,
)
from kvferry.connectors.jobs import BlockTables
from kvferry.connectors.sglang.prefill_engines import PrefillEngines
from kvferry.connectors.sglang.settings import Settings
from kvferry.connectors.timing import SWITCH_S, timing_of
from kvferry.errors import FerryError, RequestError, TransferError
from kvferry.kv_transfer_params import MAX_ROOM, room_names
from kvferry.layout import Layout, contents
from kvferry.options import digest_policy_named, direction_named, may_switch_direction, staging_named

logger = logging.getLogger(__name__)

# Both sides get a request at once: a decode may be faster than a prefill whose scheduler is in a long step.
EARLY_CLAIM_S = 60.0
MAX_ENGINE_ID = 64


@dataclass(slots=True)
class Leased:
    """How a lease ended: `done` when every reader has it; empty while it is open."""

    ended: str = ""


@dataclass(slots=True)
class Fetching:
    """What has become of a fetch. `is_over` when no ticket can write to its pages any more."""

    request_id: str
    report: FetchReport | None = None
    error: FerryError | None = None
    is_over: bool = False


class Introduction(msgspec.Struct, frozen=True):
    """What every rank of an engine tells all others when it starts. The engine's name and epoch are those of rank 0."""

    engine_id: str
    epoch: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of this engine, by their numbers among the `num_processes` of a group; `rank` says which one we are.

    A server with data parallelism is several engines, of which this is number `number`. Where they share the layers
    that are no attention, they are in one group.
    """

    members: tuple[int, ...] = (0,)
    rank: int = 0
    num_processes: int = 1
    group: torch.distributed.ProcessGroup | None = None
    number: int = 0
    data_parallel_size: int = 1

    def gather(self, word: bytes) -> list[bytes]:
        """What every rank says, in their order. Among the processes of one server: nothing comes from a peer."""
        words = [word] * self.num_processes
        if self.num_processes > 1:
            torch.distributed.all_gather_object(words, word, group=self.group)
        return [words[member] for member in self.members]

    def name_of(self, server: str) -> str:
        """What this engine of a server is called."""
        return f"{server}-{self.number}" if self.data_parallel_size > 1 else server


def reference_of(room: int, engine: RemoteEngine) -> Reference:
    """What a room is called between agents. A room is a name that a client has chosen: what protects a cache from other
    prompts is the name of its prompt (docs/sglang.md)."""
    return Reference(engine.engine_id, engine.epoch, *room_names(room))


def check_room(room: int | None) -> None:
    """Raises RequestError without a number, and for one that SGLang's buffers cannot hold or that means that none is
    written yet."""
    if room is None or not 0 < room <= MAX_ROOM:
        what, expected = "bootstrap_room cannot name a request", f"an integer from 1 to {MAX_ROOM}"
        raise RequestError(what, found=str(room), expected=expected)


class Rank:
    """Opens the agent, and keeps what it says. Everything but `hear` is called on the scheduler's thread."""

    def __init__(
        self, settings: Settings, layout: Layout, cache: Callable[[tuple[Layout, ...]], Cache], ranks: Ranks, port: int
    ) -> None:
        """`cache` makes what the agent needs of the layouts of all ranks. Rank 0 of engine number 0 listens on `port`,
        0 for any, and that of each other engine so many ports above it.

        Raises ConfigurationError or TransportError when the agent cannot be set up.
        """
        made_up = f"sglang-{secrets.token_hex(4)}-{socket.gethostname()}"[:MAX_ENGINE_ID]
        ours = Introduction(ranks.name_of(settings.engine_id or made_up), new_epoch(), layout)
        self._nowhere: BlockTables = ((),) * len(layout.groups)
        words = ranks.gather(msgspec.msgpack.encode(ours))
        everyone = [msgspec.msgpack.decode(word, type=Introduction) for word in words]
        self.cache_name = contents(*(each.layout for each in everyone))
        config = AgentConfig(
            everyone[0].engine_id,
            everyone[0].epoch,
            ranks.rank,
            settings.host,
            port + ranks.number if port and ranks.rank == 0 else 0,
            settings.transport,
            timing_of(settings.lease_s, EARLY_CLAIM_S),
            read_token(settings.token_file),
            digest_policy_named(settings.digest),
            direction_named(settings.transfer_direction),
            may_switch_direction(settings.transfer_direction),
            settings.staging_bytes,
            staging_named(settings.strategy, settings.staging_bytes),
        )
        # What SGLang asks for and what the agent says meet here; nothing waits while it is held.
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._stopped: FerryError | None = None
        self._leases: dict[str, Leased] = {}
        self._fetches: dict[str, Fetching] = {}
        self._numbers = count()
        self.engines = PrefillEngines(lambda *asked: self.agent.locate(*asked))
        self.agent: Agent = open_agent(config, cache(tuple(each.layout for each in everyone)), self.hear)
        sys.setswitchinterval(SWITCH_S)
        addresses = [word.decode() for word in ranks.gather(self.agent.address.encode())]
        self.agent.start(addresses, ranks.data_parallel_size)
        logger.info("kvferry moves caches of rank %d of %s at %s", ranks.rank, config.engine_id, self.agent.address)

    # --- prefill ---

    def promise(self, room: int, prompt: Prompt) -> Leased:
        """Lease a prompt that is about to be computed. Raises RequestError for a room that is in use."""
        request_id, lease_id = room_names(room)
        with self._lock:
            self._check_running()
            if request_id in self._leases:
                what = "another request of this prefill engine has the same bootstrap_room"
                raise RequestError(what, found=str(room))
            leased = self._leases[request_id] = Leased()
        nowhere = self._nowhere
        wanted = LeaseRequest(request_id, lease_id, nowhere, prompt.num_tokens, is_growing=True, prompt=prompt)
        try:
            self.agent.lease(wanted)
        except RequestError:
            del self._leases[request_id]
            raise
        return leased

    def grow(self, room: int, tables: BlockTables, num_tokens: int, first: FirstToken | None = None) -> None:
        """So many tokens of a promised prompt are computed, in these pages."""
        self.agent.grow(LeaseProgress(room_names(room)[0], tables, num_tokens, first_token=first))

    def withdraw(self, room: int) -> None:
        """Nobody may read this prompt's pages from now on."""
        self.agent.withdraw(room_names(room)[0])

    # --- decode ---

    def hold(self, room: int, engine: RemoteEngine) -> None:
        """Keep a prefill's lease alive until there are pages for it here."""
        self.agent.hold(HoldRequest(reference_of(room, engine), engine.addresses))

    def fetch(
        self, room: int, engine: RemoteEngine, tables: BlockTables, tokens: TokenRange, prompt: Prompt
    ) -> Fetching:
        """Bring these tokens of a prompt into their pages; a table begins with the page of token 0."""
        reference = reference_of(room, engine)
        fetching = Fetching(f"room-{room}-{next(self._numbers)}")
        name = prompt.name(reference.lease_id)
        with self._lock:
            self._check_running()
            self._fetches[fetching.request_id] = fetching
        try:
            ranges = (tokens,) * len(tables)
            self.agent.fetch(
                FetchRequest(fetching.request_id, reference, engine.addresses, tables, ranges, prompt=name)
            )
        except FerryError:
            del self._fetches[fetching.request_id]
            raise
        return fetching

    def decline(self, room: int, engine: RemoteEngine) -> None:
        """Nobody will fetch this prompt's cache here: its source hears of it, and its lease need not run out."""
        with suppress(FerryError):
            # Nothing of it: should the source grant that before it hears of the end, nothing moves.
            self.abort(self.fetch(room, engine, self._nowhere, TokenRange(0, 0), Prompt()))

    def abort(self, fetching: Fetching) -> None:
        """Nobody waits for this fetch any more; it is over when its pages are free."""
        self.agent.abort(fetching.request_id)

    def wait_for_news(self, within_s: float) -> bool:
        """Whether the agent has said something since this was asked last, or says it within so many seconds."""
        is_new = self._news.wait(within_s)
        self._news.clear()
        return is_new

    # --- what the agent says, on its thread ---

    def hear(self, notice: Notice) -> None:
        """Keep what has become of a lease or a fetch."""
        match notice:
            case LeaseEnded(request_id, reason):
                if leased := self._leases.pop(request_id, None):
                    leased.ended = reason
            case Fetched(request_id) | FetchFailed(request_id) | BlocksReleased(request_id):
                self._progressed(self._fetches[request_id], notice)
            case Located() | LocateFailed():
                self.engines.heard(notice)
            case AgentStopped():
                self._stop()
        self._news.set()

    def _progressed(self, fetching: Fetching, notice: Fetched | FetchFailed | BlocksReleased) -> None:
        if isinstance(notice, FetchFailed):
            fetching.error = notice.error
            return
        if isinstance(notice, Fetched):
            fetching.report = notice.report
        del self._fetches[fetching.request_id]
        fetching.is_over = True

    def _stop(self) -> None:
        """Nothing moves any more. Pages that a source may still write to are never free again."""
        gone = TransferError(Reason.ABORTED, "the transfer agent of this engine has stopped")
        with self._lock:
            self._stopped = gone
            leases, fetches = list(self._leases.values()), list(self._fetches.values())
        for leased in leases:
            leased.ended = "stopped"
        for fetching in fetches:
            fetching.error = fetching.error or gone
            fetching.is_over = fetching.request_id not in self.agent.written_ids
        self.engines.stop(gone)

    def _check_running(self) -> None:
        if self._stopped is not None:
            raise self._stopped
