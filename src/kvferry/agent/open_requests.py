"""The open leases and fetches of an engine, so that no request has two at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from kvferry.agent.config import Notice
from kvferry.errors import RequestError
from kvferry.session.commands import AgentStopped, BlocksReleased, Fetched, FetchFailed, LeaseEnded

MAX_NAME_LENGTH = 256


class OpenRequests:
    """Notices pass through it on their way to the engine, whose calls may come from any thread.

    With two leases, or two fetches, of one request a notice could not tell whose blocks are free.
    """

    def __init__(self, notify: Callable[[Notice], None]) -> None:
        self._notify = notify
        self._leased: set[str] = set()
        self._fetched: set[str] = set()
        self._numbers = count(1)

    def lease(self, request_id: str) -> None:
        """Until `LeaseEnded`. Raises RequestError."""
        _open(self._leased, request_id, "a lease", "LeaseEnded")

    def fetch(self, request_id: str) -> str:
        """Until `Fetched` or `BlocksReleased`; returns a name that no other attempt has. Raises RequestError."""
        _open(self._fetched, request_id, "a fetch", "Fetched or BlocksReleased")
        return f"{next(self._numbers)}:{request_id}"[:MAX_NAME_LENGTH]

    def notify(self, notice: Notice) -> None:
        """The engine may ask for the same again as soon as it hears."""
        match notice:
            case LeaseEnded(request_id):
                self._leased.discard(request_id)
            case Fetched(request_id) | BlocksReleased(request_id):
                self._fetched.discard(request_id)
            case FetchFailed() | AgentStopped():
                """Its blocks are not free yet, or nothing is any more."""
        self._notify(notice)


def _open(names: set[str], request_id: str, what: str, until: str) -> None:
    if request_id in names:
        raise RequestError(
            f"the request has {what} already",
            found=request_id,
            expected=f"{until} of the one before",
            hint="use a unique id for every request",
        )
    names.add(request_id)
