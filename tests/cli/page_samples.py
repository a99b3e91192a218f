"""Facts of plans in the form of `kvferry plan --json`, by arithmetic on a few numbers instead of the planner."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, lcm
from typing import Any

LINK = 5e10
ITEM_BYTES = 2
PREFILL_TOKENS_PER_S = 12_000.0
# Seconds per descriptor, and bytes per second of gathering and scattering: made up, of a plausible size.
ROW_S, PACK_RATE = 2e-6, 6e10


@dataclass(frozen=True)
class Shape:
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    block: int = 16
    format: str = "token-major"

    @property
    def words(self) -> str:
        named = {"tp": self.tensor, "pp": self.pipeline, "cp": self.context}
        parts = [f"{key}={value}" for key, value in named.items() if value > 1 or key == "tp"]
        style = [] if self.format == "token-major" else [f"format={self.format}"]
        return ",".join([*parts, f"block={self.block}", *style])

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class Group:
    """Layers of one kind. Without heads: one undivided row of `dim` elements. Channels make a state of fixed size."""

    name: str
    layers: int
    heads: int = 0
    dim: int = 128
    window: int = 0
    channels: int = 0


@dataclass(frozen=True)
class Rank:
    rank: int
    stage: int
    layers: tuple[int, int]
    part: tuple[int, int]
    residue: tuple[int, int]


DENSE = (Group("full", 80, heads=8),)
MLA = (Group("full", 61, dim=576),)
HYBRID = (
    Group("full", 12, heads=8, dim=256),
    Group("window", 24, heads=8, dim=256, window=1024),
    Group("recurrent", 12, channels=16384, dim=64),
)


def facts(
    source: Shape, target: Shape, groups: tuple[Group, ...] = DENSE, model: str = "llama-3.3-70b"
) -> dict[str, Any]:
    """The whole object; `model` is free text, as from a user."""
    tokens = 8192
    sources, targets = _ranks(source, groups), _ranks(target, groups)
    pairs = [pair for right in targets for left in sources if (pair := _pair(left, right, (source, target), groups))]
    kinds = [_group(group, tokens) for group in groups]
    predicted_s = max(sum(p["predicted_s"] for p in pairs if p["target_rank"] == t.rank) for t in targets)
    moved = sum(pair["bytes"] for pair in pairs)
    return {
        "model": model,
        "tokens": tokens,
        "fields": [{"name": model, "value": model, "decides": ["which layers there are"], "said_by": "config"}],
        "bytes_per_token": sum(kind["bytes_per_token"] for kind in kinds),
        "lasting_bytes_per_token": sum(
            k["bytes_per_token"] for k, g in zip(kinds, groups, strict=True) if not g.window
        ),
        "fixed_bytes": sum(kind["fixed_bytes"] for kind in kinds),
        "bytes": moved,
        "rows_before_merge": sum(pair["rows_before_merge"] for pair in pairs),
        "rows": sum(pair["rows"] for pair in pairs),
        "predicted_s": predicted_s,
        "link_bytes_per_s": LINK,
        "blocks": "scattered",
        "groups": kinds,
        "source": _side(source, sources, groups),
        "target": _side(target, targets, groups),
        "layouts": {"source": _layouts(source, groups), "target": _layouts(target, groups)},
        "pairs": pairs,
        "verdict": {
            "pays": tokens / predicted_s > PREFILL_TOKENS_PER_S,
            "text": "Moving this cache takes a small part of the time that computing it again would take.",
            "break_even_tokens_per_s": tokens / predicted_s,
            "prefill_tokens_per_s": PREFILL_TOKENS_PER_S,
        },
        "command": f"kvferry plan --model {model} --prefill {source.words} --decode {target.words} --tokens {tokens}",
    }


def _ranks(shape: Shape, groups: tuple[Group, ...]) -> list[Rank]:
    layers = sum(group.layers for group in groups)
    heads = max(group.heads for group in groups)
    ranks = []
    for number in range(shape.num_ranks):
        inside, stage = number % (shape.tensor * shape.context), number // (shape.tensor * shape.context)
        first, last = (layers * at // shape.pipeline for at in (stage, stage + 1))
        tensor = inside % shape.tensor
        part = (tensor * heads // shape.tensor, ceil((tensor + 1) * heads / shape.tensor))
        ranks.append(Rank(number, stage, (first, last), part, (shape.context, inside // shape.tensor)))
    return ranks


def _group(group: Group, tokens: int) -> dict[str, Any]:
    per_token = 0 if group.channels else group.layers * max(1, 2 * group.heads) * group.dim * ITEM_BYTES
    fixed = group.layers * group.channels * group.dim * ITEM_BYTES
    moved = 0 if group.channels else min(tokens, group.window or tokens)
    return {
        "name": group.name,
        "layers": group.layers,
        "bytes_per_token": per_token,
        "tokens_per_entry": 1,
        "fixed_bytes": fixed,
        "moved_tokens": moved,
    }


def _side(shape: Shape, ranks: list[Rank], groups: tuple[Group, ...]) -> dict[str, Any]:
    return {
        "words": shape.words,
        "tensor_parallel": shape.tensor,
        "pipeline_parallel": shape.pipeline,
        "context_parallel": shape.context,
        "decode_context_parallel": 1,
        "interleave_tokens": 1,
        "block_tokens": shape.block,
        "format": shape.format,
        "ranks": [
            {
                "rank": rank.rank,
                "stage": rank.stage,
                "layers": list(rank.layers),
                "axes": {axis: list(span) for axis, span in _axes(rank.part, groups).items()},
                "tokens": _words(rank.residue),
                "bytes": int(_bytes(rank.layers, rank.part, groups) / rank.residue[0]),
            }
            for rank in ranks
        ],
    }


def _axes(part: tuple[int, int], groups: tuple[Group, ...]) -> dict[str, tuple[int, int]]:
    axes = {}
    heads = max(group.heads for group in groups)
    channels = max(group.channels for group in groups)
    if heads:
        axes["head"] = part
    if channels:
        axes["channel"] = (part[0] * channels // heads, part[1] * channels // heads)
    return axes


def _words(residue: tuple[int, int]) -> str:
    return "all" if residue[0] == 1 else f"t % {residue[0]} in [{residue[1]}, {residue[1] + 1})"


def _bytes(layers: tuple[int, int], part: tuple[int, int], groups: tuple[Group, ...]) -> float:
    """Of layers that all kinds share in proportion."""
    share = (layers[1] - layers[0]) / sum(group.layers for group in groups)
    heads = max(group.heads for group in groups)
    width = (part[1] - part[0]) / heads if heads else 1.0
    kinds = [_group(group, 8192) for group in groups]
    return share * width * sum(kind["bytes_per_token"] * kind["moved_tokens"] + kind["fixed_bytes"] for kind in kinds)


def _pair(left: Rank, right: Rank, shapes: tuple[Shape, Shape], groups: tuple[Group, ...]) -> dict[str, Any] | None:
    layers = max(left.layers[0], right.layers[0]), min(left.layers[1], right.layers[1])
    part = max(left.part[0], right.part[0]), min(left.part[1], right.part[1])
    heads = max(group.heads for group in groups)
    if layers[0] >= layers[1] or (heads and part[0] >= part[1]) or not _meet(left.residue, right.residue):
        return None
    # Ranks of the source that hold the same share the targets between them.
    replicas = shapes[0].tensor if not heads else max(1, shapes[0].tensor // heads)
    if left.rank % shapes[0].tensor % replicas != right.rank % shapes[1].tensor % replicas:
        return None
    residue = max(left.residue, right.residue)
    num_bytes = int(_bytes(layers, part, groups) / residue[0])
    states = (layers[1] - layers[0]) * (2 if heads else 1)
    rows = _rows((left, right), shapes, (layers, part, residue), groups)
    prices = _prices(num_bytes, rows)
    strategy = min(prices, key=lambda name: prices[name])
    why = (
        "its descriptors are few and large" if strategy == "direct" else f"{rows:,} descriptors cost more than copying"
    )
    return {
        "source_rank": left.rank,
        "target_rank": right.rank,
        "layers": [list(layers)],
        "boxes": [f"{axis} [{first}, {last})" for axis, (first, last) in _axes(part, groups).items()],
        "tokens": _words(residue),
        "states": states,
        "bytes": num_bytes,
        "rows_before_merge": rows,
        "rows": rows,
        "strategy": strategy,
        "predicted_s": prices[strategy],
        "prices": prices,
        "reason": f"{strategy}: {why} ({num_bytes // rows:,} bytes each)",
    }


def _meet(left: tuple[int, int], right: tuple[int, int]) -> bool:
    period = lcm(left[0], right[0])
    return any(t % left[0] == left[1] and t % right[0] == right[1] for t in range(period))


def _rows(ranks: tuple[Rank, Rank], shapes: tuple[Shape, Shape], what: tuple[Any, ...], groups: Any) -> int:
    """Of layers that all kinds share in proportion."""
    layers, part, residue = what
    share = (layers[1] - layers[0]) / sum(group.layers for group in groups)
    rows = 0.0
    for group in groups:
        states = share * group.layers * (2 if group.heads else 1)
        rows += states * (1 if group.channels else _rows_of_state(ranks, shapes, (part, residue), group))
    return round(rows)


def _rows_of_state(ranks: Any, shapes: tuple[Shape, Shape], what: tuple[Any, Any], group: Group) -> int:
    (part, residue), block = what, min(shape.block for shape in shapes)
    tokens = min(8192, group.window or 8192) // residue[0]
    if ranks[0].residue != ranks[1].residue:
        block = 1
    if shapes[0].format != shapes[1].format:
        return (part[1] - part[0]) * tokens
    if shapes[0].format != "token-major":
        return (part[1] - part[0]) * ceil(tokens / block)
    return tokens if ranks[0].part != ranks[1].part else ceil(tokens / block)


def _prices(num_bytes: int, rows: int) -> dict[str, float]:
    wire = num_bytes / LINK
    return {
        "direct": wire + rows * ROW_S,
        "scatter": wire + rows / 2 * ROW_S + num_bytes / PACK_RATE,
        "pack": wire + 2 * num_bytes / PACK_RATE + 2e-4,
    }


def _layouts(shape: Shape, groups: tuple[Group, ...]) -> list[dict[str, Any]]:
    return [_layout(shape, group) for group in groups]


def _layout(shape: Shape, group: Group) -> dict[str, Any]:
    if group.channels:
        inner = {"channel": group.channels // shape.tensor, "state": group.dim}
        outer = {"layer": group.layers, "block": 64}
    else:
        heads = {"head": max(1, group.heads // shape.tensor)} if group.heads else {}
        token = {"token": shape.block}
        inner = {**token, **heads} if shape.format == "token-major" else {**heads, **token}
        inner["dim"] = group.dim
        outer = {"layer": group.layers // shape.pipeline, **({"k/v": 2} if group.heads else {}), "block": 4096}
    order = {**outer, **inner}
    block_bytes = ITEM_BYTES
    for size in inner.values():
        block_bytes *= size
    inside = list(inner)
    token_bytes = ITEM_BYTES
    for name in inside[inside.index("token") + 1 :] if "token" in inside else []:
        token_bytes *= inner[name]
    return {
        "group": group.name,
        "order": list(order),
        "sizes": list(order.values()),
        "block_stride": block_bytes,
        "token_stride": token_bytes if "token" in inner else 0,
        "contiguous_bytes": block_bytes,
    }


SAMPLES = {
    "one-to-one": lambda: facts(Shape(), Shape(), (Group("full", 32, heads=8),), "llama-3.1-8b"),
    "four-to-two": lambda: facts(Shape(4), Shape(2, block=64)),
    "eight-to-four-stages": lambda: facts(Shape(4, 2), Shape(4, block=32, format="head-major")),
    "sixteen-to-eight-stages": lambda: facts(Shape(4, 4), Shape(4, 2, block=64)),
    "hybrid": lambda: facts(Shape(4), Shape(2, block=32), HYBRID, "hybrid-48b"),
    "latent": lambda: facts(Shape(4, block=64), Shape(8, block=64), MLA, "deepseek-v3"),
    "context": lambda: facts(Shape(2, context=2), Shape(4, block=32)),
    "many": lambda: facts(Shape(2, context=8), Shape(8, block=64), DENSE),
}
