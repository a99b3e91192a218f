"""What an engine says of itself, and which engines must not be paired. What it does not say is not held against it."""

from __future__ import annotations

import msgspec


class EngineInfo(msgspec.Struct, frozen=True):
    """The answer of `/kvferry/info`; empty where the engine says nothing.

    `epoch` is new at every start. `cache` names what is kept of a request: equal names can be exchanged, whatever the
    parallelism, block size and memory format. Engines with a `wire_version` are kvferry's own. Without a `prefix_cache`
    nothing that was sent there before spares it any work. With `early` it can refer to a prompt's cache before it has
    computed it.
    """

    engine: str = ""
    version: str = ""
    wire_version: str = ""
    epoch: str = ""
    models: tuple[str, ...] = ()
    cache: str = ""
    prefix_cache: bool = True
    early: bool = False


UNKNOWN_ENGINE = EngineInfo()


def differences(prefill: EngineInfo, decode: EngineInfo) -> tuple[str, ...]:
    """Everything that keeps the two from exchanging a cache, with both values.

    kvferry's engines understand each other when their wire versions are equal; of other engines nothing is known but
    their release, and connectors such as vLLM's refuse to speak to another one.
    """
    found = []
    if prefill.models and decode.models and not set(prefill.models) & set(decode.models):
        found.append(f"model: {', '.join(prefill.models)} and {', '.join(decode.models)}")
    names = ["wire_version", "cache"]
    if prefill.engine == decode.engine and not prefill.wire_version and not decode.wire_version:
        names.append("version")
    values = ((name, getattr(prefill, name), getattr(decode, name)) for name in names)
    found.extend(f"{name}: {left} and {right}" for name, left, right in values if left and right and left != right)
    return tuple(found)
