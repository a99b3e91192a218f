"""A tiny but real model, made on this machine: a Llama with random weights and a tokenizer trained on our own text.

Its answers mean nothing, yet every part is what a large model has: the same code computes its cache, and a wrong
byte in it changes the answer. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvferry.embedded.model.made_once import is_made, make_once

# The number is the recipe's: raise it when what is made changes, so that an old copy is not taken for the new one.
TINY_MODEL_NAME = "kvferry-tiny-1"


def ensure_tiny_model(directory: Path, progress: Callable[[str], None]) -> Path:
    """The folder of the tiny model inside `directory`; makes it when it is not there (a few seconds). `progress` gets a
    sentence when there is something to wait for. Raises OSError when the folder cannot be written."""
    target = directory / TINY_MODEL_NAME
    if not is_made(target):
        # It loads torch, which takes seconds and is not needed where the model is there.
        from kvferry.embedded.model.recipe import build

        progress(f"making a tiny model in {target} (once)")
        make_once(target, build)
        progress(f"the tiny model is ready in {target}")
    return target
