"""Which model a `--model` option means."""

from __future__ import annotations

from pathlib import Path

from kvferry.cli import console
from kvferry.cli.environment import cache_directory
from kvferry.errors import ConfigurationError
from kvferry.system import os_error_text

TINY = "tiny"


def resolve(model: str) -> tuple[str, str]:
    """The path or hub name to load and the name to serve it under; makes the tiny model when it is not there yet."""
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
        raise ConfigurationError(
            f"cannot load the model {model!r}",
            found="no such folder",
            expected="a folder with a causal language model and its tokenizer, or a name on the Hugging Face Hub",
            hint="omit --model to use the built-in tiny model",
        )
    if model != TINY and Path(model).is_dir():
        return model, Path(model).name
    if model != TINY:
        console.say(
            f"looking for {model} in the local cache and on the Hugging Face Hub; a first download takes a while"
        )
        return model, model
    from kvferry.embedded.model.tiny import ensure_tiny_model

    directory = cache_directory()
    try:
        return str(ensure_tiny_model(directory, console.say)), TINY
    except OSError as error:
        raise ConfigurationError(
            f"cannot make the tiny model in {directory}",
            found=os_error_text(error),
            hint="set KVFERRY_CACHE to a folder that can be written",
        ) from error
