"""The keys of `kv_connector_extra_config` that the vLLM connector knows. Nothing of vLLM is needed to read them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from kvferry import DigestPolicy
from kvferry.options import STAGING_BYTES, StagingMemory

IF_BOTH: Final = "if_both"
DraftLayers = bool | Literal["if_both"]
"""Whether the cache of a speculator moves: always, never, or if both sides have one alike."""


class IgnoredKeys(msgspec.Struct):
    """Keys of the stock connector whose meaning does not exist here: accepted, so that a configuration can stay as it
    is."""

    enforce_handshake_compat: Any = None
    engine_ttl: Any = None
    num_threads: Any = None
    push_registration_timeout: Any = None


class ExtraConfig(IgnoredKeys, forbid_unknown_fields=True):
    """The keys of `kv_connector_extra_config`. `port` is that of rank 0; the others follow it; 0 lets the system choose
    them all. `backends` is the stock connector's, and can only ask for what NIXL gives us: UCX."""

    backends: list[str] = msgspec.field(default_factory=lambda: ["UCX"])
    digest: str = DigestPolicy.SAMPLED
    host: str | None = None
    kv_lease_duration: Annotated[float, Meta(gt=0)] = 30
    layer_wise: bool = False
    port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    staging_bytes: int = STAGING_BYTES
    staging_memory: str = StagingMemory.HOST
    strategy: str = "auto"
    token_file: str = ""
    transfer_direction: str = "auto"
    transfer_draft_layers: DraftLayers = True
    transport: str = "auto"
