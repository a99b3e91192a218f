"""What an SGLang server says of itself: `/server_info`. Pure."""

from __future__ import annotations

import msgspec

from kvferry.router.fleet.engine_info import EngineInfo, Handover
from kvferry.router.policy.records import Role
from kvferry.router.request.lenient_json import decoded

OWNER = "sglang"
"""Who owns its models, as `/v1/models` says."""

WHOLE = "null"
"""The mode of a server that serves requests from beginning to end."""


class BackendInfo(msgspec.Struct):
    """What kvferry's transfer backend adds, where that is used: where it listens, its version, and what is kept."""

    host: str = ""
    wire_version: str = ""
    cache: str = ""


class ServerInfo(msgspec.Struct):
    """The fields that matter here, of SGLang 0.5.23: the options that it was started with."""

    version: str = ""
    disaggregation_mode: str = WHOLE
    disaggregation_transfer_backend: str = ""
    disaggregation_bootstrap_port: int = 0
    kvferry: BackendInfo = msgspec.field(default_factory=BackendInfo)


def sglang_info(told: bytes, role: Role, models: tuple[str, ...]) -> EngineInfo:
    """What a server in this role says of itself. One that runs in another mode is in no pair. Neither is one whose
    answer cannot be understood: it may need a room or a reference."""
    server = decoded(told, ServerInfo)
    if server is None:
        return EngineInfo(OWNER, models=models, handover=Handover.NONE, computes_prompts=role is Role.PREFILL)
    return EngineInfo(
        engine=OWNER,
        version=server.version,
        wire_version=server.kvferry.wire_version,
        models=models,
        cache=server.kvferry.cache,
        handover=Handover.ROOM if server.disaggregation_mode == role else Handover.NONE,
        transfer_backend=server.disaggregation_transfer_backend,
        bootstrap_host=server.kvferry.host,
        bootstrap_port=server.disaggregation_bootstrap_port,
        computes_prompts=server.disaggregation_mode == WHOLE,
    )
