"""Where the states of one cache group lie in memory, from an order of letters (see `describe`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from math import prod

from kvferry.errors import LayoutError
from kvferry.plan.description.layout import State
from kvferry.plan.description.span import Span


@dataclass(frozen=True, slots=True)
class Member:
    """One state as a rank holds it: its box, its layer's and its own number, and how many blocks and slots it has.

    `inner_axes` are the axes of letter `D`, outermost first; `outer_axes`, at most one, that of letter `H`.
    """

    state: State
    spans: tuple[Span, ...]
    layer: int
    kind: int
    num_blocks: int
    num_slots: int
    outer_axes: tuple[int, ...]
    inner_axes: tuple[int, ...]

    def extent(self, letter: str) -> int:
        """How many elements lie along a letter."""
        axes = {"H": self.outer_axes, "D": self.inner_axes}.get(letter, ())
        return {"B": self.num_blocks, "N": self.num_slots}.get(letter, prod(len(self.spans[axis]) for axis in axes))

    def part(self, letter: str) -> int:
        """Which of the parts along `L` or `K` it is."""
        return self.layer if letter == "L" else self.kind


@dataclass(frozen=True, slots=True)
class Place:
    """Where a member lies: its region, its first byte there, and per letter the bytes from one to the next."""

    member: Member
    region: int
    offset: int
    strides: dict[str, int]

    def axis_strides(self) -> tuple[int, ...]:
        """One stride per axis of the state: the inner axes lie inside one another."""
        step, strides = self.strides["D"], dict.fromkeys(self.member.outer_axes, self.strides["H"])
        for axis in reversed(self.member.inner_axes):
            strides[axis] = step
            step *= len(self.member.spans[axis])
        return tuple(strides[axis] for axis in range(len(self.member.spans)))


@dataclass(frozen=True, slots=True)
class Arranged:
    """All members of a group, and the size of each allocation that they need."""

    region_bytes: tuple[int, ...]
    places: tuple[Place, ...]


def arrange(letters: str, members: list[Member]) -> Arranged:
    """Nest the members in the order of the letters; leading `L` and `K` are separate allocations.

    Raises LayoutError when members that differ in shape would have to lie inside one another.
    """
    outside = "".join(takewhile(lambda letter: letter in "LK", letters))
    regions, places = [], []
    key = lambda member: tuple(member.part(letter) for letter in outside)  # noqa: E731
    for region, (_, found) in enumerate(groupby(sorted(members, key=key), key=key)):
        size_bytes, laid = _lay(letters[len(outside) :], list(found))
        regions.append(size_bytes)
        places += [replace(place, region=region) for place in laid]
    return Arranged(tuple(regions), tuple(places))


def _lay(letters: str, members: list[Member]) -> tuple[int, list[Place]]:
    """The bytes that the members take along these letters, and where each lies in them."""
    if not letters:
        (member,) = members
        return member.state.item_bytes, [Place(member, 0, 0, {})]
    if letters[0] in "LK":
        return _side_by_side(letters, members)
    extents = {member.extent(letters[0]) for member in members}
    if len(extents) > 1:
        raise LayoutError(
            "this format cannot interleave states of different shapes",
            found=f"{', '.join(member.state.name for member in members[:4])}: {sorted(extents)} along {letters[0]}",
            hint="choose a format with L and K further outside, such as token-major",
        )
    step, places = _lay(letters[1:], members)
    places = [replace(place, strides=place.strides | {letters[0]: step}) for place in places]
    return step * extents.pop(), places


def _side_by_side(letters: str, members: list[Member]) -> tuple[int, list[Place]]:
    end, places = 0, []
    for part in sorted({member.part(letters[0]) for member in members}):
        size_bytes, laid = _lay(letters[1:], [member for member in members if member.part(letters[0]) == part])
        places += [replace(place, offset=end + place.offset) for place in laid]
        end += size_bytes
    return end, places


def pooled(groups: list[Arranged], num_blocks: int, kernel_blocks: int) -> list[Arranged]:
    """Let groups take their blocks from the same memory: all blocks become as large as the largest.

    Each group must have been arranged with its blocks outermost in every region.
    """
    unit = 16 * kernel_blocks
    page = max((-(-size // num_blocks // unit) * unit for group in groups for size in group.region_bytes), default=unit)
    num_regions = max(len(group.region_bytes) for group in groups)
    return [
        Arranged(
            region_bytes=(page * num_blocks,) * num_regions,
            places=tuple(
                replace(place, strides=place.strides | {"B": page * num_blocks // place.member.num_blocks})
                for place in group.places
            ),
        )
        for group in groups
    ]
