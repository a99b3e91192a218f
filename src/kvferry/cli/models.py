"""Which model a `--model` option means."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.cli import console
from kvferry.cli.environment import cache_directory
from kvferry.embedded.model.trained import GEMMA
from kvferry.errors import ConfigurationError
from kvferry.system import os_error_text

TINY = "tiny"
MADE_HERE = (TINY, GEMMA)
"""Models that are made on this machine, in float32."""


def resolve(model: str) -> tuple[str, str]:
    """What to load, and the name to serve it under; makes the models that are made here. Raises ConfigurationError."""
    # A shell leaves `--model=~/folder` as it is.
    folder = os.path.expanduser(model)
    if model.startswith(("/", "./", "../", "~")) and not os.path.isdir(folder):
        raise ConfigurationError(
            f"cannot load the model {model!r}",
            found="no such folder",
            expected="a folder with a causal language model and its tokenizer, or a name on the Hugging Face Hub",
            hint="omit --model to use the built-in tiny model",
        )
    if model in MADE_HERE:
        return _made_here(model), model
    if os.path.isdir(folder):
        return folder, Path(folder).name
    console.say(f"looking for {model} in the local cache and on the Hugging Face Hub; a first download takes a while")
    return model, model


def _made_here(model: str) -> str:
    """The folder of a model that this machine makes once."""
    from kvferry.embedded.model.tiny import ensure_tiny_model
    from kvferry.embedded.model.trained import ensure_gemma

    directory = cache_directory()
    make = ensure_tiny_model if model == TINY else ensure_gemma
    try:
        return str(make(directory, console.say))
    except OSError as error:
        raise ConfigurationError(
            f"cannot make the model {model} in {directory}",
            found=os_error_text(error),
            hint="set KVFERRY_CACHE to a folder that can be written",
        ) from error
