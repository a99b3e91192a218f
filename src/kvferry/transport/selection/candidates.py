"""Which transports to try with a peer, and which one to use: pure functions of names and measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.errors import ConfigurationError, TransportError
from kvferry.plan.programs.copies import Direction
from kvferry.transport.selection.measurement import UNMEASURED, Measurement

AUTO = "auto"
TCP_NEEDS = "start both engines with --transport tcp, and with --buffer-device cpu where caches lie on GPUs"
ENDANGERED = "over UCX's sockets a reader that dies can end its source"


@dataclass(frozen=True, slots=True)
class Choice:
    """The transport to use, and the reason in words."""

    name: str
    reason: str


def candidates(requested: str, offered: Mapping[str, str], available: Mapping[str, str]) -> tuple[str, ...]:
    """The transports to try, in the order of `available`.

    `requested` is `auto` or a name. `offered` (the peer) and `available` (this process) map names to the empty string
    or to the reason why that side does not have the transport; a missing name is one that the side does not know.
    Raises ConfigurationError when nothing is left, saying which side lacks what and why.
    """
    wanted = _wanted(requested, offered, available)
    usable = tuple(name for name in wanted if not _obstacle(name, offered, available))
    if not usable:
        obstacles = (f"{name}: {_obstacle(name, offered, available)}" for name in wanted)
        what = "no transport works" if requested == AUTO else f"transport {requested!r} does not work"
        raise ConfigurationError(
            f"{what} between these two engines",
            found="; ".join(obstacles),
            expected="a transport that both sides have",
            hint=_available(offered, available),
        )
    return usable


def check_own(requested: str, available: Mapping[str, str]) -> None:
    """Raises ConfigurationError for an unknown name, and when this process can use nothing of what is requested. The
    reasons of the transports, each told once, say what to do. The arguments are as in `candidates`."""
    names_of: dict[str, list[str]] = {}
    for name in _wanted(requested, available, available):
        names_of.setdefault(available[name], []).append(name)
    if "" not in names_of:
        raise ConfigurationError(
            "no transport works here" if requested == AUTO else f"transport {requested!r} does not work here",
            found="; ".join(f"{', '.join(names)}: {reason}" for reason, names in names_of.items()),
        )


def is_worth_testing(
    copies_once: bool, measurements: Sequence[Measurement], direction: Direction = Direction.READ
) -> bool:
    """Whether a transport can be better in a direction than those that were tested before it; `copies_once` is as in
    `Transport`.

    Where a transport with one copy works, the others copy more often, and their test takes long: the peer must answer,
    and it may be busy computing.
    """
    return copies_once or not any(each.copies_once and not each.why_not(direction) for each in measurements)


def choose(
    measurements: Sequence[Measurement], untested: Sequence[str] = (), direction: Direction = Direction.READ
) -> Choice:
    """The transport that passed its self-test and is fastest in a direction, over long and short rows together. One
    that endangers the source is taken only where no other works.

    `untested` are those that were not worth it. Raises TransportError with all errors when none passed.
    """
    passed = [measurement for measurement in measurements if not measurement.why_not(direction)]
    if not passed:
        raise TransportError(
            "no transport passed its self-test",
            found="; ".join(_describe(measurement) for measurement in measurements) or "nothing was tested",
            hint=TCP_NEEDS,
        )
    safe = [measurement for measurement in passed if not measurement.endangers_source] or passed
    best = min(safe, key=lambda measurement: measurement.likely_rates(direction).seconds_per_gigabyte)
    rest = [f"{', '.join(untested)} not tested: the same host needs only one copy"] if untested else []
    rest += [f"{each.name} not taken: {ENDANGERED}" for each in passed if each not in safe]
    return Choice(best.name, "; ".join([*(_describe(measurement) for measurement in measurements), *rest]))


def _wanted(requested: str, offered: Mapping[str, str], available: Mapping[str, str]) -> tuple[str, ...]:
    if requested != AUTO and requested not in available:
        raise ConfigurationError(
            f"unknown transport {requested!r}",
            found=requested,
            expected=f"{AUTO} or one of {', '.join(available)}",
            hint=_available(offered, available),
        )
    return tuple(available) if requested == AUTO else (requested,)


def _obstacle(name: str, offered: Mapping[str, str], available: Mapping[str, str]) -> str:
    """Why a transport cannot be used; empty when it can be."""
    here, there = available.get(name, "not known"), offered.get(name, "not known")
    found = [f"{reason} ({side})" for side, reason in (("here", here), ("at the peer", there)) if reason]
    return ", ".join(found)


def _available(offered: Mapping[str, str], available: Mapping[str, str]) -> str:
    usable = [name for name in available if not _obstacle(name, offered, available)]
    return (
        f"both sides have {', '.join(usable)}; use one of them or {AUTO}" if usable else "see what each of them lacks"
    )


def _describe(measurement: Measurement) -> str:
    if measurement.error:
        return f"{measurement.name} failed ({measurement.error})"
    # Only nixl has several, and does not say which one it takes.
    carriers = [name for name in measurement.carriers if name != measurement.name]
    name = f"{measurement.name} over {' and '.join(carriers)}" if carriers else measurement.name
    written = measurement.writing
    if written == UNMEASURED:
        return f"{name} {measurement.rates(Direction.READ)}"
    rates = f"writing {written.gigabytes_per_s:.1f} and {written.row_gigabytes_per_s:.1f}"
    writes = f"writing failed ({written.error})" if written.error else rates
    return f"{name} {measurement.rates(Direction.READ)}, {writes}"
