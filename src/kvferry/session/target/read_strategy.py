"""How a read's bytes move: directly into their blocks or through staging memory, and who moves them.

The strategy is the cheapest of those that are allowed. The costs of a peer come from its self-test
(`kvferry.agent.transports.costs`); `kvferry.plan.strategy.cost_model` turns them into a price for each strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from kvferry.errors import ConfigurationError, TransferError, choice_named
from kvferry.plan.programs.copies import Copies, Direction
from kvferry.plan.programs.program import Program, RegionStarts
from kvferry.plan.programs.program_split import token_at
from kvferry.plan.programs.request import Ranges, volume
from kvferry.plan.slots.slot_plan import Slot
from kvferry.plan.strategy.calibration import Costs
from kvferry.plan.strategy.cost_model import Counts, Price, counts_of, prices
from kvferry.plan.strategy.strategies import Strategy
from kvferry.wire.messages import Reason

AUTO = tuple(Strategy)
"""The cheapest of all."""


@dataclass(frozen=True, slots=True)
class TransferMode:
    """Who moves a read's bytes, and how. With `read_from` the target reads from that token on, and the source writes
    what lies before it."""

    direction: Direction
    strategy: Strategy = Strategy.DIRECT
    read_from: int = 0

    @property
    def writes_to_blocks(self) -> bool:
        """Whether the source writes anything to the target's own blocks."""
        return not self.strategy.is_staged and (self.direction is Direction.WRITE or self.read_from > 0)


