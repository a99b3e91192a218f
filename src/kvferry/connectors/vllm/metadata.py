"""What the scheduler's half tells the workers' halves: once per step, in the connector's metadata."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvferry import (
    UNKNOWN_PROMPT,
    UNNAMED,
    FirstToken,
    HoldRequest,
    Prompt,
    PromptName,
    Reference,
    RemoteEngine,
    TokenRange,
)
from kvferry.kv_transfer_params import RemoteCache

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
    """A finished prefill whose blocks stay until the agent frees them. `first_token` is what follows its tokens."""

    request_id: str
    lease_id: str
    block_tables: Tables
    num_tokens: int
    prompt: Prompt = UNKNOWN_PROMPT
    first_token: FirstToken | None = None


@dataclass(frozen=True, slots=True)
class PromiseOrder:
    """A prefill whose cache somebody may ask for already; `name` is what agents call it. It will have `num_tokens`.
    Who asks for one that `is_unnamed` is told so."""

    name: str
    lease_id: str
    num_tokens: int
    prompt: Prompt = UNKNOWN_PROMPT
    is_unnamed: bool = False


@dataclass(frozen=True, slots=True)
class GrowthOrder:
    """What this step computes of a promised prefill: when it has ended, `num_tokens` tokens lie in these blocks."""

    name: str
    block_tables: Tables
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EndOrder:
    """A promised prefill has ended, and its blocks stay until the agent frees them. `is_kept` says that all of it is
    computed, and `first_token` what follows; else the promise is taken back."""

    request_id: str
    name: str
    block_tables: Tables
    num_tokens: int
    is_kept: bool
    first_token: FirstToken | None = None


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
    prompt: PromptName = UNNAMED

    @property
    def is_located(self) -> bool:
        """Whether it is known which engine has it; of a room only where that listens."""
        return RemoteCache(self.reference, self.addresses).is_located

    def at(self, engine: RemoteEngine) -> FetchOrder:
        """The same cache, at the engine that listens at its address."""
        remote = RemoteCache(self.reference, self.addresses).at(engine)
        return replace(self, reference=remote.reference, addresses=remote.addresses)


@dataclass(slots=True)
class Orders(KVConnectorMetadata):
    """Everything new of one step. `aborted` are requests whose fetch nobody waits for any more. A step that `is_idle`
    computes nothing: the scheduler only asks what has ended.

    `begun` names promised prefills of which this step computes the first tokens. `withdrawn` names those whose blocks
    are another request's from this step on: that has to be done before the step computes anything. With `is_reset`
    nothing is to be read any more of what was computed before.
    """

    leases: list[LeaseOrder] = field(default_factory=list)
    promises: list[PromiseOrder] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    growths: list[GrowthOrder] = field(default_factory=list)
    ended: list[EndOrder] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    holds: list[HoldRequest] = field(default_factory=list)
    fetches: list[FetchOrder] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    is_idle: bool = False
    is_reset: bool = False


@dataclass(frozen=True, slots=True)
class RankAddress(KVConnectorHandshakeMetadata):
    """Where one rank's agent listens, told to the scheduler's half when the engine starts. With the first rank's `key`
    promises are sealed."""

    address: str
    epoch: str
    key: str = field(default="", repr=False)
