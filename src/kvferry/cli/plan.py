"""`kvferry plan`: what moves where between two topologies, without any hardware."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.cli import console
from kvferry.errors import ConfigurationError
from kvferry.plan.copies import Copies
from kvferry.plan.describe import Attention, EngineShape, describe
from kvferry.plan.layout import TokenRange
from kvferry.plan.program import bind
from kvferry.plan.request import copies_for
from kvferry.plan.route import Leg, route

__all__ = ["PlanOptions", "attention", "attention_of", "plan"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
SHAPE = EngineShape(tensor_parallel=1, pipeline_parallel=1, block_tokens=16, num_blocks=1, format="token-major")
MIN_WIDTH = 110
KEYS = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "block": "block_tokens", "format": "format"}


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """A model, two engine shapes in words (`tp=4,block=16`), and a prompt length in tokens."""

    attention: Attention
    prefill: str
    decode: str
    tokens: int
    scattered: bool
    as_json: bool


def plan(options: PlanOptions) -> None:
    """Compute and print. Raises ConfigurationError or the planner's own errors."""
    facts = _facts(options)
    if options.as_json:
        console.data(facts)
    else:
        wide = Console()
        # Numbers that are cut are worse than lines that wrap.
        Console(width=max(wide.width, MIN_WIDTH)).print(_table(options, facts))


def attention(num_layers: int, num_heads: int, head_dim: int, dtype: str) -> Attention:
    """A model by its numbers. Raises ConfigurationError for an unknown dtype."""
    if dtype not in ITEM_BYTES:
        raise ConfigurationError("unknown dtype", found=dtype, expected=", ".join(ITEM_BYTES))
    return Attention(num_layers, num_heads, head_dim, dtype, ITEM_BYTES[dtype])


def attention_of(path: Path) -> Attention:
    """A model by its Hugging Face `config.json` (full attention). Raises ConfigurationError when that is not there."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        num_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        return attention(int(config["num_hidden_layers"]), int(num_heads), int(head_dim), str(dtype))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigurationError(
            "cannot read the model's configuration",
            found=f"{file}: {error!r}",
            expected="a config.json of a model with full attention",
            hint="or give --layers, --heads, --head-dim and --dtype",
        ) from error


def _shape(words: str, num_tokens: int) -> EngineShape:
    shape, seen = SHAPE, set[str]()
    for word in words.split(","):
        key, _, value = (part.strip() for part in word.partition("="))
        if key not in KEYS or key in seen or not value or (key != "format" and not value.isdecimal()):
            expected = "tp=N, pp=N, block=N and format=NAME, each at most once"
            raise ConfigurationError("cannot read an engine's shape", found=repr(word), expected=expected)
        seen.add(key)
        change: dict[str, Any] = {KEYS[key]: value if key == "format" else int(value)}
        shape = replace(shape, **change)
    return replace(shape, num_blocks=2 * max(1, -(-num_tokens // max(1, shape.block_tokens))))


def _facts(options: PlanOptions) -> dict[str, Any]:
    source, target = (_shape(words, options.tokens) for words in (options.prefill, options.decode))
    sources = describe(options.attention, source, first_address=1 << 50)
    targets = describe(options.attention, target, first_address=1 << 51)
    found = route(sources, targets)
    source_tables, target_tables = _table_of(source, options), _table_of(target, options)
    tokens = TokenRange(0, options.tokens)
    pairs = []
    for left, right in found.pairs():
        legs = found.between(left, right)
        program = bind(legs, sources[left], targets[right])
        copies = copies_for(program, source_tables, target_tables, tokens)
        pairs.append(_pair(left, right, legs, copies))
    return {
        "bytes_per_token": options.attention.bytes_per_token,
        "tokens": options.tokens,
        "bytes": sum(pair["bytes"] for pair in pairs),
        "rows_before_merge": sum(pair["rows_before_merge"] for pair in pairs),
        "rows": sum(pair["rows"] for pair in pairs),
        "pairs": pairs,
    }


def _table_of(shape: EngineShape, options: PlanOptions) -> list[list[int]]:
    """Block ids of the request: adjacent, or at random (the same ones every time) as in a busy pool."""
    num_blocks = -(-options.tokens // shape.block_tokens)
    ids = list(range(shape.num_blocks))
    if options.scattered:
        random.Random(0).shuffle(ids)
    return [ids[:num_blocks]]


def _pair(source_rank: int, target_rank: int, legs: tuple[Leg, ...], copies: Copies) -> dict[str, Any]:
    return {
        "source_rank": source_rank,
        "target_rank": target_rank,
        "states": len({leg.state for leg in legs}),
        "heads": sorted({str(leg.box[0]) for leg in legs}),
        "bytes": copies.num_bytes,
        "rows_before_merge": copies.pieces,
        "rows": len(copies),
        "strategy": "direct",
    }


def _table(options: PlanOptions, facts: dict[str, Any]) -> Table:
    title = f"{options.tokens:,} tokens, {facts['bytes_per_token']:,} bytes each: {options.prefill} → {options.decode}"
    table = Table(title=title, title_justify="left", show_footer=True)
    for name, footer in (
        ("from", "all"),
        ("to", ""),
        ("states", ""),
        ("heads", ""),
        ("MiB", f"{facts['bytes'] / 2**20:,.1f}"),
        ("unmerged rows", f"{facts['rows_before_merge']:,}"),
        ("rows", f"{facts['rows']:,}"),
        ("bytes a row", f"{facts['bytes'] // max(1, facts['rows']):,}"),
        ("strategy", ""),
    ):
        table.add_column(name, footer=footer, justify="right")
    for pair in facts["pairs"]:
        table.add_row(
            str(pair["source_rank"]),
            str(pair["target_rank"]),
            str(pair["states"]),
            " ".join(pair["heads"]),
            f"{pair['bytes'] / 2**20:,.1f}",
            f"{pair['rows_before_merge']:,}",
            f"{pair['rows']:,}",
            f"{pair['bytes'] // max(1, pair['rows']):,}",
            pair["strategy"],
        )
    return table