@dataclass(frozen=True, slots=True)
class StagingPolicy:
    """`allowed` are the strategies that may be chosen; `slot_bytes` is what is staged at a time, 0 without staging
    memory.

    Raises ConfigurationError where nothing is allowed, or something that needs staging memory and there is none.
    """

    allowed: tuple[Strategy, ...]
    slot_bytes: int

    def __post_init__(self) -> None:
        if not self.allowed:
            raise ConfigurationError("no strategy is allowed", expected=f"some of {', '.join(Strategy)}")
        least = int(any(each.is_staged for each in self.allowed))
        if self.slot_bytes < least:
            raise ConfigurationError(
                "invalid size of staging slots",
                found=f"{self.slot_bytes} bytes with {' or '.join(self.allowed)}",
                expected=f"at least {least}",
            )

    def before_claim(self, program: Program, ranges: Ranges, costs: Costs, direction: Direction) -> TransferMode:
        """What to ask a source for: to pack, to write to our blocks, all or a share, or only to let us read.

        The source's blocks are not known yet: every row counts for itself, and so does every run of the source.
        """
        num_rows, num_bytes = volume(program, ranges)
        allowed = self.allowed
        if direction is Direction.WRITE:
            # A source that writes to our blocks needs no slots of ours, and one that needs them packs.
            allowed = tuple(each for each in allowed if each is not Strategy.SCATTER) or (Strategy.PACK,)
        counts = Counts(num_bytes, num_rows, num_rows)
        price = self._cheapest(counts, costs, allowed)
        if price.shared and (token := token_at(program, ranges, price.shared)):
            return TransferMode(direction, read_from=token)
        if price.shared:
            price = self._cheapest(counts, replace(costs, sharing_s=0.0), allowed)
        # What a target reads may go through its own staging memory: that is decided when the rows are known.
        return (
            TransferMode(Direction.WRITE, price.strategy) if price.strategy.source_gathers else TransferMode(direction)
        )

    def packing_only(self, source: str) -> TransferMode:
        """The mode for a source whose blocks no transport reaches. Raises TransferError when packing is not allowed."""
        if Strategy.PACK not in self.allowed:
            raise TransferError(
                Reason.INCOMPATIBLE,
                f"the blocks of {source} can only be reached through its staging memory",
                found=f"the strategy {' or '.join(self.allowed)}",
                expected=Strategy.PACK,
                hint="choose the strategy auto or pack",
            )
        return TransferMode(Direction.WRITE, Strategy.PACK)

    @property
    def is_packing_only(self) -> bool:
        """Whether nothing is left for a source that cannot write to our staging memory."""
        return all(each.source_gathers for each in self.allowed)

    def before_read(self, copies: Copies, costs: Costs, starts: RegionStarts) -> Strategy:
        """DIRECT or SCATTER, now that the rows are known."""
        allowed = self.without_packing
        if len(allowed) == 1:
            return allowed[0]
        return self._cheapest(counts_of(copies, starts.source), costs, allowed).strategy

    def when_cut(self, copies: Copies, costs: Costs, slots: Sequence[Slot]) -> Strategy:
        """DIRECT or SCATTER, now that the slots of a stretch are known: what is contiguous at the source is read piece
        by piece where it belongs to different stretches, as blocks in any order do."""
        num_bytes, num_rows = sum(slot.num_bytes for slot in slots), sum(len(slot.wire) for slot in slots)
        if len(self.without_packing) == 1 or not num_bytes:
            return Strategy.SCATTER
        counts = Counts(copies.num_bytes, len(copies), -(-num_rows * copies.num_bytes // num_bytes))
        return self._cheapest(counts, costs, self.without_packing).strategy

    @property
    def without_packing(self) -> tuple[Strategy, ...]:
        """The strategies by which no source writes to us; `direct` if none is allowed."""
        return tuple(each for each in self.allowed if not each.source_gathers) or (Strategy.DIRECT,)

    def _cheapest(self, counts: Counts, costs: Costs, allowed: tuple[Strategy, ...]) -> Price:
        costs = _in_slots(costs, self.slot_bytes) if self.slot_bytes else costs
        return next(price for price in prices(counts, costs) if price.strategy in allowed)


def cannot_write(source: str) -> TransferError:
    """Of a source from which nothing comes but through our staging memory."""
    return TransferError(
        Reason.UNREACHABLE,
        f"{source} cannot write to our staging memory, and its cache can come in no other way",
        found="no transport from the source to this engine passed its self-test",
        expected="one that does, or another strategy where its blocks can be read",
        hint="choose another --transport for both engines, or the strategy auto",
    )


@lru_cache(maxsize=256)
def beside(costs: Costs, fans: tuple[float, float], direction: Direction, may_share: bool) -> Costs:
    """What a source costs with others beside it: `fans` are its fan_in and its fan_out. This rank posts the rows that
    it reads, from every source. Rows that are written are posted by each source for itself. With `may_share` a source
    that is read may write a share."""
    fan_in, fan_out = fans
    costs = replace(costs, fan_in=fan_in, fan_out=fan_out)
    if direction is Direction.WRITE:
        return replace(costs, sharing_s=0.0)
    return replace(costs, rows_fan_in=fan_in, sharing_s=costs.sharing_s if may_share else 0.0)


@lru_cache(maxsize=256)
def _in_slots(costs: Costs, slot_bytes: int) -> Costs:
    """Cached, because costs check themselves, which takes longer than finding the cheapest strategy."""
    return replace(costs, slot_bytes=slot_bytes)


def allowed_by(name: str) -> tuple[Strategy, ...]:
    """The strategies that a user's option allows. Raises ConfigurationError for an unknown name."""
    return choice_named("strategy", name, {"auto": AUTO} | {each.value: (each,) for each in Strategy})


def through_staging_only(policy: StagingPolicy) -> StagingPolicy:
    """The policy without `direct`, for a rank whose own blocks no transport reaches. Raises ConfigurationError if no
    strategy is left."""
    allowed = tuple(each for each in policy.allowed if each.is_staged)
    if not allowed:
        raise ConfigurationError(
            "the memory of this engine cannot be registered, so the strategy direct is impossible",
            found=f"the strategy {' or '.join(policy.allowed)}",
            expected="auto, scatter or pack",
        )
    return StagingPolicy(allowed, policy.slot_bytes)


NO_STAGING = StagingPolicy((Strategy.DIRECT,), 0)
"""Everything moves directly."""
