"""The story of a run, line by line with its time; kept only when somebody wants to read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

import msgspec

from kvferry.plan.digests.extract import Extract
from kvferry.plan.digests.subject import Subject
from kvferry.plan.programs.copies import Copies
from kvferry.session.events import PeerKey
from kvferry.testing.simulation.clock import World
from kvferry.wire.messages import Offer, Party, Reference, TargetOffer


class Story:
    """`lines` when it is `told`; `injected` counts the faults in any case."""

    def __init__(self, world: World, told: bool) -> None:
        self.told = told
        self.lines: list[str] = []
        self.injected: Counter[str] = Counter()
        self._world = world

    def say(self, who: str, *words: Any) -> None:
        """Note what happened. Words are only put into text when the story is told."""
        if self.told:
            text = " ".join(word if isinstance(word, str) else worded(word) for word in words)
            self.lines.append(f"{self._world.now:10.4f} {who:<9} {text}")

    def fault(self, name: str, who: str, *words: Any) -> None:
        """Note a fault and count it."""
        self.injected[name] += 1
        self.say(who, f"!! {name}", *words)


def worded(value: Any) -> str:
    """An event, message or command in one short line."""
    if isinstance(value, tuple):
        return f"({', '.join(map(worded, value))})"
    if isinstance(value, str | int | float):
        return str(value)
    if type(value) in _SHORT:
        return _SHORT[type(value)](value)
    names = [field.name for field in fields(value)] if is_dataclass(value) else _struct_fields(value)
    inside = ", ".join(worded(attrgetter(name)(value)) for name in names if name != "report")
    return f"{type(value).__name__}({inside})" if names else repr(value)


def _struct_fields(value: Any) -> list[str]:
    return [field.name for field in msgspec.structs.fields(value)] if isinstance(value, msgspec.Struct) else []


_SHORT: Mapping[type, Callable[[Any], str]] = {
    Offer: lambda offer: f"Offer({worded(offer.party)})",
    TargetOffer: lambda offer: f"TargetOffer({worded(offer.party)})",
    bytes: lambda value: value.hex(),
    Extract: lambda extract: f"{len(extract.numbers)} states, {extract.num_bytes} bytes",
    Subject: lambda subject: f"{subject.policy} of {len(subject.parts)} parts",
    Copies: lambda copies: f"{len(copies)} rows, {copies.num_bytes} bytes",
    PeerKey: lambda peer: f"{peer.address}#{peer.epoch}",
    Party: lambda party: f"{party.engine_id}.{party.rank}#{party.epoch}",
    Reference: lambda named: f"{named.engine_id}#{named.epoch}/{named.request_id}/{named.lease_id}",
}
