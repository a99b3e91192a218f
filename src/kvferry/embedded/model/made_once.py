"""Folders of models that are made on this machine, once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def is_made(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def make_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Let `build` write a model into a folder that then takes this name. Raises OSError when it cannot be written.

    Safe when several processes do it at once: each builds its own copy, the first to finish is kept.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(draft)
        _publish(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _publish(draft: Path, folder: Path) -> None:
    """A rename either shows the whole folder or fails because somebody else's is there already."""
    draft.chmod(0o755)
    try:
        os.rename(draft, folder)
    except OSError:
        if not is_made(folder):
            raise
