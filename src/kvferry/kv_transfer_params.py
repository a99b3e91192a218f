"""`kv_transfer_params`: what travels through the HTTP layer from the prefill's answer to the decode's request.

The keys are vLLM's, so that existing proxies and routers pass them on unmodified; ours are under `kvferry`. They come
back from a client, so nothing in them is believed: they are checked here, and the source's record of the lease decides.

Where nothing can travel, since both engines get the request at once, a client names it to both by a **room**, a number
that it has drawn, and to the target by the address of the source as well. SGLang's clients do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from kvferry.errors import RequestError, TransferError
from kvferry.session.commands import RemoteEngine
from kvferry.wire.addresses import place_of
from kvferry.wire.messages import Reason, Reference

__all__ = [
    *("Reach", "RemoteCache"),
    *("early_params", "from_params", "number_of", "room_names", "room_of", "room_params", "to_params", "wants_early"),
]

NonEmptyName = Annotated[str, Meta(min_length=1, max_length=256)]
Address = Annotated[str, Meta(max_length=64)]
# Numbers only: looking up a name that a client has chosen would let it ask any name server and wait for the answer.
MAX_RANKS = 64
MAX_ROOM = (1 << 63) - 1
"""Rooms are SGLang's `bootstrap_room`; 0 means there that none is known yet."""


class Reach(StrEnum):
    """Where an engine may be sent by its clients: elsewhere only when a peer there must prove who it is."""

    THIS_HOST = "this host"
    ANY_HOST = "any host"


@dataclass(frozen=True, slots=True)
class RemoteCache:
    """Where a request's cache is said to be: its reference and the control address of every source rank.

    Of a room only the address of the first rank is known: the reference names no engine until it is `at` the one that
    `Agent.locate` has found there.
    """

    reference: Reference
    addresses: tuple[str, ...]

    @property
    def is_located(self) -> bool:
        """Whether it is known which engine has it."""
        return bool(self.reference.engine_id)

    def at(self, engine: RemoteEngine) -> RemoteCache:
        """The same cache, at the engine that listens at its address."""
        reference = replace(self.reference, engine_id=engine.engine_id, epoch=engine.epoch)
        return RemoteCache(reference, engine.addresses)


class _Ours(msgspec.Struct, frozen=True):
    epoch: NonEmptyName
    lease_id: NonEmptyName
    addresses: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=MAX_RANKS)]


class _Params(msgspec.Struct, frozen=True):
    do_remote_prefill: bool
    remote_engine_id: NonEmptyName
    remote_request_id: NonEmptyName
    kvferry: _Ours


class _InRoom(msgspec.Struct, frozen=True):
    room: Annotated[int, Meta(ge=1, le=MAX_ROOM)]


class _RoomParams(msgspec.Struct, frozen=True):
    do_remote_prefill: bool
    remote_host: Annotated[str, Meta(max_length=39)]
    remote_port: Annotated[int, Meta(ge=1, le=65_535)]
    kvferry: _InRoom


for _kind in (_Params, _RoomParams):
    # Prepared here, before any thread: msgspec does so at a type's first use, and two threads at once end the process.
    msgspec.json.Decoder(_kind)


def room_names(room: int) -> tuple[str, str]:
    """What agents call the request of a room, and its lease. A room opens nothing: whoever reads names the prompt. But
    whoever knows it can end it, so rooms are drawn at random."""
    return f"room-{room}", f"sglang-room-{room}"


def number_of(reference: Reference) -> int:
    """Which engine of a server with data parallelism a reference to a room means (`Agent.locate`): SGLang gives a
    request to the one whose number is the room modulo how many there are."""
    name, _, room = reference.request_id.rpartition("-")
    return int(room) if name == "room" and room.isdecimal() else 0


def room_of(params: Mapping[str, object]) -> int | None:
    """The room of a prefill request, `{"kvferry": {"room": 5}}`; None without one. Raises RequestError."""
    if not _names_room(params):
        return None
    try:
        return msgspec.convert(params.get("kvferry"), _InRoom).room
    except (msgspec.ValidationError, ValueError) as error:
        # A text with half a character is no validation error of msgspec's.
        expected = f"an integer from 1 to {MAX_ROOM}"
        what = "kvferry.room in kv_transfer_params is invalid"
        raise RequestError(what, found=_printable(str(error)), expected=expected) from error


