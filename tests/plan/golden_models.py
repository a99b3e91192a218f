"""What the planner decides for the shipped models, as files that a person can check.

`golden/<model>.json` has some topologies of a model: what is asked (`name` to `draft_layers`), and then what each cache
group moves, what each pair of ranks moves, and some rows of one pair. To add a topology, write what is asked and let
`python tests/plan/golden_models.py --write` do the rest.

Requests have as many blocks as they need, in random order, the same ones every time. Offsets are relative to the start
of a region; regions are numbered per rank, and lie back to back. A digest is that of all rows of a pair: their five
columns as in `sample`, sorted.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.catalog import Options, read
from kvferry.errors import LayoutError
from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import Layout
from kvferry.plan.description.model import CacheModel
from kvferry.plan.description.tokens import TokenRange, TokenShare
from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.program import bind
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import Leg, Route, route

FOLDER = Path(__file__).parent / "golden"
WIDTH = 118
SOURCE, TARGET = 1 << 50, 1 << 51
NUM_SAMPLE_ROWS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked: a topology, and the tokens that a request wants; the target has those before."""

    name: str
    source: EngineShape
    target: EngineShape
    tokens: TokenRange
    cache_dtype: str
    draft_layers: bool


@dataclass(frozen=True, slots=True)
class Engine:
    """One side: the layouts of its ranks, and the request's block tables, the same ones on every rank."""

    layouts: tuple[Layout, ...]
    tables: list[list[int]]


@dataclass(frozen=True)
class Plan:
    """A topology of a model and all that is planned for it; `copies` by source and target rank."""

    model: CacheModel
    source: Engine
    target: Engine
    tokens: TokenRange
    route: Route
    copies: dict[tuple[int, int], Copies]


def planned(model: CacheModel, case: Case) -> Plan:
    """The plan of one topology, with just enough blocks."""
    dice = random.Random(0)
    source = _engine(model, case.source, case.tokens.last, (SOURCE, dice))
    target = _engine(model, case.target, case.tokens.last, (TARGET, dice))
    found = route(source.layouts, target.layouts)
    copies = {}
    for left, right in found.pairs():
        program = bind(found.between(left, right), source.layouts[left], target.layouts[right])
        copies[left, right] = copies_for(program, source.tables, target.tables, [case.tokens] * len(model.groups()))
    return Plan(model, source, target, case.tokens, found, copies)


@lru_cache(maxsize=1)
def plan_of(name: str, case: Case) -> Plan:
    """The plan of one topology of a shipped model."""
    return planned(model_of(name, case), case)


def model_of(name: str, case: Case) -> CacheModel:
    return read(name, Options(case.cache_dtype, case.draft_layers)).cache


def _engine(model: CacheModel, shape: EngineShape, last: int, place: tuple[int, random.Random]) -> Engine:
    address, dice = place
    needed = _num_needed(model, shape, last)
    shape = replace(shape, num_blocks=sum(needed) if shape.shared_pool else max(needed))
    ids = list(range(shape.num_blocks))
    dice.shuffle(ids)
    tables = []
    for num_blocks in needed:
        tables.append(ids[:num_blocks])
        if shape.shared_pool:
            ids = ids[num_blocks:]
        else:
            dice.shuffle(ids)
    return Engine(describe(model, shape, address), tables)


