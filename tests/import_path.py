"""Where processes of a test import from: a folder of the test's, and then whatever this process imports from, so that
they run the same kvferry."""

from __future__ import annotations

import os
from pathlib import Path


def import_path(folder: Path) -> str:
    """A value of PYTHONPATH."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
