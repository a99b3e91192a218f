"""Whether two engines keep the same states: what is compared before anything moves between them."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.plan.description.layout import Layout, State


def differences(sources: Sequence[Layout], targets: Sequence[Layout]) -> tuple[str, ...]:
    """Every way in which the states of two engines differ, in words with both values; empty when they agree. What both
    can do without, or only one has and can do without, may differ."""
    left, right = all_states(sources), all_states(targets)
    found = [f"state {name}: only the source has it" for name in left if name not in right and not left[name].optional]
    found += [
        f"state {name}: only the target has it" for name in right if name not in left and not right[name].optional
    ]
    for name in left.keys() & right.keys():
        if not (left[name].optional and right[name].optional):
            found += _state_differences(left[name], right[name])
    for side, agreed, layouts in (("source", left, sources), ("target", right, targets)):
        found += [
            f"state {state.name}: rank {rank} of the {side} describes it differently from another rank"
            for rank, layout in enumerate(layouts)
            for state in _placed(layout)
            if state != agreed[state.name]
        ]
    return tuple(sorted(found))


def moving(sources: Sequence[Layout], targets: Sequence[Layout]) -> frozenset[str]:
    """The states that both engines have, and have alike."""
    left, right = all_states(sources), all_states(targets)
    return frozenset(name for name in left.keys() & right.keys() if not _state_differences(left[name], right[name]))


def _state_differences(left: State, right: State) -> list[str]:
    ours, theirs = _properties(left), _properties(right)
    return [
        f"state {left.name}: {what} {ours[what]} at the source, {theirs[what]} at the target"
        for what in ours
        if ours[what] != theirs[what]
    ]


def _properties(state: State) -> dict[str, object]:
    """What two engines must agree on, by its name for people."""
    return {
        "dtype": state.dtype,
        "element size": state.item_bytes,
        "axes": [axis.name for axis in state.axes],
        "extents": [axis.extent for axis in state.axes],
        "token axis": state.per_token,
        "window": state.window_tokens,
        "chunks": state.chunk_tokens,
        "tokens an entry": state.compress_ratio,
    }


def all_states(layouts: Sequence[Layout]) -> dict[str, State]:
    """The states of an engine by their names."""
    return {state.name: state for layout in layouts for state in _placed(layout)}


def _placed(layout: Layout) -> list[State]:
    named = layout.state_named()
    return [named[placement.state] for placement in layout.placements]
