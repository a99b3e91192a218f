"""What an engine asks for, checked where it asks: later it would be an error of other requests, or of a peer.

What travels is held to the wire's own types. A frame that a peer cannot read names no request: everything between the
two would end. `OpenRequests` sees to it that no request has two leases or two fetches at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import count
from typing import Any

import msgspec

from kvferry.agent.config import Notice
from kvferry.agent.control.addresses import SAME_TOKEN
from kvferry.agent.control.shared_token import SharedToken
from kvferry.errors import RequestError
from kvferry.plan.programs.request import check_ranges
from kvferry.session.commands import AgentStopped, BlocksReleased, Fetched, FetchFailed, LeaseEnded
from kvferry.session.events import FetchRequest, HoldRequest, LeaseProgress, LeaseRequest
from kvferry.wire.addresses import is_address
from kvferry.wire.messages import AnyBlockId, BlockId, Count, FirstToken, Name, Reference

MAX_NAME_LENGTH = 256
OWN_TABLES = tuple[tuple[BlockId, ...], ...]
TARGET_TABLES = tuple[tuple[AnyBlockId, ...], ...]


def check_lease(wanted: LeaseRequest) -> None:
    """Raises RequestError for names, block ids or a number of tokens that cannot travel."""
    _check_names(wanted.request_id, wanted.lease_id)
    _check("block ids of a lease", wanted.block_tables, OWN_TABLES)
    _check("the number of tokens of a lease", wanted.num_tokens, Count)
    _check_first_token(wanted.first_token)


def check_growth(grown: LeaseProgress) -> None:
    """Raises RequestError for block ids or a number of tokens that cannot travel."""
    _check("block ids of a lease", grown.block_tables, OWN_TABLES)
    _check("the number of tokens of a lease", grown.num_ready, Count)
    _check_first_token(grown.first_token)


def check_address(address: str, token: SharedToken) -> None:
    """Raises RequestError for what is no `tcp://IP:port`, since names are not looked up, and for an address of another
    host where no token tells who answers there."""
    _check_names(address)
    if not is_address(address):
        raise RequestError("an address cannot be used", found=address, expected="tcp://IP:port")
    if not is_address(address, on_this_host=not token):
        raise RequestError(
            "without a shared token an engine connects to its own host only",
            found=address,
            expected="127.0.0.1 or ::1, or a token",
            hint=SAME_TOKEN,
        )


def _check_first_token(first: FirstToken | None) -> None:
    if first is not None:
        _check("a first token", msgspec.to_builtins(first), FirstToken)


def check_hold(wanted: HoldRequest, token: SharedToken) -> None:
    """Raises RequestError for names that cannot travel, and for what `check_address` refuses."""
    _check_reference(wanted.reference, wanted.addresses, token)


def check_fetch(wanted: FetchRequest, token: SharedToken) -> None:
    """Raises RequestError for names, block ids or ranges that cannot travel, for ranges that run backwards, and for
    what `check_address` refuses."""
    _check_names(wanted.request_id)
    _check_reference(wanted.reference, wanted.addresses, token)
    _check("block ids of a fetch", wanted.block_tables, TARGET_TABLES)
    check_ranges(wanted.ranges)


def _check_reference(reference: Reference, addresses: Sequence[str], token: SharedToken) -> None:
    _check_names(reference.engine_id, reference.epoch, reference.request_id, reference.lease_id)
    for address in addresses:
        check_address(address, token)


def _check_names(*names: str) -> None:
    for name in names:
        if not name:
            raise RequestError("a name cannot be sent", found="none", expected="at least one character")
        _check("a name", name, Name)
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise RequestError("a name cannot be sent", found=str(error), expected="text") from error


def _check(what: str, value: object, kind: Any) -> None:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise RequestError(f"{what} cannot be sent", found=str(error)) from error


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
        check_unleased(request_id, self._leased)
        self._leased.add(request_id)

    def fetch(self, request_id: str) -> str:
        """Until `Fetched` or `BlocksReleased`; returns a name that no other attempt has. Raises RequestError."""
        check_unfetched(request_id, self._fetched)
        self._fetched.add(request_id)
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


def check_unleased(request_id: str, leased: Container[str]) -> None:
    """Raises RequestError for a request that has a lease."""
    _check_new(request_id, leased, "a lease", "LeaseEnded")


def check_unfetched(request_id: str, fetched: Container[str]) -> None:
    """Raises RequestError for a request that is being fetched, or whose blocks are not free yet."""
    _check_new(request_id, fetched, "a fetch", "Fetched or BlocksReleased")


def _check_new(request_id: str, names: Container[str], what: str, until: str) -> None:
    if request_id in names:
        raise RequestError(
            f"the request has {what} already",
            found=request_id,
            expected=f"{until} of the one before",
            hint="use a unique id for every request",
        )
