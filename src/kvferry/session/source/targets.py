"""The target ranks that a source writes to: what they have offered, whether they are reached, what goes where."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

from msgspec import structs

from kvferry.errors import FerryError, TransferError
from kvferry.plan.description.layout import Layout, sharing_parts
from kvferry.plan.programs.program import Program, bind
from kvferry.plan.programs.program_split import Bundle, bundles
from kvferry.plan.programs.request import check_ranges
from kvferry.plan.routing.route import route
from kvferry.plan.slots.slot_plan import StagedRequest
from kvferry.session.commands import Command, Connect, Disconnect, Reply
from kvferry.session.events import LeaseRequest, PeerConnected, PeerUnreachable
from kvferry.session.refusals import refuse
from kvferry.session.timing import Timing
from kvferry.wire.messages import Claim, Party, Reached, Reason, TargetOffer

MAX_TARGETS = 4096
NUM_BUNDLES = 8
"""Into so many a program is cut that is sent state by state: the last eighth is all that waits for the last state."""
# A target forgets an idle source first, and so never claims from one that has forgotten it.
PATIENCE = 2
# A target knows this rank by a few addresses at most, and has a handshake with each.
MAX_ANSWERED = 64


@dataclass(slots=True)
class _Target:
    """`reached` is empty until a transport is connected, `answered` has the last handshakes that were told of it.
    `programs` is empty until something has been claimed, `bundles` until something is to be sent state by state."""

    peer: str
    offer: TargetOffer
    last_heard: float
    reached: tuple[Reached, ...] = ()
    answered: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_ANSWERED))
    programs: tuple[Program, ...] = ()
    bundles: tuple[Bundle, ...] = ()

    def check(self, offer: TargetOffer) -> None:
        """Raises TransferError for an offer that contradicts this one. How the target's memory is reached, and whether
        we may attach its staging memory, is decided in each handshake."""
        decided = {"staging": offer.staging, "transports": offer.transports, "handshake": offer.handshake}
        gives_two = offer.handshake == self.offer.handshake and offer.transports != self.offer.transports
        if gives_two or structs.replace(self.offer, **decided) != offer:
            raise TransferError(Reason.MALFORMED, "two different offers of one target rank", found=str(offer.party))

    def is_reached_by(self, offer: TargetOffer, is_busy: bool) -> bool:
        """Whether the present connection is what an offer asks for. A newer one may judge otherwise whether we are near
        its slots, but not while the target is written to."""
        is_settled = is_busy or offer.handshake < self.offer.handshake or offer.staging == self.offer.staging
        return offer.transports == self.offer.transports and is_settled

    def repeated(self, peer: str, handshake: int, now: float) -> list[Command]:
        """The answer to an offer of what is known, if there is one already."""
        self.peer, self.last_heard = peer, now
        self.offer = structs.replace(self.offer, handshake=max(handshake, self.offer.handshake))
        return [self.answer(reached, handshake) for reached in self.reached]

    def answer(self, reached: Reached, handshake: int) -> Reply:
        """Tell a handshake of the connection: only claims by those that know of it are carried out over it."""
        if handshake not in self.answered:
            self.answered.append(handshake)
        return Reply(self.peer, structs.replace(reached, handshake=handshake))


class Targets:
    """The known targets by party. `layouts` are those of all ranks of the source's engine."""

    def __init__(self, layouts: tuple[Layout, ...], rank: int, timing: Timing) -> None:
        self._layouts = layouts
        self._rank = rank
        self._timing = timing
        self._known: dict[Party, _Target] = {}
        # No target has been idle for long enough before this: one that is heard of is idle later.
        self._first_s = inf

    def __len__(self) -> int:
        return len(self._known)

    def offered(self, peer: str, offer: TargetOffer, busy: Collection[Party], now: float) -> list[Command]:
        """Connect to a target that wants to be written to; repeat the answer to a repeated offer, and give none to an
        older one. Raises TransferError for an offer that makes no sense, or when there are too many targets."""
        if known := self._known.get(offer.party):
            known.check(offer)
            if known.is_reached_by(offer, offer.party in busy):
                return known.repeated(peer, offer.handshake, now)
            if offer.handshake < known.offer.handshake:
                # It came late: its access is void.
                return []
        if offer.party.rank >= len(offer.layouts):
            found = f"rank {offer.party.rank} of {len(offer.layouts)}"
            raise TransferError(Reason.MALFORMED, "an offer of a rank without a layout", found=found)
        replaced = [self._forget(party) for party in list(self._known) if _is_met_anew(party, offer.party)]
        if len(self._known) >= MAX_TARGETS:
            raise TransferError(Reason.UNREACHABLE, "too many targets at once", found=f"{len(self._known)} targets")
        layouts = tuple(map(sharing_parts, offer.layouts))
        known = self._known[offer.party] = _Target(peer, structs.replace(offer, layouts=layouts), now)
        self._first_s = min(self._first_s, self._ends(known))
        return [*replaced, Connect(offer.party, offer)]

    def settled(self, event: PeerConnected | PeerUnreachable) -> list[Command]:
        """Tell a target whether a transport reaches it, and forget it if none does."""
        known = self._known.get(event.peer) if isinstance(event.peer, Party) else None
        if known is None or known.reached:
            return []
        if isinstance(event, PeerConnected):
            reached = Reached(event.transport, event.choice[:4096], event.reaches_staging)
            known.reached = (reached,)
            return [known.answer(reached, known.offer.handshake)]
        error = TransferError(Reason.UNREACHABLE, "no transport reaches the target", found=event.error)
        return [self._forget(known.offer.party), *refuse(known.peer, error)]

    def heard(self, party: Party, now: float) -> None:
        """Note that a target is alive."""
        if known := self._known.get(party):
            known.last_heard = now

    def request(self, claim: Claim, lease: LeaseRequest) -> StagedRequest:
        """What moves for a claim, and where. Raises TransferError, or BlockTableError for its ranges, when it cannot or
        must not be carried out."""
        program = self._program_of(claim)
        if claim.strategy.source_gathers and not claim.slot_bytes:
            what = "staging slots of no size"
            raise TransferError(Reason.MALFORMED, what, found="0 bytes", expected="at least 1 byte")
        return StagedRequest(
            program, lease.block_tables, claim.block_tables, claim.ranges, claim.strategy, claim.slot_bytes
        )

    def bundles(self, party: Party) -> tuple[Bundle, ...]:
        """The program of a target that has claimed something, cut by states."""
        known = self._known.get(party)
        if known is None:
            return ()
        known.bundles = known.bundles or self._bundles(known.offer)
        return known.bundles

    def _program_of(self, claim: Claim) -> Program:
        known = self._known.get(claim.party)
        if known is None or not known.reached:
            raise TransferError(Reason.UNREACHABLE, "the target has not been reached", found=str(claim.party))
        if claim.handshake not in known.answered:
            # The target knows of another connection than the one that this would be written over.
            found, expected = f"handshake {claim.handshake}", f"one of {sorted(known.answered)}"
            what = "a claim by an older handshake"
            raise TransferError(Reason.UNREACHABLE, what, found=found, expected=expected)
        # Wrong ranges could be cut into millions of stretches, so they are checked first.
        check_ranges(claim.ranges)
        last = max((tokens.last for tokens in claim.ranges), default=0)
        if last != claim.num_tokens:
            found, expected = f"tokens up to {last}", f"up to {claim.num_tokens}"
            raise TransferError(Reason.OUT_OF_RANGE, "token ranges outside the claim", found=found, expected=expected)
        try:
            known.programs = known.programs or (self._program(known.offer),)
        except FerryError as error:
            raise TransferError(Reason.INCOMPATIBLE, error.what, found=error.found, expected=error.expected) from error
        return known.programs[0]

    def expire(self, busy: Collection[Party], now: float) -> list[Command]:
        """Forget targets that have said nothing for long and that nothing is written to."""
        if now < self._first_s:
            return []
        idle = [party for party, known in self._known.items() if self._ends(known) <= now]
        for party in busy:
            self.heard(party, now)
        commands: list[Command] = [self._forget(party) for party in idle if party not in busy]
        self._first_s = min(map(self._ends, self._known.values()), default=inf)
        return commands

    def next_deadline(self) -> float:
        """When the next target has been idle for long enough, or sooner; infinity when there is none."""
        return self._first_s if self._known else inf

    def _program(self, offer: TargetOffer) -> Program:
        rank, found = offer.party.rank, route(self._layouts, offer.layouts)
        if self._rank not in found.sources_of(rank):
            raise TransferError(Reason.INCOMPATIBLE, "the target needs nothing of this rank", found=f"rank {rank}")
        return bind(found.between(self._rank, rank), self._layouts[self._rank], offer.layouts[rank])

    def _bundles(self, offer: TargetOffer) -> tuple[Bundle, ...]:
        rank = offer.party.rank
        legs = route(self._layouts, offer.layouts).between(self._rank, rank)
        return bundles(legs, self._layouts[self._rank], offer.layouts[rank], NUM_BUNDLES)

    def _ends(self, known: _Target) -> float:
        return known.last_heard + PATIENCE * self._timing.idle_peer_s

    def _forget(self, party: Party) -> Disconnect:
        del self._known[party]
        return Disconnect(party)


def _is_met_anew(known: Party, party: Party) -> bool:
    """Whether a known target is the same rank, maybe of another start: its memory need not be kept mapped then."""
    return (known.engine_id, known.rank) == (party.engine_id, party.rank)
