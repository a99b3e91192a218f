"""Which transports move bytes between the host memory of two processes: what engines use for staging memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from kvferry.errors import ConfigurationError
from kvferry.plan.programs.copies import Direction
from kvferry.qualify.outcome import Figure, Outcome, failed, passed
from kvferry.testing.transports.loopback import measured
from kvferry.transport.base import Transport
from kvferry.transport.machine.facts import Place
from kvferry.transport.memory_kind import HOST
from kvferry.transport.registry import OPENERS
from kvferry.transport.selection.measurement import Measurement
from kvferry.transport.ucx.environment import prepare

NAME: Final = "transports in host memory"
WRONG: Final = "bytes are wrong"


def run(kind: str) -> Outcome:
    """Beside an engine on this kind of device."""
    openers = dict(OPENERS)
    try:
        prepare(kind, HOST, Place.SAME_HOST)
    except ConfigurationError as error:
        # Settings of UCX are no reason to leave the other transports untried.
        openers["nixl"] = partial(_refused, error)
    return check(openers)


def _refused(error: ConfigurationError, _host: str) -> Transport:
    raise error


def check(openers: Mapping[str, Callable[[str], Transport]]) -> Outcome:
    """The self-test of each, as engines do it. One that cannot be used is no failure while another can."""
    found = [measured(name, opener) for name, opener in openers.items()]
    working = [each for each in found if not each.error]
    unusable = [f"{each.name} does not work: {each.error}" for each in found if each.error]
    if not working:
        return failed(NAME, "; ".join(unusable))
    if wrong := [text for text in unusable if WRONG in text]:
        return failed(NAME, "; ".join(wrong))
    figures = tuple(_figure(each, direction) for each in working for direction in Direction)
    return passed(NAME, "; ".join([f"{len(working)} of {len(found)} move every byte", *unusable]), figures)


def _figure(found: Measurement, direction: Direction) -> Figure:
    rate = found.likely_rates(direction).row_gigabytes_per_s
    return Figure(f"{found.name}, {direction.name.lower()}, 4 KiB rows", rate)
