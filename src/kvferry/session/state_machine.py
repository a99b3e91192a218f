"""A state that only a table may change, and that remembers how it got where it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.errors import IllegalEventError

TransitionTable = Mapping[tuple[StrEnum, str], StrEnum]
"""(state, event name) → next state. What is not in the table cannot happen."""


@dataclass(slots=True)
class StateMachine:
    """One walk through a table. `name` says whose it is, in errors."""

    name: str
    table: TransitionTable
    state: StrEnum
    history: list[str] = field(default_factory=list)

    def allows(self, event: str) -> bool:
        """Whether the table has an entry for this event in the present state."""
        return (self.state, event) in self.table

    def move(self, event: str) -> None:
        """Follow the table. Raises IllegalEventError with the whole history when the event is not allowed."""
        if not self.allows(event):
            walked = " ".join([*self.history, self.state])
            raise IllegalEventError(f"{self.name}: {event} in state {self.state}", found=f"history: {walked}")
        self.history += [self.state, f"-{event}->"]
        self.state = self.table[self.state, event]
