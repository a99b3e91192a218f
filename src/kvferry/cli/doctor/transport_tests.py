"""What `kvferry doctor` tries: each transport to a process that it starts, and each to a running engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Direction
from kvferry.testing.transports.loopback import measured
from kvferry.transport.machine.facts import Place
from kvferry.transport.machine.finding import Finding, Severity
from kvferry.transport.registry import OPENERS
from kvferry.transport.selection.candidates import choose, is_worth_testing
from kvferry.transport.selection.diagnosis import diagnose, local_context
from kvferry.transport.selection.measurement import Measurement


@dataclass(frozen=True, slots=True)
class Trials:
    """What came of all transports to one peer, and what is wrong with them."""

    place: Place
    measurements: tuple[Measurement, ...]
    findings: tuple[Finding, ...]


def loopback(say: Callable[[str], None], skipped: Mapping[str, str]) -> Trials:
    """Read from and write to another process of this machine, over every transport but those that are `skipped`."""
    tried = [
        Measurement.failed(name, skipped[name]) if name in skipped else _loopback_over(name, say) for name in OPENERS
    ]
    findings = [finding for found in tried if found.name not in skipped for finding in _of_one(found)]
    return Trials(Place.SAME_HOST, tuple(tried), tuple(findings))


def _loopback_over(name: str, say: Callable[[str], None]) -> Measurement:
    say(f"trying {name} between two processes of this machine")
    return measured(name, OPENERS[name])


def _of_one(found: Measurement) -> Iterator[Finding]:
    """What is wrong with a transport that was asked for by name, so that tcp over TCP is no finding."""
    expected = "a successful copy"
    if not found.error:
        yield from diagnose(found, Direction.READ, Place.SAME_HOST, local_context(found.name))
        if found.writing.error:
            what = f"{found.name} cannot write, so it cannot be used with --transfer-direction push"
            hint = "use auto, the default, or pull"
            yield Finding(Severity.WARNING, what, found.writing.error, expected, hint)
    # A transport that is not installed is no fault; that is said once, elsewhere.
    elif "not installed" not in found.error:
        hint = "see the other findings, and docs/transports.md for what each transport needs"
        if found.name == "nixl":
            hint += "; UCX_LOG_LEVEL=info kvferry doctor shows UCX's own messages"
        yield Finding(Severity.WARNING, f"{found.name} does not work here", found.error, expected, hint)


def verdict(measurements: Iterable[Measurement]) -> str:
    """What `--transport auto` would take: it stops trying where nothing better can come."""
    tried: list[Measurement] = []
    # An agent, too, first tries the transports that copy once.
    for found in sorted(measurements, key=lambda each: not each.copies_once):
        if is_worth_testing(found.copies_once, tried):
            tried.append(found)
    try:
        return choose(tried).name
    except TransportError:
        return "nothing: no transport works"
