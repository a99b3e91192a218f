"""A quote as plain data: what `kvferry plan --json` prints and its page draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvferry.plan.description.describe import EngineShape
from kvferry.plan.description.layout import Layout, Placement, State
from kvferry.plan.description.model import CacheModel, bytes_per_token
from kvferry.plan.description.span import Span
from kvferry.plan.description.tokens import ALL_TOKENS, TokenRange, TokenSet
from kvferry.plan.strategy.request_estimate import PairQuote, Quote


@dataclass(frozen=True, slots=True)
class Side:
    """One engine: its shape, in words and as numbers, and the layouts of its ranks."""

    words: str
    shape: EngineShape
    replicas: int
    layouts: tuple[Layout, ...]


class ModelNames:
    """The layers and axes of a model's states, by the state's name; divided axes as `_axis_names` calls them."""

    def __init__(self, model: CacheModel) -> None:
        self.groups = model.groups()
        self.layer_of = {kept.state.name: layer.layer for layer in model.layers for kept in layer.kept}
        self.axes = {kept.state.name: kept.state.axes for kept in model.kept()}
        self.divided = _axis_names(model)


def plain(number: int | Fraction) -> int | float:
    """The number as JSON can hold it: a fraction becomes a float."""
    return number if isinstance(number, int) else float(number)


def group_facts(model: CacheModel, tokens: TokenRange) -> list[dict[str, Any]]:
    """Per cache group: its layers, its bytes, and how many tokens of it move."""
    facts = []
    for name in model.groups():
        kept = [kept for layer in model.layers if layer.group == name for kept in layer.kept]
        each = kept[0].state.compress_ratio
        moved = each * max(len(one.state.seen_by_next(tokens)) for one in kept)
        facts.append(
            {
                "name": name,
                "layers": len({_layer_name(one.state) for one in kept}),
                "bytes_per_token": plain(bytes_per_token(kept)),
                "tokens_per_entry": each,
                "fixed_bytes": sum(one.num_bytes for one in kept if not one.state.per_token),
                "moved_tokens": moved if kept[0].state.per_token else 0,
            }
        )
    return facts


def moved_words(group: Mapping[str, Any]) -> str:
    """How much of a group moves."""
    moved, entry = group["moved_tokens"], group["tokens_per_entry"]
    return f"{moved // entry:,} entries of {entry} tokens" if entry > 1 else f"{moved:,} tokens"


def side_facts(side: Side, names: ModelNames, pairs: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """An engine and what each rank of it holds and moves; `key` names the rank in the facts of a pair."""
    shape = side.shape
    per_stage = shape.num_ranks // shape.pipeline_parallel
    return {
        "words": side.words,
        "data_parallel": side.replicas,
        "tensor_parallel": shape.tensor_parallel,
        "pipeline_parallel": shape.pipeline_parallel,
        "context_parallel": shape.context_parallel,
        "decode_context_parallel": shape.decode_context_parallel,
        "interleave_tokens": shape.run_tokens,
        "block_tokens": shape.block_tokens,
        "format": shape.format,
        "ranks": [
            {
                "rank": rank,
                "stage": rank // per_stage,
                "layers": _hull([names.layer_of[placement.state] for placement in layout.placements]),
                "axes": _axes(layout, names),
                "tokens": _tokens_words(layout),
                "bytes": sum(pair["bytes"] for pair in pairs if pair[key] == rank),
            }
            for rank, layout in enumerate(side.layouts)
        ],
    }


def pair_facts(pair: PairQuote, names: ModelNames) -> dict[str, Any]:
    """What moves between two ranks, in which way, and what the other ways would take."""
    boxes = {
        f"{names.divided[leg.state, axis.name]} {span}"
        for leg in pair.legs
        for axis, span in zip(names.axes[leg.state], leg.box, strict=True)
        if (leg.state, axis.name) in names.divided
    }
    return {
        "source_rank": pair.source_rank,
        "target_rank": pair.target_rank,
        "layers": _runs(sorted({names.layer_of[leg.state] for leg in pair.legs})),
        "draft_layers": sorted({found for leg in pair.legs if (found := _draft_layer(leg.state)) is not None}),
        "boxes": sorted(boxes),
        "tokens": _set_words([leg.tokens for leg in pair.legs]),
        "states": len({leg.state for leg in pair.legs}),
        "bytes": pair.num_bytes,
        "rows_before_merge": pair.num_pieces,
        "rows": pair.num_rows,
        "strategy": str(pair.choice.strategy),
        "predicted_s": pair.choice.predicted_s,
        "prices": {str(price.strategy): price.seconds for price in pair.choice.prices},
        "reason": pair.choice.reason,
    }


def layout_facts(side: Side, names: ModelNames) -> list[dict[str, Any]]:
    """Per cache group, how the first rank that has it stores a block of it. Divided axes have the names of a pair's."""
    facts = []
    for index, name in enumerate(names.groups):
        for layout in side.layouts:
            held = [placement for placement in layout.placements if placement.group == index]
            if held:
                num_layers = len({names.layer_of[placement.state] for placement in held})
                block = _block_facts(side.shape, layout, held, num_layers)
                state = held[0].state
                block["order"] = [names.divided.get((state, axis), axis) for axis in block["order"]]
                facts.append({"group": name, **block})
                break
    return facts


