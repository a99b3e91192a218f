"""A tiny but real model, made on this machine: a Llama with random weights and a tokenizer trained on our own text.

Its answers mean nothing, yet every part is what a large model has: the same code computes its cache, and a wrong
byte in it changes the answer. Nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

# The number is the recipe's: raise it when what is made changes, so that an old copy is not taken for the new one.
TINY_MODEL_NAME = "kvferry-tiny-1"


def ensure_tiny_model(directory: Path, progress: Callable[[str], None]) -> Path:
    """The folder of the tiny model inside `directory`; makes it when it is not there (a few seconds).

    Safe when several processes do it at once: each builds its own copy, the first to finish is kept. `progress`
    gets a sentence when there is something to wait for. Raises OSError when the folder cannot be written.
    """
    target = directory / TINY_MODEL_NAME
    if (target / "config.json").is_file():
        return target
    # It loads torch, which takes seconds and is not needed where the model is there.
    from kvferry.embedded.model.recipe import build

    directory.mkdir(parents=True, exist_ok=True)
    progress(f"making a tiny model in {target} (once)")
    draft = Path(tempfile.mkdtemp(prefix=".tiny-", dir=directory))
    try:
        build(draft)
        _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    progress(f"the tiny model is ready in {target}")
    return target


def _publish(draft: Path, target: Path) -> None:
    """A rename either shows the whole folder or fails because somebody else's is there already."""
    draft.chmod(0o755)
    try:
        os.rename(draft, target)
    except OSError:
        if not (target / "config.json").is_file():
            raise
