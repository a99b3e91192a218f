"""What an engine says of itself, and which engines must not be paired. What it does not say is not held against it."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

import msgspec
from msgspec import structs


class Handover(StrEnum):
    """How the cache of a prefill instance gets to a decode instance. REFERENCE: prefill answers with a reference, which
    the decode request is given. ROOM: both requests are sent at once and name the same room, where decode finds the
    cache and the first token of the answer. NONE: not at all."""

    REFERENCE = "reference"
    ROOM = "room"
    NONE = "none"


class EngineInfo(msgspec.Struct, frozen=True, cache_hash=True):
    """The answer of `/kvferry/info`; empty where the engine says nothing.

    `epoch` is new at every start. `cache` names what is kept of a request: equal names can be exchanged, whatever the
    parallelism, block size and memory format. Engines with a `wire_version` are kvferry's own. With no `prefix_cache`
    nothing that was sent there before spares it any work. With `early` it can refer to a prompt's cache before it has
    computed it. `meets_in_rooms`: it can meet in rooms, although its `handover` is another. SGLang servers of a pair
    have the same `transfer_backend`. A prefill's rooms are at `bootstrap_port` of `bootstrap_host`, or of its URL's
    host. Without `computes_prompts` it serves only what a prefill has computed.
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
    meets_in_rooms: bool = False
    transfer_backend: str = ""
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    computes_prompts: bool = True

    @property
    def can_meet_others(self) -> bool:
        """Whether an engine of another kind can meet it in a room, where both have to speak kvferry's protocol."""
        return bool(self.wire_version) and (self.meets_in_rooms or self.handover is Handover.ROOM)

    @property
    def kind(self) -> EngineInfo:
        """What decides with which engines it can exchange a cache: equal for most engines of a fleet."""
        port = min(self.bootstrap_port, 1)
        return structs.replace(self, epoch="", bootstrap_host="", bootstrap_port=port)


UNKNOWN_ENGINE = EngineInfo()


def handover_between(prefill: EngineInfo, decode: EngineInfo) -> Handover:
    """How the cache of one gets to the other: as both do it, else in a room, if both can and it is known where."""
    if prefill.handover is decode.handover:
        return prefill.handover
    is_served = Handover.NONE not in (prefill.handover, decode.handover)
    can_meet = prefill.can_meet_others and decode.can_meet_others and prefill.bootstrap_port > 0
    return Handover.ROOM if is_served and can_meet else Handover.NONE


@lru_cache(maxsize=4096)
def differences(prefill: EngineInfo, decode: EngineInfo) -> tuple[str, ...]:
    """Everything that keeps the two from exchanging a cache, with both values.

    kvferry's engines understand each other when their wire versions are equal; of other engines nothing is known but
    their release, and connectors such as vLLM's refuse to speak to another one.
    """
    found = []
    if prefill.models and decode.models and not set(prefill.models) & set(decode.models):
        found.append(f"model: {', '.join(prefill.models)} and {', '.join(decode.models)}")
    if handover_between(prefill, decode) is Handover.NONE:
        found.append(f"handover: {prefill.handover} and {decode.handover}")
    names = ["transfer_backend", "wire_version", "cache"]
    if prefill.engine == decode.engine and not prefill.wire_version and not decode.wire_version:
        names.append("version")
    values = ((name, getattr(prefill, name), getattr(decode, name)) for name in names)
    found.extend(f"{name}: {left} and {right}" for name, left, right in values if left and right and left != right)
    return tuple(found)
