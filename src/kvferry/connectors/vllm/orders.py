"""What the scheduler's half tells the workers' halves: once per step, in the connector's metadata."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvferry.plan.tokens import TokenRange
from kvferry.wire.messages import Reference

__all__ = ["FetchOrder", "HoldOrder", "LeaseOrder", "Orders", "RankAddress", "Tables", "agent_name"]

Tables = tuple[tuple[int, ...], ...]
"""One block table per transferable cache group."""

MAX_NAME_LENGTH = 200


def agent_name(request_id: str) -> str:
    """What agents call a request: its id, or a digest of one that cannot travel.

    Ids begin with whatever a client has put into a header, of any length.
    """
    if 0 < len(request_id) <= MAX_NAME_LENGTH and request_id.isascii():
        return request_id
    return hashlib.sha256(request_id.encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class LeaseOrder:
    """A finished prefill whose blocks stay until the agent frees them."""

    request_id: str
    lease_id: str
    block_tables: Tables
    num_tokens: int


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """A cache to be fetched into blocks of ours.

    `is_waited_for` is false when nothing moves and only the source must learn that the request is over. `error` says
    why it cannot even be begun: the request is reported as failed then, so that vLLM's failure policy applies.
    """

    request_id: str
    reference: Reference
    addresses: tuple[str, ...]
    block_tables: Tables
    ranges: tuple[TokenRange, ...]
    is_waited_for: bool
    error: str


@dataclass(frozen=True, slots=True)
class HoldOrder:
    """A cache that will be fetched when its request's turn comes."""

    reference: Reference
    addresses: tuple[str, ...]


@dataclass(slots=True)
class Orders(KVConnectorMetadata):
    """Everything new of one step. `aborted` are requests whose fetch nobody waits for any more. A step that `is_idle`
    computes nothing: the scheduler only asks what has ended."""

    leases: list[LeaseOrder] = field(default_factory=list)
    holds: list[HoldOrder] = field(default_factory=list)
    fetches: list[FetchOrder] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class RankAddress(KVConnectorHandshakeMetadata):
    """Where one rank's agent listens, told to the scheduler's half when the engine starts."""

    address: str
    epoch: str
