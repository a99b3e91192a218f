"""Failures of one request's legs, until it shows whether they follow the request or stay with an instance: pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.router.policy import Instance, Role

__all__ = ["Suspect", "Suspects"]


@dataclass(frozen=True, slots=True)
class Suspect:
    """An instance whose leg failed. `blame` says so to whoever counts; `is_certain` where that needs no other's word:
    an answer with an error may be about the request, a broken connection hardly is."""

    instance: Instance
    blame: Callable[[], None]
    is_certain: bool = False


class Suspects:
    """Of one request. An instance that serves it convicts those that failed before; one that fails as well acquits
    them all."""

    def __init__(self) -> None:
        self._open: dict[Role, list[Suspect]] = {}
        self._acquitted: set[Role] = set()

    def add(self, role: Role, suspect: Suspect) -> None:
        """A leg has failed."""
        others = self._open.setdefault(role, [])
        if any(other.instance != suspect.instance for other in others):
            self._acquitted.add(role)
            others.clear()
        if role not in self._acquitted:
            others.append(suspect)

    def served(self, role: Role) -> None:
        """An instance of this role has done what the others did not."""
        for suspect in self._open.pop(role, []):
            suspect.blame()

    def end(self) -> None:
        """The request is over, and nobody else was asked."""
        for suspect in [one for suspects in self._open.values() for one in suspects if one.is_certain]:
            suspect.blame()
        self._open.clear()
