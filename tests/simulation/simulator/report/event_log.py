"""What happened in a run, line by line with its time; kept only when somebody wants to read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

import msgspec

from kvferry.plan.digests.extractor import Extract
from kvferry.plan.digests.subject import Subject
from kvferry.plan.programs.copies import Copies
from kvferry.session.keys import PeerKey
from kvferry.wire.messages import Offer, Party, Reference, TargetOffer
from simulator.scheduler import Scheduler


class EventLog:
    """Keeps `lines` only if `is_logged`; `injected` counts the faults in any case."""

    def __init__(self, scheduler: Scheduler, is_logged: bool) -> None:
        self.is_logged = is_logged
        self.lines: list[str] = []
        self.injected: Counter[str] = Counter()
        self._scheduler = scheduler

    def note(self, who: str, *words: Any) -> None:
        """Note what happened. Values are put into text only if they are logged."""
        if self.is_logged:
            text = " ".join(status if isinstance(status, str) else as_text(status) for status in words)
            self.lines.append(f"{self._scheduler.now:10.4f} {who:<9} {text}")

    def fault(self, name: str, who: str, *words: Any) -> None:
        """Note a fault and count it."""
        self.injected[name] += 1
        self.note(who, f"!! {name}", *words)


def as_text(value: Any) -> str:
    """An event, message or command in one short line."""
    if isinstance(value, tuple):
        return f"({', '.join(map(as_text, value))})"
    if isinstance(value, str | int | float):
        return str(value)
    if type(value) in _SHORT:
        return _SHORT[type(value)](value)
    names = [field.name for field in fields(value)] if is_dataclass(value) else _struct_fields(value)
    inside = ", ".join(as_text(attrgetter(name)(value)) for name in names if name != "report")
    return f"{type(value).__name__}({inside})" if names else repr(value)


def _struct_fields(value: Any) -> list[str]:
    return [field.name for field in msgspec.structs.fields(value)] if isinstance(value, msgspec.Struct) else []


_SHORT: Mapping[type, Callable[[Any], str]] = {
    Offer: lambda offer: f"Offer({as_text(offer.party)})",
    TargetOffer: lambda offer: f"TargetOffer({as_text(offer.party)})",
    bytes: lambda value: value.hex(),
    Extract: lambda extract: f"{len(extract.numbers)} states, {extract.num_bytes} bytes",
    Subject: lambda subject: f"{subject.policy} of {len(subject.parts)} parts",
    Copies: lambda copies: f"{len(copies)} rows, {copies.num_bytes} bytes",
    PeerKey: lambda peer: f"{peer.address}#{peer.epoch}",
    Party: lambda party: f"{party.engine_id}.{party.rank}#{party.epoch}",
    Reference: lambda named: f"{named.engine_id}#{named.epoch}/{named.request_id}/{named.lease_id}",
}
