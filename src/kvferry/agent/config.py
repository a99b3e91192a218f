"""What an agent is told at its start: which rank of which engine it serves, and how."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.agent.control.addresses import listening_address
from kvferry.agent.control.shared_token import NO_TOKEN, SharedToken
from kvferry.errors import ConfigurationError
from kvferry.plan.digests.subject import DigestPolicy
from kvferry.plan.programs.copies import Direction
from kvferry.session import commands as c
from kvferry.session.target.read_strategy import AUTO, StagingPolicy, allowed_by
from kvferry.session.timing import Timing
from kvferry.staging.pool import ALIGNMENT_BYTES
from kvferry.wire.addresses import MAX_PORT
from kvferry.wire.messages import MAX_SLOT_BYTES

# Two ranks of an engine that pack for one target at once have three slots each then, of the four that each could use.
# With 256 MiB one of them waits for the other, and 8,192 tokens take a fourteenth longer (`pack`, 4 to 2, token-major,
# in benchmarks/mixed_tp.py with both values in turns, on 2 cores); with 512 a fiftieth less, and where slots go over a
# wire a twentieth, which is not worth as much of a device's memory.
STAGING_BYTES = 384 << 20
MIN_STAGING_BYTES = 1 << 20
# Each slot costs messages, plans and turns: on 2 cores packed reads of 8,192 tokens in benchmarks/mixed_tp.py
# take a tenth less time with this than with 16 MiB, and with 32 hardly less.
SLOT_BYTES = 24 << 20

Notice = c.Fetched | c.FetchFailed | c.BlocksReleased | c.LeaseEnded | c.Located | c.LocateFailed | c.AgentStopped
"""What an engine is told, on the agent's thread."""


def new_epoch() -> str:
    """A name that no other start of any engine has."""
    return f"{time.time_ns():x}-{secrets.token_hex(4)}"


def new_lease_id() -> str:
    """An id that nobody can guess: who knows it has been told."""
    return secrets.token_hex(16)


def slot_bytes_in(staging_bytes: int) -> int:
    """The slots of which so much memory has room for eight each way: one engine may have six, and a read uses four at
    once. No smaller than what the pool hands out, and no larger than can be said."""
    return min(MAX_SLOT_BYTES, max(1, staging_bytes // 16 // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


def staging_named(name: str, staging_bytes: int = STAGING_BYTES) -> StagingPolicy:
    """What users call a policy, `auto` or the name of a strategy, with slots for so much memory.

    Raises ConfigurationError for another name, and for memory that nobody could call that.
    """
    if staging_bytes < MIN_STAGING_BYTES:
        raise ConfigurationError(
            "too little staging memory",
            found=f"{staging_bytes:,} bytes",
            expected=f"at least {MIN_STAGING_BYTES:,}",
        )
    return StagingPolicy(allowed_by(name), min(SLOT_BYTES, slot_bytes_in(staging_bytes)))


def _check_member(what: str, value: object, kind: type[StrEnum]) -> None:
    """A text would look like a member, and compare unequal to all of them."""
    if not isinstance(value, kind):
        names = " or ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise ConfigurationError(f"the {what} is none", found=repr(value), expected=names)


MAX_ENGINE_ID = 200
ENGINE_ID = re.compile(rf"\S{{1,{MAX_ENGINE_ID}}}")


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """One rank of one engine. All ranks of an engine have the same `epoch`, new at every start.

    `port` 0 lets the system choose; `transport` is `auto` or a transport's name. Without a `token` there is nothing but
    this host to listen on and to connect to. `digest` says how much of what has arrived is compared with the source's
    own bytes before a request may be decoded, `direction` whether this rank reads them or has the source write them;
    with `may_switch_direction` a rank that reads has sources write as well: all, where reading turns out to be far
    slower, or a share, where both sides can copy at once. Bytes may go through `staging_bytes` of memory, half of it
    for each way, where `staging` says that this is cheaper.
    """

    engine_id: str
    epoch: str = field(default_factory=new_epoch)
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    transport: str = "auto"
    timing: Timing = field(default_factory=Timing)
    token: SharedToken = NO_TOKEN
    digest: DigestPolicy = DigestPolicy.SAMPLED
    direction: Direction = Direction.READ
    may_switch_direction: bool = True
    staging_bytes: int = STAGING_BYTES
    staging: StagingPolicy = field(default_factory=lambda: StagingPolicy(AUTO, SLOT_BYTES))

    def __post_init__(self) -> None:
        """Raises ConfigurationError for a name, a port, a direction or a digest policy that is none, for a host
        that must not or cannot be listened on, and for too little staging."""
        if not ENGINE_ID.fullmatch(self.engine_id):
            raise ConfigurationError(
                "invalid engine id",
                found=repr(self.engine_id[:MAX_ENGINE_ID]),
                expected=f"1 to {MAX_ENGINE_ID} characters without spaces",
                hint="references, logs and metrics name the engine by it",
            )
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigurationError(
                f"engine {self.engine_id} cannot listen for transfers at a port that does not exist",
                found=f"port {self.port}",
                expected=f"1 to {MAX_PORT}, or 0 for any free one",
                hint="choose a lower --transfer-port: with data parallelism engine number d listens d ports above it",
            )
        _check_member("direction", self.direction, Direction)
        _check_member("digest policy", self.digest, DigestPolicy)
        listening_address(self.host, self.token)
        if self.staging_bytes < 4 * self.staging.slot_bytes:
            raise ConfigurationError(
                "staging memory is too small for its slots",
                found=f"{self.staging_bytes:,} bytes, slots of {self.staging.slot_bytes:,}",
                expected="room for two slots that come in and two that go out",
            )