def room_params(room: int, host: str, port: int) -> dict[str, object]:
    """The parameters of a decode request whose prompt is computed in a room, by the engine whose rank 0 listens for
    agents at `host:port`; as JSON-ready values. `host` is an IP."""
    place = {"remote_host": host, "remote_port": port}
    return {"do_remote_prefill": True, "do_remote_decode": False, **place, "kvferry": {"room": room}}


def wants_early(params: Mapping[str, object]) -> bool:
    """Whether a prefill request is asked for its reference as soon as it has begun: `{"kvferry": {"early": true}}`."""
    ours = params.get("kvferry")
    return isinstance(ours, dict) and ours.get("early") is True


def to_params(
    reference: Reference, addresses: Sequence[str], block_tables: Sequence[Sequence[int]], num_tokens: int
) -> dict[str, object]:
    """The parameters for the decode side, as JSON-ready values.

    The block lists, one per cache group as of vLLM's own connector, say nothing that we rely on; there is none while
    the blocks are not known.
    """
    first = urlsplit(addresses[0])
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": reference.engine_id,
        "remote_request_id": reference.request_id,
        "remote_block_ids": [list(table) for table in block_tables] if any(block_tables) else [],
        "remote_host": first.hostname,
        "remote_port": first.port,
        "remote_num_tokens": num_tokens,
        "tp_size": len(addresses),
        "kvferry": {"epoch": reference.epoch, "lease_id": reference.lease_id, "addresses": list(addresses)},
    }


def early_params(reference: Reference, addresses: Sequence[str]) -> dict[str, object]:
    """The parameters for the decode side of a prompt of which only its engine knows how many tokens it will have."""
    params = to_params(reference, addresses, (), 0)
    del params["remote_num_tokens"]
    return params


def from_params(params: object, reach: Reach = Reach.THIS_HOST) -> RemoteCache:
    """Read parameters that a client sent. Raises TransferError (`malformed`) for anything that is not as expected."""
    try:
        return _in_room(params, reach) if _names_room(params) else _referred(params, reach)
    except (msgspec.ValidationError, ValueError) as error:
        raise TransferError(
            Reason.MALFORMED,
            "kv_transfer_params cannot be read",
            found=_printable(str(error)),
            expected="the kv_transfer_params of a prefill's response, unchanged, or a room and its engine's address",
        ) from error


def _referred(params: object, reach: Reach) -> RemoteCache:
    read = msgspec.convert(params, _Params)
    ours = read.kvferry
    _check_text(read.remote_engine_id, read.remote_request_id, ours.epoch, ours.lease_id)
    _check_addresses(ours.addresses, reach)
    reference = Reference(read.remote_engine_id, ours.epoch, read.remote_request_id, ours.lease_id)
    return RemoteCache(reference, ours.addresses)


def _names_room(params: object) -> bool:
    ours = params.get("kvferry") if isinstance(params, Mapping) else None
    return isinstance(ours, Mapping) and "room" in ours


def _in_room(params: object, reach: Reach) -> RemoteCache:
    read = msgspec.convert(params, _RoomParams)
    host = f"[{read.remote_host}]" if ":" in read.remote_host else read.remote_host
    addresses = (f"tcp://{host}:{read.remote_port}",)
    _check_addresses(addresses, reach)
    return RemoteCache(Reference("", "", *room_names(read.kvferry.room)), addresses)


def _check_text(*names: str) -> None:
    """Raises ValueError for half a character (a lone surrogate), which JSON can hold and no message can."""
    for name in names:
        name.encode()


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _check_addresses(addresses: tuple[str, ...], reach: Reach) -> None:
    found = [place_of(address) for address in addresses]
    if len(set(found)) != len(found):
        raise ValueError("an address is given more than once")
    for host, _ in found:
        if host.is_unspecified or host.is_multicast or (host.version == 6 and host.ipv4_mapped):
            raise ValueError(f"{host} cannot be the address of an engine")
        if reach is Reach.THIS_HOST and not host.is_loopback:
            raise ValueError(f"{host} is another host, and this engine has no shared token")
