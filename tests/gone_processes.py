"""That processes have ended, whoever their parent is."""

import os
import select

DEADLINE_S = 60.0


def assert_gone(*pids: int) -> None:
    """Wait until each process has ended: one that was killed is there for a moment longer, as a zombie for ever."""
    for pid in pids:
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([process], [], [], DEADLINE_S)[0], f"process {pid} is still there"
        finally:
            os.close(process)
