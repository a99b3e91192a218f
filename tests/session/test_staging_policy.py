"""Which strategy a target takes: by price, among those that are allowed and that its sources can serve."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from playbook import play
from session_cases import PEER, answer
from session_cases import TARGET as US
from staging_cases import (
    RANGES,
    SOURCE_LAYOUT,
    SOURCE_TABLES,
    STRETCH_BYTES,
    TABLES,
    TARGET_LAYOUTS,
    TIMING,
    met,
)

from kvferry.errors import ConfigurationError, TransferError
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Copies, Direction
from kvferry.plan.programs.program import RegionStarts, bind, region_starts
from kvferry.plan.programs.request import copies_for
from kvferry.plan.routing.route import route
from kvferry.plan.slots import slot_plan
from kvferry.plan.strategy.calibration import TYPICAL_HOST
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import Acquire, Post, Send
from kvferry.session.events import PeerConnected
from kvferry.session.slot import SLOT_TABLE, SlotState
from kvferry.session.target.peers.handshakes import TargetIdentity
from kvferry.session.target.read_strategy import AUTO, NO_STAGING, StagingPolicy, TransferMode, allowed_by
from kvferry.session.target.session import TargetSession
from kvferry.wire import messages as m

pytestmark = pytest.mark.usefixtures("three_slots_at_a_time")


def test_strategies_have_names():
    assert allowed_by("auto") == AUTO
    assert allowed_by("pack") == (Strategy.PACK,)
    with pytest.raises(ConfigurationError, match="auto or direct or scatter or pack"):
        allowed_by("fast")


def test_what_is_left_without_packing():
    assert not StagingPolicy(AUTO, 1).is_packing_only
    assert StagingPolicy((Strategy.PACK,), 1).is_packing_only


def test_a_slot_goes_round_once():
    over = {state for (_, event), state in SLOT_TABLE.items() if event in ("emptied", "ended")}
    assert over == {SlotState.OVER}


def test_a_strategy_is_chosen_among_those_that_are_allowed():
    program = bind_of_both()
    cheap_rows, dear_rows = (replace(TYPICAL_HOST, row_s=row_s) for row_s in (1e-12, 1.0))
    policy = StagingPolicy(AUTO, STRETCH_BYTES)
    packed = TransferMode(Direction.WRITE, Strategy.PACK)
    assert policy.before_claim(program, RANGES, cheap_rows, Direction.READ) == TransferMode(Direction.READ)
    assert policy.before_claim(program, RANGES, dear_rows, Direction.READ) == packed
    only_runs = StagingPolicy((Strategy.SCATTER,), STRETCH_BYTES)
    assert only_runs.before_claim(program, RANGES, cheap_rows, Direction.WRITE) == packed
    # What is read may be scattered: that is decided when the rows are known.
    assert only_runs.before_claim(program, RANGES, cheap_rows, Direction.READ) == TransferMode(Direction.READ)
    copies, starts = copies_for(program, SOURCE_TABLES, TABLES, RANGES), region_starts(SOURCE_LAYOUT, TARGET_LAYOUTS[0])
    assert policy.before_read(copies, cheap_rows, starts) is Strategy.DIRECT
    assert policy.before_read(copies, dear_rows, starts) is Strategy.SCATTER
    assert StagingPolicy((Strategy.PACK,), 1).before_read(copies, dear_rows, starts) is Strategy.DIRECT


@pytest.mark.parametrize(("wire_rows", "expected"), [(1, Strategy.SCATTER), (16, Strategy.DIRECT)])
def test_runs_end_where_stretches_do(wire_rows, expected):
    """Blocks that are neighbours at the source are one run only if they are read together."""
    rows = np.arange(64, dtype=np.uint64)
    copies = Copies(rows * np.uint64(4096), rows * np.uint64(8192), np.full(64, 4096, np.uint64), 64)
    costs = replace(TYPICAL_HOST, row_s=1e-3)
    policy, starts = StagingPolicy(AUTO, 1 << 20), RegionStarts(np.zeros(1, np.uint64), np.zeros(1, np.uint64))
    assert policy.before_read(copies, costs, starts) is Strategy.SCATTER
    wire = Copies(*[np.zeros(wire_rows, np.uint64)] * 3, wire_rows)
    slot = slot_plan.Slot(16 * 4096, (), wire, ())
    assert policy.when_cut(copies, costs, (slot,)) is expected
    assert policy.when_cut(copies, costs, ()) is Strategy.SCATTER
    assert StagingPolicy((Strategy.SCATTER,), 1).when_cut(copies, costs, (slot,)) is Strategy.SCATTER


@pytest.mark.parametrize(("num_stretches", "expected"), [(1, Acquire), (4, Post)])
def test_what_is_worth_staging_only_in_one_piece_moves_straight_where_it_is_cut(num_stretches, expected):
    table = (1, 2, 3, 4)
    policy = StagingPolicy((Strategy.DIRECT, Strategy.SCATTER), 4 // num_stretches * STRETCH_BYTES)
    starts = region_starts(SOURCE_LAYOUT, TARGET_LAYOUTS[0])
    copies = copies_for(bind_of_both(), (table,), TABLES, RANGES)
    dearer = (replace(TYPICAL_HOST, row_s=row_s) for row_s in np.geomspace(1e-9, 1.0, 2000).tolist())
    costs = next(each for each in dearer if policy.before_read(copies, each, starts) is Strategy.SCATTER)
    session = TargetSession(TargetIdentity(US, "0.1.0", TARGET_LAYOUTS, staging=policy), TIMING)
    play(session, [*met(), (0.3, PeerConnected(PEER, "shm", "", costs), [Send])])
    play(session, [(0.4, answer(m.Grant("q1", (table,))), [expected])])


@pytest.mark.parametrize(
    ("descriptor", "is_near", "expected"),
    [(b"here", True, m.TargetOffer), (b"", True, m.Claim), (b"here", False, m.Claim)],
)
def test_where_nobody_can_attach_staging_memory_pack_has_a_wire(descriptor, is_near, expected):
    """However near the source is."""
    policy, program = StagingPolicy(AUTO, 1 << 20), bind_of_both()

    def is_packed(costs):
        return policy.before_claim(program, RANGES, costs, Direction.READ).strategy is Strategy.PACK

    dearer = (replace(TYPICAL_HOST, row_s=row_s) for row_s in np.geomspace(1e-9, 1.0, 2000).tolist())
    cheap = (each for each in dearer if not is_packed(each))
    costs = next(each for each in cheap if is_packed(replace(each, gathers_into_peer=True)))
    ours = TargetIdentity(US, "0.1.0", TARGET_LAYOUTS, staging_descriptor=descriptor, staging=policy)
    session = TargetSession(ours, TIMING)
    connected = PeerConnected(PEER, "shm", "", replace(costs, gathers_into_peer=is_near))
    (asked,) = play(session, [*met(), (0.3, connected, [Send])])
    assert isinstance(asked.message, expected)
    if isinstance(asked.message, m.TargetOffer):
        assert asked.message.staging == descriptor
        # The source knows better: what can be read need not be packed after all.
        for reaches, claimed in ((False, Strategy.DIRECT), (True, Strategy.PACK)):
            source = copy.deepcopy(session)
            (claim,) = play(source, [(0.4, answer(m.Reached("shm", "", reaches)), [Send])])
            assert claim.message.strategy is claimed


@pytest.mark.parametrize(("slot_bytes", "expected"), [(64, Strategy.DIRECT), (1 << 20, Strategy.PACK)])
def test_a_price_is_that_of_the_slots_that_are_used(slot_bytes, expected):
    """Each slot costs something: many small ones cost more than the rows do."""
    costs = replace(TYPICAL_HOST, row_s=1e-4, launch_s=1e-3)
    found = StagingPolicy(AUTO, slot_bytes).before_claim(bind_of_both(), RANGES, costs, Direction.READ)
    assert found.strategy is expected


def test_what_would_be_shared_and_cannot_be_cut_is_packed_if_that_is_next():
    """Four tokens are one block."""
    program, ranges = bind_of_both(), (TokenRange(0, 4),)
    packed, shared = TransferMode(Direction.WRITE, Strategy.PACK), TransferMode(Direction.READ, read_from=8)
    policy = StagingPolicy(AUTO, 1 << 20)
    dearer = [replace(TYPICAL_HOST, row_s=row_s) for row_s in np.geomspace(1e-9, 1.0, 2000).tolist()]
    costs = next(each for each in dearer if policy.before_claim(program, RANGES, each, Direction.READ) == packed)
    both = replace(costs, sharing_s=1e-12)
    assert policy.before_claim(program, RANGES, both, Direction.READ) == shared
    few = next(each for each in dearer if policy.before_claim(program, ranges, each, Direction.READ) == packed)
    assert policy.before_claim(program, ranges, replace(few, sharing_s=1e-12), Direction.READ) == packed


def bind_of_both():
    found = route((SOURCE_LAYOUT,), TARGET_LAYOUTS)
    return bind(found.between(0, 0), SOURCE_LAYOUT, TARGET_LAYOUTS[0])


def test_blocks_that_no_transport_reaches_are_packed_or_nothing():
    assert StagingPolicy(AUTO, 1).packing_only("p0") == TransferMode(Direction.WRITE, Strategy.PACK)
    with pytest.raises(TransferError, match="only be reached through its staging memory"):
        StagingPolicy((Strategy.DIRECT,), 1).packing_only("p0")


@pytest.mark.parametrize(
    ("allowed", "slot_bytes"),
    [
        ((), 1 << 20),
        (AUTO, 0),
        ((Strategy.PACK,), 0),
        ((Strategy.DIRECT, Strategy.SCATTER), -5),
        ((Strategy.DIRECT,), -1),
    ],
)
def test_a_policy_that_nothing_can_be_moved_with_is_refused(allowed, slot_bytes):
    with pytest.raises(ConfigurationError):
        StagingPolicy(allowed, slot_bytes)
    assert StagingPolicy((Strategy.DIRECT,), 0) == NO_STAGING
