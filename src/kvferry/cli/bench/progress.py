"""Progress of long work: bars on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn

from kvferry.cli import console

LINE_S = 10.0


class BenchProgress(Progress):
    """A display of progress, with `columns` after the usual ones."""

    def __init__(self, *columns: ProgressColumn) -> None:
        usual = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*usual, *columns, console=console.stderr, disable=not sys.stderr.isatty())
        self._line_at = time.monotonic() + LINE_S

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Update a task as rich does. Where stderr is no terminal, print a line at most every `LINE_S` seconds."""
        super().update(task_id, **changes)
        if self.disable and time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + LINE_S
            task = self.tasks[task_id]
            console.say(f"{task.description}: {task.completed:.0f} of {task.total or 0:.0f}")
