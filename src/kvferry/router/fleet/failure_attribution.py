"""Failures of one request's legs, until it shows whether they follow the request or stay with an instance: pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.router.policy.records import Instance, Role


@dataclass(frozen=True, slots=True)
class UnattributedFailure:
    """An instance whose leg failed. `blame` says so to whoever counts, or `acquit` that it tells nothing; `is_certain`
    where that needs no other's word: an answer with an error, or one that takes too long, may be about the request, a
    broken connection hardly is."""

    instance: Instance
    blame: Callable[[], None]
    acquit: Callable[[], None]
    is_certain: bool = False


class FailureAttribution:
    """Of one request. An instance that serves it convicts those that failed before; one that fails as well acquits
    them all."""

    def __init__(self) -> None:
        self._open: dict[Role, list[UnattributedFailure]] = {}
        self._acquitted: set[Role] = set()

    def add(self, role: Role, suspect: UnattributedFailure) -> None:
        """A leg has failed."""
        others = self._open.setdefault(role, [])
        if any(other.instance != suspect.instance for other in others):
            self._acquitted.add(role)
        others.append(suspect)
        if role in self._acquitted:
            for other in others:
                other.acquit()
            others.clear()

    def served(self, role: Role) -> None:
        """An instance of this role has done what the others did not."""
        for suspect in self._open.pop(role, []):
            suspect.blame()

    def end(self, role: Role) -> None:
        """No other instance of this role will be asked."""
        for suspect in self._open.pop(role, []):
            (suspect.blame if suspect.is_certain else suspect.acquit)()
