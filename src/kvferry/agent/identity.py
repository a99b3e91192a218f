"""What this rank tells its peers about itself: as a source, as a target, and where its probe is."""

from __future__ import annotations

import secrets
from dataclasses import replace

import numpy as np

from kvferry.agent.config import AgentConfig
from kvferry.errors import ConfigurationError
from kvferry.plan.programs.copies import Direction
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.read_strategy import StagingPolicy, through_staging_only
from kvferry.transport.descriptors import host_here
from kvferry.transport.selection.probe import NUM_MARKS, PROBE_BYTES, allocation_bytes, fill_probe
from kvferry.transport.shm.shared_memory import SharedMemory, allocate_shared
from kvferry.wire.codec import MAX_REQUEST_BYTES, encode
from kvferry.wire.messages import Probe, TargetOffer


def allocate_probe() -> SharedMemory:
    """Memory with which peers test and measure transports. Raises TransportError when there is not enough."""
    return allocate_shared(allocation_bytes(), "kvferry-probe")


def describe_probe(arena: SharedMemory) -> Probe:
    """Fill the probe with its pattern, and describe it for peers."""
    seed = secrets.randbits(32)
    fill_probe(np.frombuffer(arena.buffer, np.uint8)[:PROBE_BYTES], seed)
    return Probe(arena.memory.address, PROBE_BYTES, seed, NUM_MARKS, host_here())


def target_identity(
    identity: SourceIdentity, config: AgentConfig, staging_descriptor: bytes, revocable: frozenset[str]
) -> TargetIdentity:
    """What sources are told about this rank, and how it wants to be served. `revocable` has the names of the transports
    by which a source has access of its own.

    Raises ConfigurationError for a strategy or a direction that cannot work with such a cache, or with so many ranks
    that their layouts cannot be sent to a source, as they must be where it writes.
    """
    found = TargetIdentity(
        identity.party,
        identity.product_version,
        identity.layouts,
        config.digest,
        config.direction,
        identity.transports,
        identity.probe,
        staging_descriptor,
        through_staging_only(config.staging) if identity.is_staged else config.staging,
    )
    offer = TargetOffer(found.party, found.layouts, found.transports, found.probe, found.staging_descriptor)
    num_bytes = len(encode(offer))
    may_switch_direction = config.may_switch_direction
    if num_bytes > MAX_REQUEST_BYTES:
        found, may_switch_direction = replace(found, staging=_only_read(found, num_bytes)), False
    # A source cannot write into blocks that are reached through staging memory only.
    may_switch_direction = may_switch_direction and not identity.is_staged
    may_leave_host = bool(config.token)
    return replace(found, may_switch_direction=may_switch_direction, may_leave_host=may_leave_host, revocable=revocable)


def _only_read(ours: TargetIdentity, num_bytes: int) -> StagingPolicy:
    """The strategies by which no source writes. Raises ConfigurationError if the user wants another one."""
    if ours.direction is Direction.READ and not ours.staging.is_packing_only:
        return replace(ours.staging, allowed=ours.staging.without_packing)
    raise ConfigurationError(
        "the layouts of this engine are too large to be sent to a source that writes",
        found=f"{num_bytes:,} bytes, the direction {ours.direction}, the strategy {' or '.join(ours.staging.allowed)}",
        expected=f"at most {MAX_REQUEST_BYTES:,} bytes, or only reads",
        hint="choose the direction pull, and another strategy than pack",
    )
