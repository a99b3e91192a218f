"""Playbooks: a session test is a list of events and the commands that must follow each.

play(session, [
    (0.0, Tick(), []),
    (1.0, FrameArrived("peer", hello), [Reply("peer", welcome)]),
    (1.1, FrameArrived("peer", claim), [Reply]),        # a type stands for any value of it
])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Step = tuple[float, Any, Sequence[Any]]
"""(time, event, expected commands); an expected command is a value, or a type that stands for any value of it."""


class Session(Protocol):
    """Anything that is driven by events and answers with commands."""

    def handle(self, event: Any, now: float) -> list[Any]:
        """The commands that follow from an event."""
        ...


def play(session: Session, steps: Sequence[Step]) -> list[Any]:
    """Play all steps; returns the commands of the last one. Raises AssertionError at the first that differs."""
    commands: list[Any] = []
    for number, (now, event, expected) in enumerate(steps):
        commands = session.handle(event, now)
        if not _match(commands, expected):
            shown = "\n  ".join(map(repr, commands)) or "nothing"
            wanted = "\n  ".join(map(repr, expected)) or "nothing"
            raise AssertionError(f"step {number}, {event!r}:\n got\n  {shown}\n instead of\n  {wanted}")
    return commands


def _match(commands: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(commands) == len(expected) and all(
        isinstance(command, wanted) if isinstance(wanted, type) else command == wanted
        for command, wanted in zip(commands, expected, strict=True)
    )