def _block_facts(shape: EngineShape, layout: Layout, placements: list[Placement], num_layers: int) -> dict[str, Any]:
    """How the first state of a group lies in its blocks: the other states lie beside it."""
    placement, num_kinds = placements[0], len(placements) // num_layers
    state, group = layout.state_named()[placement.state], layout.groups[placement.group]
    steps = _steps(shape, state, placement)
    sizes = {"layer": num_layers, _kinds(state): num_kinds, "block": group.num_blocks * group.kernel_blocks}
    sizes |= {"token": group.kernel_tokens} if state.per_token else {}
    sizes |= {axis.name: len(span) for axis, span in zip(state.axes, placement.spans, strict=True)}
    contiguous = state.item_bytes
    for name in reversed(steps):
        stride = _strides(state, placement).get(name, 0)
        if stride != contiguous:
            break
        contiguous *= sizes[name]
    return {
        "order": steps,
        "sizes": [sizes[name] for name in steps],
        "block_stride": placement.block_stride,
        "token_stride": placement.token_stride,
        "contiguous_bytes": contiguous,
    }


def _kinds(state: State) -> str:
    """What to call the states of a layer: `k/v` where the first of them is the key of attention."""
    return "k/v" if state.name.endswith(".k") else "state"


def _strides(state: State, placement: Placement) -> dict[str, int]:
    """Distance in bytes between neighbours inside a block, by dimension."""
    axes = {axis.name: stride for axis, stride in zip(state.axes, placement.strides, strict=True)}
    return axes | ({"token": placement.token_stride} if state.per_token else {})


def _steps(shape: EngineShape, state: State, placement: Placement) -> list[str]:
    """The dimensions of a block and around it, outermost first."""
    if not state.per_token:
        inner = sorted(_strides(state, placement).items(), key=lambda item: -item[1])
        return ["layer", "block", _kinds(state), *(name for name, _ in inner)]
    names = [axis.name for axis in state.axes]
    outer = names[:1] if len(names) > 1 else []
    words = {"L": ["layer"], "K": [_kinds(state)], "B": ["block"], "N": ["token"], "H": outer, "D": names[len(outer) :]}
    return [name for letter in shape.letters for name in words[letter]]


def _axes(layout: Layout, names: ModelNames) -> dict[str, list[int]]:
    """The part of each divided axis that a rank holds, over all its states. The longest of those of one name counts."""
    spans: dict[str, list[Span]] = {}
    for placement in layout.placements:
        for axis, span in zip(names.axes[placement.state], placement.spans, strict=True):
            name = names.divided.get((placement.state, axis.name), "")
            if name and "_of_" not in name:
                spans.setdefault(name, []).append(span)
    return {name: [min(s.start for s in found), max(s.stop for s in found)] for name, found in spans.items()}


def _axis_names(model: CacheModel) -> dict[tuple[str, str], str]:
    """What to call the divided axis of each state: `head`; `group.head` where a model has several groups; and
    `head_of_16` where the same group has a longer axis of that name (query heads beside value heads)."""
    divided = [
        (layer.group, kept.state.name, axis)
        for layer in model.layers
        for kept in layer.kept
        for axis in kept.state.axes
        if axis.name == kept.divided_axis
    ]
    longest: dict[tuple[str, str], int] = {}
    for group, _, axis in divided:
        longest[group, axis.name] = max(longest.get((group, axis.name), 0), axis.extent)
    names = {}
    for group, state, axis in divided:
        name = axis.name if axis.extent == longest[group, axis.name] else f"{axis.name}_of_{axis.extent}"
        names[state, axis.name] = f"{group}.{name}" if len(model.groups()) > 1 else name
    return names


def _tokens_words(layout: Layout) -> str:
    named = layout.state_named()
    return _set_words([layout.groups[p.group].share.tokens() for p in layout.placements if named[p.state].per_token])


def _set_words(sets: list[TokenSet]) -> str:
    """`all`, or which tokens: the first set that is not all of them."""
    return next((str(tokens).removeprefix("tokens t with ") for tokens in sets if tokens != ALL_TOKENS), "all")


def _hull(numbers: list[int]) -> list[int]:
    return [min(numbers), max(numbers) + 1] if numbers else [0, 0]


def _layer_name(state: State) -> str:
    """The layer of a state, such as `model.layers.3`: it may have several mixers, and each has states of its own."""
    return ".".join(state.name.split(".")[:3])


def _draft_layer(state: str) -> int | None:
    """The number of the draft layer that a state belongs to, if it does."""
    parts = state.split(".")
    return int(parts[2]) if parts[0] == "draft" else None


def _runs(numbers: list[int]) -> list[list[int]]:
    """Ascending numbers as half-open runs."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1][1] = number + 1
        else:
            runs.append([number, number + 1])
    return runs


def sums(quote: Quote) -> dict[str, Any]:
    """What all pairs come to."""
    return {
        "bytes": sum(pair.num_bytes for pair in quote.pairs),
        "rows_before_merge": sum(pair.num_pieces for pair in quote.pairs),
        "rows": sum(pair.num_rows for pair in quote.pairs),
        "predicted_s": quote.predicted_s,
    }
