"""Defects that are put into the sessions on purpose: a simulation that finds none of them would prove nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.session.source import SourceSession
from kvferry.session.target import TargetSession

__all__ = ["NO_PLANT", "PLANTS", "Plant"]


@dataclass(frozen=True, slots=True)
class Plant:
    """A defect as sessions that have it, instead of the real ones."""

    name: str
    what: str
    source: type[SourceSession] = SourceSession
    target: type[TargetSession] = TargetSession


NO_PLANT = Plant("none", "the sessions as they are")

PLANTS: Mapping[str, Plant] = {plant.name: plant for plant in (NO_PLANT,)}
