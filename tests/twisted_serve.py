"""`kvferry` that reads something else than it should: `python twisted_serve.py FILE serve …`. FILE says what.

`swapped`: two of the source's blocks take each other's place in the first state of the tiny model. (If they did in all
states, nothing would change: keys know their positions, and attention does not ask where they lie.) `shifted`: each row
begins a head too early. `short`: the last token is not read. `neighbour`: each block is read from where the next one
lies. `window`: each block of layers with a window is, and only those. Without FILE nothing is wrong. What lands is
digested as it should be, so digests must tell.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvferry.cli.main import main
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Copies
from kvferry.session.target.reads import lifecycle

way = Path(sys.argv.pop(1))
copies_for = lifecycle.copies_for
# Keys and values of its four layers.
NUM_STATES = 8


def swapped(table):
    return (table[1], table[0], *table[2:]) if len(table) > 1 else table


def neighbour(table):
    return (*table[1:], *table[:1])


def in_first_state(copies, first, last):
    """Of as many states as the tiny model has, which lie one after the other: addresses from `first` to `last`."""
    return copies.target < first + (last - first) // NUM_STATES


def shifted(copies, state):
    """But for the first head in memory, before which there is none."""
    head_bytes = np.uint64(state.item_bytes * state.axes[-1].extent)
    has_other = copies.source >= copies.source.min() + head_bytes
    return replace(copies, source=np.where(has_other, copies.source - head_bytes, copies.source))


def beside_windows(program, tables):
    """The tables of the source, those of groups with a window as if their blocks were the neighbours'."""
    windowed = {group.source_group for group in program.groups if group.state.window_tokens}
    return tuple(neighbour(table) if number in windowed else table for number, table in enumerate(tables))


def swapped_in_first_state(right, wrong):
    first, last = right.target.min(), right.target.max()
    parts = right.select(~in_first_state(right, first, last)), wrong.select(in_first_state(wrong, first, last))
    columns = [np.concatenate([getattr(part, name) for part in parts]) for name in ("source", "target", "length")]
    return Copies(*columns, right.pieces)


def twisted(program, source_tables, target_tables, ranges, *part):
    name = way.read_text() if way.exists() else ""
    right = copies_for(program, source_tables, target_tables, ranges, *part)
    if not (name and len(right)):
        return right
    if name == "shifted":
        return shifted(right, program.groups[0].state)
    if name == "short":
        ranges = tuple(TokenRange(each.first, max(each.first, each.last - 1)) for each in ranges)
        return copies_for(program, source_tables, target_tables, ranges, *part)
    if name == "window":
        return copies_for(program, beside_windows(program, source_tables), target_tables, ranges, *part)
    twist = swapped if name == "swapped" else neighbour
    wrong = copies_for(program, tuple(twist(table) for table in source_tables), target_tables, ranges, *part)
    return swapped_in_first_state(right, wrong) if name == "swapped" else wrong


lifecycle.copies_for = twisted
main()
