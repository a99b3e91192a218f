"""What `kvferry doctor` tries: each transport to a process that it starts, and each to a running engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvferry.errors import FerryError, TransportError
from kvferry.plan.programs.copies import Direction
from kvferry.testing.transports.peer import PeerProcess
from kvferry.transport.machine.facts import Place
from kvferry.transport.machine.finding import Finding, Severity
from kvferry.transport.registry import OPENERS
from kvferry.transport.selection.candidates import TRANSPORTS, choose, is_worth_testing
from kvferry.transport.selection.diagnosis import diagnose
from kvferry.transport.selection.local_context import local_context
from kvferry.transport.selection.measurement import Measurement
from kvferry.transport.selection.probe import PROBE_BYTES
from kvferry.transport.selection.self_test import measure

SEED = 7


@dataclass(frozen=True, slots=True)
class Trials:
    """What came of all transports to one peer, and what is wrong with them."""

    place: Place
    measurements: tuple[Measurement, ...]
    findings: tuple[Finding, ...]


def loopback(say: Callable[[str], None], skipped: Mapping[str, str]) -> Trials:
    """Read from and write to another process of this machine, over every transport but those that are `skipped`."""
    measurements: list[Measurement] = []
    findings: list[Finding] = []
    for name in OPENERS:
        if name in skipped:
            measurements.append(Measurement(name, 0.0, 0.0, 0.0, skipped[name]))
            continue
        say(f"trying {name} between two processes of this machine")
        measurements.append(_loopback_over(name))
        findings += _of_one(measurements[-1], Place.SAME_HOST)
    return Trials(Place.SAME_HOST, tuple(measurements), tuple(findings))


def _loopback_over(name: str) -> Measurement:
    try:
        transport = OPENERS[name]("127.0.0.1")
    except FerryError as error:
        return Measurement(name, 0.0, 0.0, 0.0, str(error))
    try:
        with PeerProcess(name, PROBE_BYTES, SEED) as peer:
            transport.connect("peer", peer.descriptor)
            return measure(transport, "peer", peer.probe)
    except (FerryError, json.JSONDecodeError) as error:
        return Measurement(name, 0.0, 0.0, 0.0, f"the other process: {error}")
    finally:
        transport.close()


def _of_one(found: Measurement, place: Place) -> Iterator[Finding]:
    """Of a transport that was tried for itself: that tcp is tcp is no surprise then."""
    if found.error:
        # A transport that is not installed is no fault; that is said once, elsewhere.
        if "not installed" not in found.error:
            hint = "see the other findings, and docs/transports.md for what each transport needs"
            if found.name == "nixl":
                hint += "; UCX_LOG_LEVEL=info kvferry doctor shows UCX's own messages"
            yield Finding(Severity.WARNING, f"{found.name} does not work here", found.error, "a successful copy", hint)
        return
    yield from diagnose(found, Direction.READ, place, local_context(found.name))
    if found.writing.error:
        what = f"{found.name} cannot write, so it cannot be used with --transfer-direction push"
        yield Finding(
            Severity.WARNING, what, found.writing.error, "a successful copy", "use auto, the default, or pull"
        )


def verdict(measurements: Iterable[Measurement]) -> str:
    """What `--transport auto` would take: it stops trying where nothing better can come."""
    tried: list[Measurement] = []
    for name in TRANSPORTS:
        tried += [found for found in measurements if found.name == name and is_worth_testing(name, tried)]
    try:
        return choose(tried).name
    except TransportError:
        return "nothing: no transport works"
