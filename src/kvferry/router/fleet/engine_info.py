"""What an engine says of itself, and which engines must not be paired. What it does not say is not held against it."""

from __future__ import annotations

from enum import StrEnum
from urllib.parse import urlsplit

import msgspec

from kvferry.router.policy.records import Instance

MAX_ROOM = (1 << 63) - 1


class Handover(StrEnum):
    """How the cache of a prefill instance gets to a decode instance. REFERENCE: prefill answers with a reference, which
    the decode request is given. ROOM: both requests are sent at once and name the same room, where decode finds the
    cache and the first token of the answer. NONE: not at all."""

    REFERENCE = "reference"
    ROOM = "room"
    NONE = "none"


class EngineInfo(msgspec.Struct, frozen=True):
    """The answer of `/kvferry/info`; empty where the engine says nothing.

    `epoch` is new at every start. `cache` names what is kept of a request: equal names can be exchanged, whatever the
    parallelism, block size and memory format. Engines with a `wire_version` are kvferry's own. Without a `prefix_cache`
    nothing that was sent there before spares it any work. With `early` it can refer to a prompt's cache before it has
    computed it. Engines whose `handover` is a room are found at `bootstrap_port` of `bootstrap_host`, or of the host of
    their URL, and exchange caches over the same `transfer_backend`. One that does not compute prompts serves only what
    a prefill has computed.
    """

    engine: str = ""
    version: str = ""
    wire_version: str = ""
    epoch: str = ""
    models: tuple[str, ...] = ()
    cache: str = ""
    prefix_cache: bool = True
    early: bool = False
    handover: Handover = Handover.REFERENCE
    transfer_backend: str = ""
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    computes_prompts: bool = True


UNKNOWN_ENGINE = EngineInfo()


def differences(prefill: EngineInfo, decode: EngineInfo) -> tuple[str, ...]:
    """Everything that keeps the two from exchanging a cache, with both values.

    kvferry's engines understand each other when their wire versions are equal; of other engines nothing is known but
    their release, and connectors such as vLLM's refuse to speak to another one.
    """
    found = []
    if prefill.models and decode.models and not set(prefill.models) & set(decode.models):
        found.append(f"model: {', '.join(prefill.models)} and {', '.join(decode.models)}")
    if prefill.handover is not decode.handover or Handover.NONE in (prefill.handover, decode.handover):
        found.append(f"handover: {prefill.handover} and {decode.handover}")
    names = ["transfer_backend", "wire_version", "cache"]
    if prefill.engine == decode.engine and not prefill.wire_version and not decode.wire_version:
        names.append("version")
    values = ((name, getattr(prefill, name), getattr(decode, name)) for name in names)
    found.extend(f"{name}: {left} and {right}" for name, left, right in values if left and right and left != right)
    return tuple(found)


def room_at(prefill: Instance, info: EngineInfo, number: int) -> bytes:
    """The fields of a room of this prefill instance, a JSON object; empty where its caches are found by a reference.

    Without the client's `rid`: SGLang refuses one that it still knows, as it may after a try that failed."""
    if info.handover is not Handover.ROOM:
        return b""
    host, port = info.bootstrap_host or urlsplit(prefill.url).hostname, info.bootstrap_port
    fields = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": number, "rid": None}
    return msgspec.json.encode(fields)
