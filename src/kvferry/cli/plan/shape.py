"""What `kvferry plan` reads from words: the shape of an engine, the speed of a link."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from kvferry.errors import ConfigurationError
from kvferry.plan.description.describe import EngineShape

NUMBERS = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "dp": "replicas",
    "cp": "context_parallel",
    "dcp": "decode_context_parallel",
    "run": "run_tokens",
    "block": "block_tokens",
    "kernel": "kernel_blocks",
}
CONTEXT_PARALLEL = ("context_parallel", "decode_context_parallel")
WORDS = {"format": "format", "outer": "outer_axis"}
EXPECTED = (
    "tp=N, pp=N, dp=N, cp=N or dcp=N (context parallelism) with run=N, block=N, kernel=N, format=NAME, outer=AXIS and "
    "pool=shared or separate, each at most once and every N at least 1"
)
BLOCK_TOKENS = 16
UNITS = {"B": 1.0, "bit": 1 / 8, "b": 1 / 8}
SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
LINK = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?|)(B|bit|b)(?:/s|ps)")


def shape_of(words: str, layout: str, block_tokens: int = BLOCK_TOKENS) -> tuple[EngineShape, int]:
    """An engine's shape from `tp=4,block=16`; `layout` and `block_tokens` are for words that name neither. And how many
    replicas there are (`dp=`): they are engines of their own, and a plan is for one of them.

    Raises ConfigurationError for words that are unknown, given twice, without a number, or without effect. The number
    of blocks stays 1.
    """
    shape = EngineShape(1, 1, block_tokens=block_tokens, num_blocks=1, format=layout)
    changes: dict[str, Any] = {}
    for word in words.split(","):
        key, _, value = (part.strip() for part in word.partition("="))
        name, found = _change(key, value)
        if not name or name in changes:
            raise ConfigurationError("invalid shape of an engine", found=repr(word), expected=EXPECTED)
        changes[name] = found
    if "run_tokens" in changes and max(changes.get(name, 1) for name in CONTEXT_PARALLEL) == 1:
        what, expected = "run= has no effect without context parallelism", "cp=N or dcp=N beside it"
        raise ConfigurationError(what, found=repr(words), expected=expected)
    replicas = changes.pop("replicas", 1)
    return replace(shape, **changes), replicas


def _change(key: str, value: str) -> tuple[str, int | str | bool]:
    """The field of a shape and its value; no name when there is none."""
    if key in NUMBERS and value.isdecimal() and len(value) < 10 and int(value):
        return NUMBERS[key], int(value)
    if key in WORDS and value:
        return WORDS[key], value
    if key == "pool" and value in ("shared", "separate"):
        return "shared_pool", value == "shared"
    return "", 0


def link_of(words: str) -> float:
    """Bytes per second from `50GB/s`, `400Gbit/s`, `25GiB/s`, `200Gbps`. Raises ConfigurationError for other words."""
    match = LINK.fullmatch(words.strip())
    rate = float(match[1]) * SCALES[match[2]] * UNITS[match[3]] if match else 0.0
    if rate <= 0:
        raise ConfigurationError("invalid --link", found=repr(words), expected="such as 50GB/s or 400Gbit/s")
    return rate
