"""How an engine process moves caches: offers and fetches on the event loop, carried out by the agent's thread."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvferry import (
    UNKNOWN_PROMPT,
    Agent,
    AgentConfig,
    AsyncAgent,
    BlocksReleased,
    Cache,
    FetchReport,
    FetchRequest,
    FirstToken,
    HoldRequest,
    LeaseEnded,
    LeaseProgress,
    LeaseRequest,
    PeerReport,
    Prompt,
    Reason,
    TokenRange,
    new_lease_id,
)
from kvferry.connectors.jobs import BlockTables
from kvferry.embedded.engine.records import Grown
from kvferry.errors import FerryError, RequestError, TransferError
from kvferry.kv_transfer_params import Reach, RemoteCache, from_params, number_of, room_names, to_params

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leased:
    """A request of the engine's whose cache is leased. Who does not know `lease_id` may not end that."""

    request_id: str
    lease_id: str


@dataclass(frozen=True, slots=True)
class ReceivedCache:
    """A cache that has come: the name of the engine that it came from, and what that took."""

    peer: str
    report: FetchReport


class AgentTransfer:
    """Offers the blocks of prompts that one engine of one rank has computed, and fetches those of others.

    It calls `release`, the engine's own, for a request when

    * its offered blocks are no longer needed: fetched, expired, or aborted; every offer ends in one of these;
    * its target blocks are safe after a `fetch` that raised or was aborted: no byte can land in them any more.

    After a fetch that succeeded it does not call it: the blocks are the engine's again.

    Lives on one event loop, from `start` to `close`. Raises ConfigurationError when the agent cannot be set up.
    """

    def __init__(self, config: AgentConfig, cache: Cache, release: Callable[[str], None]) -> None:
        self._reach = Reach.ANY_HOST if config.token else Reach.THIS_HOST
        self._agent = AsyncAgent(config, cache, self._on_released)
        # No blocks of any group.
        self._nowhere: BlockTables = ((),) * len(cache.layouts[0].groups)
        self._release = release
        # By the name that agents know, until its end is known here; and that name by the id of the engine's request. A
        # name is used again, as rooms are; an id is not.
        self._leased: dict[str, Leased] = {}
        self._names: dict[str, str] = {}
        self.leases_ended: Counter[str] = Counter()
        self._declining: set[asyncio.Task[None]] = set()

    @property
    def agent(self) -> Agent:
        """The agent itself, for its address, its peers and its counters."""
        return self._agent.agent

    @property
    def failure(self) -> str:
        """Why nothing can move; empty while it can."""
        return "the transfer agent has stopped" if self._agent.has_stopped else ""

    async def start(self) -> None:
        """Start the agent, whose notices come to the running loop."""
        await self._agent.start()

    async def wait_until_over(self) -> None:
        """Returns when the agent has stopped, whether by `close` or by a defect."""
        await self._agent.wait_until_stopped()

    async def close(self) -> None:
        """Stop the agent; fetches that are under way end with an error."""
        await self._agent.close()

    async def offer(
        self, request_id: str, block_tables: BlockTables, prompt: Prompt, first: FirstToken | None = None
    ) -> dict[str, object]:
        """Lease a computed prompt's blocks; `first` is the token that follows. Returns the reference that goes through
        the HTTP layer (plain JSON).

        Raises TransferError.
        """
        lease_id, num_tokens = new_lease_id(), prompt.num_tokens
        wanted = LeaseRequest(request_id, lease_id, block_tables, num_tokens, prompt=prompt, first_token=first)
        return self._lease(request_id, wanted)

    async def promise(self, request_id: str, prompt: Prompt, room: int | None = None) -> dict[str, object]:
        """Lease a prompt's blocks before they are computed. `grow` says how far that is. Returns the reference at once.

        It stays promised, however long that takes, until all is computed: from then on it is an offer like any other.
        What is promised in a `room` has the room's name. Raises TransferError, and RequestError for a room in use.
        """
        name, lease_id = (request_id, new_lease_id()) if room is None else room_names(room)
        if name in self._leased:
            what, hint = "a bootstrap room is in use", "it is for one request at a time: draw a new one"
            raise RequestError(what, found=name, hint=hint)
        wanted = LeaseRequest(name, lease_id, self._nowhere, prompt.num_tokens, is_growing=True, prompt=prompt)
        return self._lease(request_id, wanted)

    def grow(self, request_id: str, grown: Grown, first: FirstToken | None = None) -> None:
        """Tell how much of what was promised is in these blocks, and stays. With the last token comes the `first` that
        follows. Unknown ids are fine."""
        if name := self._names.get(request_id):
            self.agent.grow(LeaseProgress(name, grown.block_tables, grown.num_tokens, grown.ahead, first))

    def _lease(self, request_id: str, wanted: LeaseRequest) -> dict[str, object]:
        reference = self._agent.lease(wanted)
        self._leased[wanted.request_id] = Leased(request_id, reference.lease_id)
        self._names[request_id] = wanted.request_id
        return to_params(reference, [self.agent.address], wanted.block_tables, wanted.num_tokens)

    async def hold(self, request_id: str, params: object) -> RemoteCache:
        """Find the cache that the untrusted `params` refer to, and keep its lease alive while the request waits for
        blocks: until `fetch` or `decline`, for ten minutes at most.

        Raises TransferError, whatever is wrong with `params`; then there is nothing to decline.
        """
        try:
            remote = await self._remote(params)
            self.agent.hold(HoldRequest(remote.reference, remote.addresses))
        except TransferError as error:
            logger.warning("no cache for request %s: %s: %s", request_id, error.reason, _one_line(error))
            raise
        except RequestError as error:
            raise _unaskable(error) from error
        return remote

    async def fetch(
        self, request_id: str, remote: RemoteCache, block_tables: BlockTables, prompt: Prompt
    ) -> ReceivedCache:
        """Bring the cache of `prompt`, which may be empty, into these blocks. `remote` is that of the prompt, or of
        one that begins with it, or an error.

        Raises TransferError, whatever is wrong with `remote`, the peer or the transport. A cancelled caller aborts the
        fetch.
        """
        wanted = _wanted(request_id, remote, block_tables, prompt)
        try:
            return ReceivedCache(wanted.reference.engine_id, await self._agent.fetch(wanted))
        except TransferError as error:
            self._log_failure(wanted, error)
            raise
        except RequestError as error:
            # Nothing has begun.
            self._release(request_id)
            raise _unaskable(error) from error

    @property
    def address(self) -> str:
        """Where the agent listens for other agents: `tcp://IP:port`."""
        return self.agent.address

    @property
    def peers(self) -> tuple[PeerReport, ...]:
        """How each connected peer is reached, and what that was chosen from."""
        return self.agent.peers

    def abort(self, request_id: str) -> None:
        """End a request, offered or being fetched, that nobody waits for any more. Unknown ids are fine."""
        self.agent.abort(request_id)
        if name := self._names.get(request_id):
            self.agent.withdraw(name)

    def decline(self, request_id: str, params: object) -> None:
        """Tell the source, if it can be told, that what the untrusted `params` refer to will not be fetched. It need
        not wait for its lease to run out."""
        declining = asyncio.create_task(self._decline(request_id, params))
        self._declining.add(declining)
        declining.add_done_callback(self._declining.discard)

    async def _decline(self, request_id: str, params: object) -> None:
        try:
            # No blocks of any group: should the source grant it before it hears of the end, that moves nothing.
            wanted = _wanted(request_id, await self._remote(params), self._nowhere, UNKNOWN_PROMPT)
            self.agent.fetch(wanted)
        except FerryError as error:
            logger.info("the cache of request %s was not declined: %s", request_id, error)
            return
        self.agent.abort(request_id)

    async def _remote(self, params: object) -> RemoteCache:
        """Where the cache is that these parameters refer to. Raises TransferError."""
        remote = from_params(params, self._reach)
        if remote.is_located:
            return remote
        return remote.at(await self._agent.locate(remote.addresses[0], number_of(remote.reference)))

    def withdraw(self, params: object) -> bool:
        """End the lease of these parameters. Returns whether there was one. Raises TransferError (`malformed`)."""
        reference = from_params(params, self._reach).reference
        leased = self._leased.get(reference.request_id)
        if leased is None or leased.lease_id != reference.lease_id:
            return False
        self.agent.withdraw(reference.request_id)
        return True

    def _log_failure(self, wanted: FetchRequest, error: TransferError) -> None:
        """One line per failure. What came from a client is quoted: it may hold anything."""
        source, party = wanted.reference, self.agent.party
        logger.warning(
            "no cache for request %s: %s: from %.64r epoch %.64r to %s epoch %s: %s",
            wanted.request_id,
            error.reason,
            source.engine_id,
            source.epoch,
            party.engine_id,
            party.epoch,
            _one_line(error),
        )

    def _on_released(self, notice: BlocksReleased | LeaseEnded) -> None:
        if isinstance(notice, LeaseEnded):
            self._lease_ended(notice)
        else:
            self._release(notice.request_id)

    def _lease_ended(self, ended: LeaseEnded) -> None:
        if leased := self._leased.pop(ended.request_id, None):
            del self._names[leased.request_id]
            self._release(leased.request_id)
        self.leases_ended[str(ended.reason)] += 1
        if ended.reason != "done":
            party = self.agent.party
            logger.warning(
                "the cache of request %s was not read: %s: at %s epoch %s",
                ended.request_id,
                ended.reason,
                party.engine_id,
                party.epoch,
            )


def _wanted(request_id: str, remote: RemoteCache, block_tables: BlockTables, prompt: Prompt) -> FetchRequest:
    ranges = (TokenRange(0, prompt.num_tokens),) * len(block_tables)
    name = prompt.name(remote.reference.lease_id)
    return FetchRequest(request_id, remote.reference, remote.addresses, block_tables, ranges, prompt=name)


def _unaskable(error: RequestError) -> TransferError:
    return TransferError(Reason.MALFORMED, "this cache cannot be asked for", found=_one_line(error))


def _one_line(error: FerryError) -> str:
    """An error on one line. What was found may come from a client, and must not look like a line of kvferry's."""
    return "".join(letter if letter.isprintable() else " " for letter in str(error))
