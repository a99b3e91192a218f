"""What a digest covers, in logical terms: states, boxes and tokens, never an address.

Both sides of a transfer walk the same coordinates, each through its own blocks, and hash the bytes that they find:
equal caches have equal digests, whatever the memory formats, block sizes and parallelism. Where the bytes lie is worked
out apart from the rows that were copied (`extract`), so a mistake in those is found as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from kvferry.errors import LayoutError, choice_named
from kvferry.plan.description.layout import Layout, State
from kvferry.plan.description.span import MAX_STOP
from kvferry.plan.description.tokens import ALL_TOKENS, MAX_PERIOD, TokenRange, TokenSet
from kvferry.plan.routing.route import Box, Leg
from kvferry.plan.routing.selection import Selection

# A pair of ranks has a handful; only somebody who means harm has more.
MAX_PARTS = 1 << 12
NO_TOKENS = TokenRange(0, 0)


class DigestPolicy(StrEnum):
    """How much of what has landed is digested: none, a sample of every state (see `sampling`), or every byte."""

    OFF = "off"
    SAMPLED = "sampled"
    FULL = "full"


def digest_policy_named(name: str) -> DigestPolicy:
    """Raises ConfigurationError for a policy that does not exist."""
    return choice_named("digest policy", name, {policy.value: policy for policy in DigestPolicy})


@dataclass(frozen=True, slots=True)
class Part:
    """States of which the same box of the same tokens has landed: those of `tokens` within `seen`.

    For states of fixed size `seen` is empty. Comes from peers: raises LayoutError for what makes no sense by itself.
    """

    states: tuple[str, ...]
    box: Box
    tokens: TokenSet
    seen: TokenRange

    def __post_init__(self) -> None:
        if not self.states:
            raise LayoutError("a part of a digest has states", found="none")
        if not 0 <= self.seen.first <= self.seen.last <= MAX_STOP:
            raise LayoutError("not a token range", found=f"[{self.seen.first}, {self.seen.last})")
        edges = [edge for span in self.tokens.spans for edge in (span.start, span.stop)]
        ascending = all(before <= after for before, after in pairwise(edges))
        if not (edges and ascending and edges[-1] <= self.tokens.period <= MAX_PERIOD):
            expected = f"ascending spans within a period of at most {MAX_PERIOD:,}"
            raise LayoutError("not a set of tokens", found=f"{self.tokens}", expected=expected)


@dataclass(frozen=True, slots=True)
class Subject:
    """Everything that one digest covers; it has one value per state of each part, in this order.

    `seed` chooses the sample. Comes from peers: raises LayoutError for what makes no sense by itself.
    """

    policy: DigestPolicy
    seed: int
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        most = 0 if self.policy is DigestPolicy.OFF else MAX_PARTS
        if len(self.parts) > most:
            found, expected = f"{len(self.parts)} parts with policy {self.policy}", f"at most {most}"
            raise LayoutError("the digest has too many parts", found=found, expected=expected)
        if not 0 <= self.seed < 1 << 63:
            raise LayoutError("the seed of a sample is out of range", found=f"{self.seed}", expected="0 to 2**63 - 1")

    @property
    def names(self) -> tuple[str, ...]:
        """The states in the order of the values."""
        return tuple(name for part in self.parts for name in part.states)


NOTHING = Subject(DigestPolicy.OFF, 0, ())


@dataclass(frozen=True, slots=True, eq=False)
class PartTemplate:
    """A part before its range is known: what a pair of ranks moves of states that are alike.

    `group` is the cache group at the target; `state` is one of the states, whose window or chunks are those of all.
    """

    group: int
    state: State
    names: tuple[str, ...]
    box: Box
    tokens: TokenSet
    selection: Selection


def templates_of(legs: Sequence[Leg], target: Layout) -> tuple[PartTemplate, ...]:
    """What moves between a pair of ranks, states with the same box and tokens together; once per pair."""
    states, placements = target.state_named(), target.placement_of()
    alike: dict[tuple[object, ...], list[Leg]] = {}
    for leg in legs:
        key = placements[leg.state].group, states[leg.state].token_limits, leg.box, leg.tokens
        alike.setdefault(key, []).append(leg)
    return tuple(
        PartTemplate(
            group=placements[found[0].state].group,
            state=states[found[0].state],
            names=tuple(leg.state for leg in found),
            box=found[0].box,
            tokens=found[0].tokens,
            selection=Selection.of(found[0].tokens),
        )
        for found in alike.values()
    )


def subject_of(
    templates: Sequence[PartTemplate], ranges: Sequence[TokenRange], policy: DigestPolicy, seed: int
) -> Subject:
    """What a digest of one request covers: all that has moved, but for free tails, which are not the request's.

    `ranges` has one range per cache group of the target. Raises LayoutError when there are too many parts.
    """
    if policy is DigestPolicy.OFF:
        return NOTHING
    parts = []
    for template in templates:
        if not template.state.per_token:
            parts.append(Part(template.names, template.box, ALL_TOKENS, NO_TOKENS))
            continue
        seen, count = template.state.seen_by_next(ranges[template.group]), template.selection.num_before
        if count(seen.first) < count(seen.last):
            parts.append(Part(template.names, template.box, template.tokens, seen))
    return Subject(policy, seed, tuple(parts))


def seed_of(name: str) -> int:
    """A seed that differs from request to request, and is the same when a request is played again."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
