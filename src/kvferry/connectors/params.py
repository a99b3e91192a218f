"""`kv_transfer_params`: what travels through the HTTP layer from the prefill's answer to the decode's request.

The keys are vLLM's, so that existing proxies and routers pass them on unmodified; ours are under `kvferry`. They come
back from a client, so nothing in them is believed: they are checked here, and the source's record of the lease decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvferry.errors import TransferError
from kvferry.wire.messages import Reason, Reference

__all__ = ["Remote", "from_params", "to_params"]

Name = Annotated[str, Meta(min_length=1, max_length=256)]
# Loopback only, like the control channel itself: a client must not be able to make an engine connect anywhere else.
Address = Annotated[str, Meta(pattern=r"\Atcp://(127\.0\.0\.1|localhost):[1-9][0-9]{0,4}\Z", max_length=64)]
MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class Remote:
    """Where a request's cache is said to be: its reference and the control address of every source rank."""

    reference: Reference
    addresses: tuple[str, ...]


class _Ours(msgspec.Struct, frozen=True):
    epoch: Name
    lease_id: Name
    addresses: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=MAX_RANKS)]


class _Params(msgspec.Struct, frozen=True):
    do_remote_prefill: bool
    remote_engine_id: Name
    remote_request_id: Name
    kvferry: _Ours


def to_params(
    reference: Reference, addresses: Sequence[str], block_tables: Sequence[Sequence[int]], num_tokens: int
) -> dict[str, object]:
    """The parameters for the decode side, as JSON-ready values. One block list when there is one cache group."""
    first = urlsplit(addresses[0])
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": reference.engine_id,
        "remote_request_id": reference.request_id,
        "remote_block_ids": list(block_tables[0]) if len(block_tables) == 1 else [list(t) for t in block_tables],
        "remote_host": first.hostname,
        "remote_port": first.port,
        "remote_num_tokens": num_tokens,
        "tp_size": len(addresses),
        "kvferry": {"epoch": reference.epoch, "lease_id": reference.lease_id, "addresses": list(addresses)},
    }


def from_params(params: object) -> Remote:
    """Read parameters that a client sent. Raises TransferError (`malformed`) for anything that is not as expected."""
    try:
        read = msgspec.convert(params, _Params)
        _check_addresses(read.kvferry.addresses)
    except (msgspec.ValidationError, ValueError) as error:
        raise TransferError(
            Reason.MALFORMED,
            "kv_transfer_params cannot be read",
            found=str(error),
            expected="the kv_transfer_params of a prefill's response, unchanged",
        ) from error
    ours = read.kvferry
    reference = Reference(read.remote_engine_id, ours.epoch, read.remote_request_id, ours.lease_id)
    return Remote(reference, ours.addresses)


def _check_addresses(addresses: tuple[str, ...]) -> None:
    if len(set(addresses)) != len(addresses):
        raise ValueError("an address is given twice")
    if any(int(address.rpartition(":")[2]) > 65_535 for address in addresses):
        raise ValueError("a port is larger than 65535")