def _num_needed(model: CacheModel, shape: EngineShape, last: int) -> list[int]:
    """Blocks of each cache group: one for states of fixed size; for tokens, what the first share needs, the largest."""
    num_shares = shape.context_parallel * shape.decode_context_parallel
    run = shape.run_tokens if num_shares > 1 else 1
    own = last // (num_shares * run) * run + min(last % (num_shares * run), run)
    first = {layer.group: layer.kept[0].state for layer in reversed(model.layers)}
    return [-(-own // shape.block_tokens) if first[name].per_token else 1 for name in model.groups()]


def filed(name: str) -> dict[str, Any]:
    """The file of a model."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def case_of(asked: dict[str, Any]) -> Case:
    """What a file asks in one of its topologies."""
    return Case(
        asked["name"],
        _shape(asked["source"]),
        _shape(asked["target"]),
        TokenRange(*asked["tokens"]),
        asked.get("cache_dtype", "auto"),
        asked.get("draft_layers", False),
    )


def _shape(words: dict[str, Any]) -> EngineShape:
    """An engine of one stage where the file does not say; the number of blocks is yet to be found."""
    return EngineShape(**({"pipeline_parallel": 1, "num_blocks": 1} | words))


def golden(name: str) -> dict[str, Any]:
    """The file of a model as the planner would have it now."""
    asked = filed(name)
    facts = {"model": name, "topologies": [_topology(name, each) for each in asked["topologies"]]}
    refused = [{"engine": each["engine"], "error": _refusal(name, each["engine"])} for each in asked.get("refused", [])]
    return facts | ({"refused": refused} if refused else {})


def _topology(name: str, asked: dict[str, Any]) -> dict[str, Any]:
    plan = plan_of(name, case_of(asked))
    kept = ("name", "source", "target", "tokens", "cache_dtype", "draft_layers")
    return {key: asked[key] for key in kept if key in asked} | {
        "bytes": sum(copies.num_bytes for copies in plan.copies.values()),
        "groups": [_group(plan, group) for group in plan.model.groups()],
        "pairs": _pairs(plan),
        "sample": _sample(plan, list(plan.copies)[min(1, len(plan.copies) - 1)]),
    }


def _refusal(name: str, engine: dict[str, Any]) -> str:
    try:
        describe(read(name, Options("auto", draft_layers=False)).cache, _shape(engine), SOURCE)
    except LayoutError as error:
        return f"{type(error).__name__}: {error.found}"
    return "not refused"


def _group(plan: Plan, group: str) -> dict[str, Any]:
    layers = [layer for layer in plan.model.layers if layer.group == group]
    kept = [kept for layer in layers for kept in layer.kept]
    num_bytes, words = sum(one.num_bytes for one in kept), runs(sorted({layer.layer for layer in layers}))
    if not kept[0].state.per_token:
        return {"name": group, "layers": words, "fixed_bytes": num_bytes}
    moved = len(kept[0].state.seen_by_next(plan.tokens))
    return {"name": group, "layers": words, "bytes_per_token": num_bytes, "moved_tokens": moved}


def _pairs(plan: Plan) -> list[dict[str, Any]]:
    """What each pair of ranks moves. Pairs whose rows are the same, addresses apart, share an entry: `ranks` has the
    boxes of each."""
    found: dict[str, dict[str, Any]] = {}
    for pair in plan.copies:
        facts = _pair(plan, pair)
        entry = found.setdefault(json.dumps(facts), {"ranks": {}} | facts)
        entry["ranks"][f"{pair[0]} to {pair[1]}"] = _boxes(plan.model, plan.route.between(*pair))
    return list(found.values())


def _pair(plan: Plan, pair: tuple[int, int]) -> dict[str, Any]:
    legs, copies = plan.route.between(*pair), plan.copies[pair]
    layer_of = {kept.state.name: layer.layer for layer in plan.model.layers for kept in layer.kept}
    lengths, counts = np.unique(copies.length, return_counts=True)
    return {
        "layers": runs(sorted({layer_of[leg.state] for leg in legs})),
        "tokens": " and ".join(sorted({str(leg.tokens) for leg in legs})),
        "bytes": copies.num_bytes,
        "rows_before_merge": copies.pieces,
        "rows": len(copies),
        "lengths": {str(length): int(count) for length, count in zip(lengths, counts, strict=True)},
        "digest": hashlib.blake2b(relative_rows(plan, pair).astype("<u8").tobytes(), digest_size=8).hexdigest(),
    }


def _boxes(model: CacheModel, legs: tuple[Leg, ...]) -> str:
    """The kinds of states and, of each axis that tensor parallelism divides, the spans that move."""
    kept_of = {kept.state.name: kept for kept in model.kept()}
    found: defaultdict[str, set[str]] = defaultdict(set)
    for leg in legs:
        kept, kind = kept_of[leg.state], leg.state.split(".", 3)[-1]
        spans = zip(kept.state.axes, leg.box, strict=True)
        words = [f"{axis.name} {span} of {axis.extent}" for axis, span in spans if axis.name == kept.divided_axis]
        found[" ".join(words) or "all"].add(kind)
    return "; ".join(f"{' '.join(sorted(kinds))}: {span}" for span, kinds in sorted(found.items()))


def relative_rows(plan: Plan, pair: tuple[int, int]) -> np.ndarray:
    """Sorted rows: source region, offset in it, target region, offset in it, length."""
    copies = plan.copies[pair]
    columns = [
        *_relative(plan.source.layouts[pair[0]], copies.source),
        *_relative(plan.target.layouts[pair[1]], copies.target),
        np.asarray(copies.length),
    ]
    rows = np.stack(columns, axis=1)
    return rows[np.lexsort(rows.T[::-1])]


def _relative(layout: Layout, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    starts = np.array([region.address for region in layout.regions], np.uint64)
    regions = np.searchsorted(starts, addresses, side="right") - 1
    return regions.astype(np.uint64), addresses - starts[regions]


def _sample(plan: Plan, pair: tuple[int, int]) -> dict[str, Any]:
    """Rows of the first state of a pair, out of the source block of the first token that moves, and what one needs to
    work them out by hand."""
    leg = plan.route.between(*pair)[0]
    state = plan.source.layouts[pair[0]].state_named()[leg.state]
    first = _first_token(leg, state.seen_by_next(plan.tokens).first) if state.per_token else 0
    source = plan.source.layouts[pair[0]].placement_of()[leg.state]
    blocks = plan.source.layouts[pair[0]].groups[source.group]
    block = plan.source.tables[source.group][position(blocks.share, first) // blocks.block_tokens]
    step = source.block_stride * blocks.kernel_blocks
    rows = relative_rows(plan, pair)
    here = (rows[:, 0] == source.region) & (rows[:, 1] < (block + 1) * step) & (rows[:, 1] + rows[:, 4] > block * step)
    return {
        "from": pair[0],
        "to": pair[1],
        "state": leg.state,
        "source": _placement(plan.source, pair[0], leg.state, first),
        "target": _placement(plan.target, pair[1], leg.state, first),
        "rows": ["source region, offset, target region, offset, length", *rows[here][:NUM_SAMPLE_ROWS].tolist()],
    }


def _first_token(leg: Leg, first: int) -> int:
    """The first token from `first` on that a leg moves."""
    tokens = leg.tokens
    return next(
        t
        for t in range(first, first + tokens.period)
        if any(t % tokens.period in range(s.start, s.stop) for s in tokens.spans)
    )


def position(share: TokenShare, token: int) -> int:
    """How many tokens of a rank come before one of its tokens."""
    return token // share.period * share.run_tokens + token % share.run_tokens


def _placement(engine: Engine, rank: int, name: str, token: int) -> dict[str, Any]:
    """Where a state lies in a rank, and the block of a token: its entry in the block table, and its number."""
    layout = engine.layouts[rank]
    placement, state = layout.placement_of()[name], layout.state_named()[name]
    blocks = layout.groups[placement.group]
    slot = position(blocks.share, token) if state.per_token else 0
    entry = slot // blocks.block_tokens
    axes = [f"{axis.name} {span}" for axis, span in zip(state.axes, placement.spans, strict=True)]
    return {
        "region": placement.region,
        "offset": placement.offset,
        "block_stride": placement.block_stride,
        "token_stride": placement.token_stride,
        "axis_strides": dict(zip(axes, placement.strides, strict=True)),
        "token": token,
        "slot": slot % blocks.block_tokens,
        "table_entry": entry,
        "block": engine.tables[placement.group][entry],
    }


def runs(numbers: list[int]) -> str:
    """Ascending numbers in few words: `3-9` for all of them, `0-6/2` for every second one."""
    words, rest = [], numbers
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        length = next((i for i in range(1, len(rest)) if rest[i] - rest[i - 1] != step), len(rest))
        length = length if length > 2 or step == 1 else 1
        words.append(_run(rest[:length], step))
        rest = rest[length:]
    return " ".join(words)


def _run(numbers: list[int], step: int) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    return f"{numbers[0]}-{numbers[-1]}" + (f"/{step}" if step > 1 else "")


def rendered(value: Any, indent: int = 0) -> str:
    """JSON with as much on a line as fits."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or indent + len(flat) <= WIDTH:
        return flat
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {rendered(each, indent + 1)}" for key, each in value.items()]
    else:
        parts = [rendered(each, indent + 1) for each in value]
    opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
    pad = "\n" + " " * (indent + 1)
    return opening + pad + pad.join(_filled(parts, WIDTH - indent - 1)) + "\n" + " " * indent + closing


def _filled(parts: list[str], width: int) -> list[str]:
    """Lines of parts with commas between them; what takes several lines begins one."""
    lines: list[str] = []
    for number, part in enumerate(parts):
        part += "," if number < len(parts) - 1 else ""
        alone = "\n" in part or not lines or "\n" in lines[-1] or len(lines[-1]) + 1 + len(part) > width
        if alone:
            lines.append(part)
        else:
            lines[-1] += " " + part
    return lines


def main() -> None:
    """Print the files, or write them with `--write`."""
    for name in sorted(file.stem for file in FOLDER.iterdir()):
        text = rendered(golden(name)) + "\n"
        if "--write" in sys.argv[1:]:
            (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
        else:
            print(text)


if __name__ == "__main__":
    main()
