"""What an engine process needs of whoever moves the cache between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvferry import Prompt
from kvferry.embedded.engine.records import Grown
from kvferry.errors import TransferError


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What arrived: the first `tokens` tokens of a prompt, in `bytes` bytes and `descriptors` rows.

    `peer` is the name of the engine that it came from; `phases_s` are the seconds spent in each named phase; `verified`
    by what digest it was compared with the source's own bytes.
    """

    tokens: int
    bytes: int
    descriptors: int
    transport: str
    peer: str
    strategy: str
    phases_s: dict[str, float]
    verified: str = "off"


class Transfer(Protocol):
    """Offers the blocks of computed prompts and fetches those of others.

    Whoever implements it is given the engine's `release` and calls it for a request when

    * its offered blocks are no longer needed: fetched, expired, or aborted; every offer ends in one of these;
    * its target blocks are safe after a `fetch` that raised or was aborted: no byte can land in them any more.

    After a fetch that succeeded it does not call it: the blocks are the engine's again.
    """

    @property
    def failure(self) -> str:
        """Why nothing can move any more; empty while it can."""
        ...

    async def offer(self, request_id: str, block_tables: list[list[int]], prompt: Prompt) -> dict[str, object]:
        """Let others fetch a prompt's cache. Returns the reference that goes through the HTTP layer (plain JSON)."""
        ...

    async def promise(self, request_id: str, prompt: Prompt) -> dict[str, object]:
        """Offer a prompt's cache before it is computed; `grow` says how far it is. Returns the reference at once.

        It stays promised, however long that takes, until all is computed: from then on it is an offer like any other.
        """
        ...

    def grow(self, request_id: str, grown: Grown) -> None:
        """So much of what was promised is in these blocks, and stays. Unknown ids are fine."""
        ...

    async def fetch(
        self, request_id: str, params: object, block_tables: list[list[int]], prompt: Prompt
    ) -> TransferReport:
        """Bring the cache of `prompt`, which may be empty, into these blocks. What the untrusted `params` refer to is
        the cache of that prompt, or of one that begins with it, or an error.

        Raises TransferError, whatever is wrong with `params`, the peer or the transport.
        """
        ...

    def peers(self) -> list[dict[str, object]]:
        """How each connected peer is reached, and what that was chosen from: plain JSON."""
        ...

    def abort(self, request_id: str) -> None:
        """Nobody waits for this request any more, offered or being fetched. Unknown ids are fine."""
        ...

    def forgo(self, request_id: str, params: object) -> None:
        """What the untrusted `params` refer to will not be fetched: tell the source, if it can be told."""
        ...

    def withdraw(self, params: object) -> bool:
        """End an own offer by the reference that was given out; whether there was one. Raises TransferError."""
        ...


class NoTransfer:
    """An engine on its own: it answers whole requests and says so when it is asked for more."""

    @property
    def failure(self) -> str:
        return ""

    async def offer(self, request_id: str, block_tables: list[list[int]], prompt: Prompt) -> dict[str, object]:
        raise _alone()

    async def promise(self, request_id: str, prompt: Prompt) -> dict[str, object]:
        raise _alone()

    def grow(self, request_id: str, grown: Grown) -> None:
        return

    async def fetch(
        self, request_id: str, params: object, block_tables: list[list[int]], prompt: Prompt
    ) -> TransferReport:
        raise _alone()

    def peers(self) -> list[dict[str, object]]:
        return []

    def abort(self, request_id: str) -> None:
        return

    def forgo(self, request_id: str, params: object) -> None:
        return

    def withdraw(self, params: object) -> bool:
        return False


def _alone() -> TransferError:
    return TransferError(
        "no_transfer",
        "this engine is not connected to other engines",
        hint="send the request without kv_transfer_params",
    )
