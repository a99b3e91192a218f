"""What this rank is to the sources that it fetches from."""

from __future__ import annotations

from dataclasses import replace

from kvferry.agent.config import AgentConfig
from kvferry.errors import ConfigurationError
from kvferry.plan.programs.copies import Direction
from kvferry.session.source.handshake import SourceIdentity
from kvferry.session.target.peers.identity import TargetIdentity
from kvferry.session.target.read_strategy import through_staging_only
from kvferry.wire.codec import MAX_REQUEST_BYTES, encode
from kvferry.wire.messages import TargetOffer


def ourselves_of(identity: SourceIdentity, config: AgentConfig, staging_descriptor: bytes) -> TargetIdentity:
    """What sources are told, and how this rank wants to be served.

    Raises ConfigurationError for a strategy or a direction that cannot work with such a cache.
    """
    ours = TargetIdentity(
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
    offer = TargetOffer(ours.party, ours.layouts, ours.transports, ours.probe, ours.staging_descriptor)
    num_bytes = len(encode(offer))
    if ours.direction is Direction.WRITE and num_bytes > MAX_REQUEST_BYTES:
        raise ConfigurationError(
            "the layouts of this engine are too large for a push",
            found=f"{num_bytes:,} bytes",
            expected=f"at most {MAX_REQUEST_BYTES:,}",
            hint="choose the direction pull",
        )
    # Nobody can write into blocks that are reached through staging memory only, or that it cannot be told of.
    may_turn = config.may_turn and not identity.is_staged and num_bytes <= MAX_REQUEST_BYTES
    return replace(ours, may_turn=may_turn)
