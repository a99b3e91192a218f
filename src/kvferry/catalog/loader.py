"""The one file of the catalog that reads what users name: a config given by path, or one that we ship, by name."""

from __future__ import annotations

import codecs
import difflib
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

import msgspec

from kvferry.catalog.config.class_defaults import class_values
from kvferry.catalog.config.fields import BY_NUMBERS
from kvferry.catalog.model import of_config
from kvferry.catalog.records import Entry, Options
from kvferry.errors import ConfigurationError
from kvferry.system import os_error_text

_MAX_FILE_BYTES = 4 * 2**20
QUANTISED: Final = ("-fp4", "-nvfp4", "-fp8")
"""How names on the Hub end whose checkpoints are quantized."""

_FILES = resources.files("kvferry.catalog")

_HUB_NAMES: Final = msgspec.json.decode((_FILES / "hub_names.json").read_bytes(), type=dict[str, tuple[str, ...]])
"""Names on the Hugging Face Hub of the models that a shipped config describes, by its name."""

_SHIPPED_AS: Final = {name.lower(): shipped for shipped, names in _HUB_NAMES.items() for name in names}
"""The shipped name of each, by its name on the Hub in lower case: the Hub takes any case."""

_WITHOUT_OWNER: Final = {name.rpartition("/")[2]: shipped for name, shipped in _SHIPPED_AS.items()}
"""The same without who owns it, which few people type."""


def names() -> tuple[str, ...]:
    """The names of the models whose configs we ship."""
    return tuple(sorted(file.name.removesuffix(".json") for file in _shipped() if file.name.endswith(".json")))


def hub_names(name: str) -> tuple[str, ...]:
    """The names on the Hub of the models that a shipped name stands for."""
    return _HUB_NAMES.get(name, ())


def read(source: str | Path, options: Options) -> Entry:
    """The model of a config.json, of the folder that it lies in, of a name from `names()`, or of its name on the Hub.

    A shipped name comes first: write `./name` for a folder that is called like one. The owner of a name on the Hub may
    be left out where there is no such file. Raises ConfigurationError when there is no such file or name, when the file
    is no JSON object, or when its fields describe no known cache.
    """
    shipped = _SHIPPED_AS.get(source.lower(), source) if isinstance(source, str) else ""
    if isinstance(source, str) and shipped in names():
        return _of_shipped(source, shipped, options)
    path = Path(source)
    try:
        if not path.exists() and isinstance(source, str) and source.lower() in _WITHOUT_OWNER:
            return _of_shipped(source, _WITHOUT_OWNER[source.lower()], options)
        path, content = _content_of(path, str(source))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{source}: cannot be read", found=os_error_text(error), expected="a config.json"
        ) from error
    config = _decoded(str(path), content)
    return of_config(config, str(path), options, class_values(config))


def _content_of(path: Path, source: str) -> tuple[Path, bytes]:
    """The file that is meant, and its beginning. Raises ConfigurationError where there is none, and OSError."""
    if source and path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigurationError("the folder has no config.json", found=source, expected="the folder of a model")
    if not path.is_file():
        raise _unknown(source)
    with path.open("rb") as opened:
        return path, opened.read(_MAX_FILE_BYTES + 1)


def _of_shipped(source: str, name: str, options: Options) -> Entry:
    file = next(file for file in _shipped() if file.name == f"{name}.json")
    entry = of_config(_decoded(source, file.read_bytes()), source, options)
    # The shipped config is that of the model as it was trained.
    if options.cache_dtype == "auto" and source.lower().endswith(QUANTISED):
        note = "quantized checkpoints may have scales for a quantized cache: pass its dtype if the engine uses them"
        return replace(entry, notes=(*entry.notes, note))
    return entry


def _shipped() -> list[Traversable]:
    return list((_FILES / "configs").iterdir())


def _decoded(name: str, content: bytes) -> dict[str, object]:
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigurationError(f"{name}: too large for a config", expected=f"at most {_MAX_FILE_BYTES} bytes")
    try:
        # Some editors begin a file with this mark.
        return msgspec.json.decode(content.removeprefix(codecs.BOM_UTF8), type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ConfigurationError(f"{name}: is not a JSON object", found=str(error)[:200], hint=BY_NUMBERS) from error


def _unknown(source: str) -> ConfigurationError:
    close = _close_to(source.lower().rpartition("/")[2])
    *others, last = close or [""]
    hints = [f"did you mean {', '.join(others)}{' or ' * bool(others)}{last}?"] if close else []
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        hints.append(f"to plan for any model of the Hub: hf download {source} config.json, and pass the path it prints")
    return ConfigurationError(
        f"unknown model: {source}",
        found="neither a file nor a folder, nor a known name",
        expected="a config.json, its folder, or a name from kvferry plan --models",
        hint="; ".join(hints) or "pass the path of a config.json",
    )


def _close_to(name: str) -> list[str]:
    """Up to three names like it, each of another config."""
    shipped = {**_WITHOUT_OWNER, **{known: known for known in names()}}
    chosen: dict[str, str] = {}
    for known in difflib.get_close_matches(name, shipped, n=len(shipped), cutoff=0.6):
        chosen.setdefault(shipped[known], known)
    return list(chosen.values())[:3]
