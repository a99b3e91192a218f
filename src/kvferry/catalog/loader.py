"""The one file of the catalog that reads what users name: a config given by path, or one that we ship, by name."""

from __future__ import annotations

import difflib
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

# Names on the Hugging Face Hub of the models whose configs are shipped.
_HUB_NAMES: Final = {
    "bamba-9b": ("ibm-ai-platform/Bamba-9B-v1", "ibm-fms/Bamba-9B"),
    "deepseek-v2-lite": ("deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2-Lite-Chat"),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-R1"),
    "deepseek-v3.2": ("deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3.2-Exp"),
    "deepseek-v4-flash": ("deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Flash-Base"),
    "falcon-h1-7b": ("tiiuae/Falcon-H1-7B-Base", "tiiuae/Falcon-H1-7B-Instruct"),
    "gemma-3-27b": ("google/gemma-3-27b-it", "google/gemma-3-27b-pt"),
    "gpt-oss-120b": ("openai/gpt-oss-120b",),
    "jamba-1.5-mini": ("ai21labs/AI21-Jamba-1.5-Mini", "ai21labs/AI21-Jamba-Mini-1.5"),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
    "llama-3.3-70b": ("meta-llama/Llama-3.3-70B-Instruct",),
    "llama-4-scout": ("meta-llama/Llama-4-Scout-17B-16E", "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    "mistral-7b": ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-Instruct-v0.1"),
    "mistral-small-3.2-24b": ("mistralai/Mistral-Small-3.2-24B-Instruct-2506",),
    "nemotron-h-8b": ("nvidia/Nemotron-H-8B-Base-8K",),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-235B-A22B-Instruct-2507"),
    "qwen3-32b": ("Qwen/Qwen3-32B",),
    "qwen3-8b": ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base"),
    "qwen3-next-80b-a3b": ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Thinking"),
}

_SHIPPED_AS: Final = {name.lower(): shipped for shipped, names in _HUB_NAMES.items() for name in names}
"""The shipped name of each, by its name on the Hub in lower case: the Hub takes any case."""


def names() -> tuple[str, ...]:
    """The names of the models whose configs we ship."""
    return tuple(sorted(file.name.removesuffix(".json") for file in _shipped() if file.name.endswith(".json")))


def read(source: str | Path, options: Options) -> Entry:
    """The model of a config.json, of the folder that it lies in, of a name from `names()`, or of its name on the Hub.

    A shipped name comes first: write `./name` for a folder that is called like one. Raises ConfigurationError when
    there is no such file or name, when the file is no JSON object, or when its fields describe no known cache.
    """
    shipped = _SHIPPED_AS.get(source.lower(), source) if isinstance(source, str) else ""
    if isinstance(source, str) and shipped in names():
        file = next(file for file in _shipped() if file.name == f"{shipped}.json")
        return of_config(_decoded(source, file.read_bytes()), source, options)
    path = Path(source)
    try:
        if source and path.is_dir():
            path = path / "config.json"
            if not path.is_file():
                raise ConfigurationError(
                    "the folder has no config.json", found=str(source), expected="the folder of a model"
                )
        elif not path.is_file():
            raise _unknown(str(source))
        with path.open("rb") as opened:
            content = opened.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{source}: cannot be read", found=os_error_text(error), expected="a config.json"
        ) from error
    config = _decoded(str(path), content)
    return of_config(config, str(path), options, class_values(config))


def _shipped() -> list[Traversable]:
    return list((resources.files("kvferry.catalog") / "configs").iterdir())


def _decoded(name: str, content: bytes) -> dict[str, object]:
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigurationError(f"{name}: too large for a config", expected=f"at most {_MAX_FILE_BYTES} bytes")
    try:
        return msgspec.json.decode(content, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ConfigurationError(f"{name}: is not a JSON object", found=str(error)[:200], hint=BY_NUMBERS) from error


def _unknown(source: str) -> ConfigurationError:
    known = names()
    close = difflib.get_close_matches(source.lower().rpartition("/")[2], known, n=3, cutoff=0.4)
    hints = ["did you mean " + " or ".join(close) + "?"] if close else []
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        hints.append(f"to plan for any model of the Hub: hf download {source} config.json, and pass the path it prints")
    return ConfigurationError(
        f"unknown model: {source}",
        found="neither a file nor a folder, nor a known name",
        expected="a config.json, a folder with one, or one of " + ", ".join(known),
        hint="; ".join(hints) or "pass the path of a config.json",
    )
