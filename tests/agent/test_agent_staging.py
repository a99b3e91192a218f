"""Staging: real agents over real transports, whose bytes go through slots of staging memory on one side or on both."""

import pytest
from agent_support import (
    BYTES_PER_TOKEN,
    NIXL,
    NUM_TOKENS,
    SOURCE,
    SOURCE_TABLES,
    TARGET,
    check,
    fetch_from_all,
    leased,
    moved,
    moved_between_all,
    num_mappings,
    until_slots_are_free,
    wire_only,
)
from engines import oracle

from kvferry import new_lease_id
from kvferry.agent.loop import agent
from kvferry.plan.description.describe import EngineShape
from kvferry.plan.description.tokens import TokenRange
from kvferry.plan.programs.copies import Direction
from kvferry.plan.strategy.strategies import Strategy
from kvferry.session.commands import BlocksReleased, Fetched, FetchFailed, LeaseEnded
from kvferry.session.events import Ahead, LeaseProgress, LeaseRequest
from kvferry.session.source import writes
from kvferry.session.target.read_strategy import StagingPolicy

# About five tokens: several slots, and more than the window.
SLOT_BYTES = 5 * BYTES_PER_TOKEN
TRANSPORTS = ["shm", "cma", "tcp", NIXL]


def only(strategy, slot_bytes=SLOT_BYTES):
    return StagingPolicy((strategy,), slot_bytes)


@pytest.mark.parametrize("strategy", [Strategy.SCATTER, Strategy.PACK])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_arrive_through_staging_memory(make_rank, transport, strategy):
    source = make_rank("p0", SOURCE, transport)
    target = make_rank("d0", TARGET, transport, staging=only(strategy))
    for number in (1, 2):
        report = moved(source, target, number)
        assert (report.num_bytes, report.strategy) == (NUM_TOKENS * BYTES_PER_TOKEN, strategy)
        until_slots_are_free(source, target)
    num_bytes = 2 * NUM_TOKENS * BYTES_PER_TOKEN if strategy is Strategy.PACK else 0
    assert source.agent.moved_bytes[Direction.WRITE] == num_bytes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_sources_that_are_met_at_once_both_pack(make_rank, transport):
    """Scratch memory of the test of one is no part of what the other is offered."""
    sources = [make_rank(name, SOURCE, transport) for name in ("p0", "p1")]
    target = make_rank("d0", TARGET, transport, staging=only(Strategy.PACK))
    references = [leased(source) for source in sources]
    for number, tables in enumerate((((8, 0, 5, 2),), ((1, 3, 4, 6),))):
        target.fetch(sources[number], references[number], f"q{number}", tables)
    reports = [target.next_notice(Fetched).report for _ in sources]
    assert [report.strategy for report in reports] == [Strategy.PACK] * 2


@pytest.mark.parametrize(
    ("transport", "mover", "passes"),
    [("shm", None, 2), ("cma", None, 2), ("tcp", None, 3), ("shm", wire_only, 3)],
    ids=["shm", "cma", "tcp", "shm, but the source's mover cannot"],
)
def test_where_processors_copy_the_source_gathers_into_the_targets_slots(
    make_rank, transport, mover, passes, monkeypatch
):
    """Then there is nothing left to put on a wire, and the target knows. How long the self-test's copies take beside
    other tests must not matter here."""
    monkeypatch.setattr("kvferry.transport.selection.measurement.FAR_SLOWER", 1e9)
    monkeypatch.setattr("kvferry.transport.selection.diagnosis.FAR_SLOWER", 1e9)
    source = make_rank("p0", SOURCE, transport, **({"mover": mover} if mover else {}))
    target = make_rank("d0", TARGET, transport, staging=only(Strategy.PACK))
    moved(source, target)
    (met,) = target.agent._event_loop.target._peers
    assert met.costs.gathers_into_peer == (passes == 2)
    sent = source.agent._event_loop.transports.moved_bytes[Direction.WRITE]
    assert (sent > 0) == (passes == 3)
    assert source.agent.moved_bytes[Direction.WRITE] == NUM_TOKENS * BYTES_PER_TOKEN
    # Attached in this process, too, where both ranks live, until the source ends; over shm by the transport as well.
    arena = target.agent._arena.memory
    assert (num_mappings(arena) > 1) == (passes == 2 or transport == "shm")
    source.agent.close()
    assert num_mappings(arena) == 1


def test_a_target_that_is_written_to_can_have_it_packed(make_rank):
    source = make_rank("p0", SOURCE)
    target = make_rank("d0", TARGET, direction=Direction.WRITE, staging=only(Strategy.PACK))
    assert moved(source, target).strategy == "pack"


def test_a_packed_slot_is_one_row_on_the_wire(make_rank):
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET, staging=only(Strategy.PACK, 1 << 20))
    assert moved(source, target).num_rows == 1


@pytest.mark.parametrize(("of_source", "of_target", "num_peers"), [(2, 1, 2), (4, 2, 2), (2, 4, 1), (2, 2, 1)])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_unequal_parallelism_by_tokens_is_one_row_per_peer_and_chunk(
    make_engine, of_source, of_target, num_peers, num_chunks
):
    """Piece by piece it would be a row for each token, layer, head, key and value."""
    sources = make_engine("p0", EngineShape(of_source, 1, 4, 16, "token-major"))
    staging = only(Strategy.PACK, BYTES_PER_TOKEN * 24 // num_chunks // max(of_source, of_target))
    targets = make_engine("d0", EngineShape(of_target, 1, 4, 16, "token-major"), staging=staging)
    reports = moved_between_all(sources, targets, SOURCE_TABLES)
    assert {report.num_rows for report in reports} == {num_peers * num_chunks}


def test_slots_are_no_larger_than_the_source_has_room_for(make_rank):
    source = make_rank("p0", SOURCE, staging_bytes=1 << 14, staging=only(Strategy.DIRECT, 1 << 10))
    target = make_rank("d0", TARGET, staging=only(Strategy.PACK, 1 << 20))
    report = moved(source, target)
    assert report.num_rows == -(-report.num_bytes // 4096)


def test_slots_that_staging_memory_can_never_have_are_an_error(make_rank, monkeypatch):
    """As no source of ours offers them."""
    monkeypatch.setattr(agent, "slot_bytes_in", lambda staging_bytes: 1 << 20)
    small = {"staging_bytes": 1 << 14, "staging": only(Strategy.DIRECT, 1 << 10)}
    source = make_rank("p0", SOURCE, mover=wire_only, **small)
    target = make_rank("d0", TARGET, staging=only(Strategy.PACK, 1 << 20))
    target.fetch(source, leased(source))
    assert "the slot is larger than staging memory" in str(target.next_notice(FetchFailed).error)
    target.next_notice(BlocksReleased)
    assert source.next_notice(LeaseEnded).reason == "aborted"
    until_slots_are_free(source, target)


GROWING = {
    "pull": {"staging": only(Strategy.DIRECT)},
    "push": {"staging": only(Strategy.DIRECT), "direction": Direction.WRITE},
    "pack": {"staging": only(Strategy.PACK)},
}


@pytest.mark.parametrize("way", GROWING)
@pytest.mark.parametrize("cuts", [(21,), (5, 8, 21), (20, 21)])
def test_tokens_are_sent_while_others_are_still_computed(make_rank, way, cuts, monkeypatch):
    """The source's cache is filled up to where the lease has grown, and not further."""
    monkeypatch.setattr(writes, "STRETCH_BYTES", SLOT_BYTES)
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET, **GROWING[way])
    wanted = LeaseRequest("r1", new_lease_id(), ((),), NUM_TOKENS, is_growing=True)
    reference = source.agent.lease(wanted)
    target.fetch(source, reference)
    for last in cuts:
        oracle.fill(source.memory, SOURCE_TABLES, TokenRange(0, last))
        num_blocks = -(-last // SOURCE.block_tokens)
        source.agent.grow(LeaseProgress("r1", (SOURCE_TABLES[0][:num_blocks],), last))
    assert target.next_notice(Fetched).report.num_bytes == NUM_TOKENS * BYTES_PER_TOKEN
    check(target)
    assert source.next_notice(LeaseEnded) == LeaseEnded("r1", "done")
    until_slots_are_free(source, target)


@pytest.mark.parametrize("way", GROWING)
def test_states_are_sent_while_others_are_still_computed(make_rank, way, monkeypatch):
    """The bytes of each state are there when the source is told so, and not before."""
    monkeypatch.setattr(writes, "STRETCH_BYTES", 1)
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET, **GROWING[way])
    oracle.fill(source.memory, SOURCE_TABLES, TokenRange(0, NUM_TOKENS))
    whole = {start: buffer.copy() for start, buffer in source.memory.buffers.items()}
    for buffer in source.memory.buffers.values():
        buffer[:] = 0
    reference = source.agent.lease(LeaseRequest("r1", new_lease_id(), ((),), NUM_TOKENS, is_growing=True))
    target.fetch(source, reference)
    for number in range(len(source.memory.layout.states)):
        fill_state(source.memory, number, whole)
        source.agent.grow(LeaseProgress("r1", SOURCE_TABLES, 0, Ahead(NUM_TOKENS, number + 1)))
    source.agent.grow(LeaseProgress("r1", SOURCE_TABLES, NUM_TOKENS))
    assert target.next_notice(Fetched).report.num_bytes == NUM_TOKENS * BYTES_PER_TOKEN
    check(target)
    assert source.next_notice(LeaseEnded) == LeaseEnded("r1", "done")


def fill_state(memory, number, whole):
    """All tokens of one state of the request, out of a copy of the whole memory."""
    layout, tokens = memory.layout, TokenRange(0, NUM_TOKENS)
    placement = layout.placement_of()[layout.states[number].name]
    start = layout.regions[placement.region].address
    for _, _, address in oracle.element_addresses(layout, placement, SOURCE_TABLES, tokens):
        there = slice(address - start, address - start + layout.states[number].item_bytes)
        memory.buffers[start][there] = whole[start][there]


@pytest.mark.parametrize("way", GROWING)
def test_a_prefill_that_comes_to_nothing_ends_the_fetches_of_it(make_rank, way):
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET, **GROWING[way])
    reference = source.agent.lease(LeaseRequest("r1", new_lease_id(), ((),), NUM_TOKENS, is_growing=True))
    target.fetch(source, reference)
    oracle.fill(source.memory, SOURCE_TABLES, TokenRange(0, 8))
    source.agent.grow(LeaseProgress("r1", ((3, 9),), 8))
    source.agent.withdraw("r1")
    assert target.next_notice(FetchFailed).error.reason == "expired"
    target.next_notice(BlocksReleased)
    assert source.next_notice(LeaseEnded) == LeaseEnded("r1", "withdrawn")
    until_slots_are_free(source, target)


def test_prompts_that_are_still_computed_keep_no_staging_memory_from_others(make_rank):
    """Room for two slots, and five prompts of which nothing is computed."""
    source, target = make_rank("p0", SOURCE), make_rank("d0", TARGET, staging_bytes=4 << 12, **GROWING["pack"])
    growing = [f"r{number}" for number in range(5)]
    for request_id in growing:
        reference = source.agent.lease(LeaseRequest(request_id, new_lease_id(), ((),), NUM_TOKENS, is_growing=True))
        target.fetch(source, reference, f"q of {request_id}")
    target.fetch(source, leased(source, "computed"), "q of computed")
    assert target.next_notice(Fetched).request_id == "q of computed"
    check(target)
    until_slots_are_free(target)
    for request_id in growing:
        source.agent.grow(LeaseProgress(request_id, SOURCE_TABLES, NUM_TOKENS))
    assert {target.next_notice(Fetched).request_id for _ in growing} == {f"q of {each}" for each in growing}
    check(target)
    assert {source.next_notice(LeaseEnded).reason for _ in range(6)} == {"done"}


def test_far_more_than_staging_memory_holds_waits_for_its_turn(make_rank, gate):
    """Room for two slots at the source and at each target; thirty requests of five slots each, behind a gate."""
    config = {"staging_bytes": 4 << 12, "staging": only(Strategy.PACK)}
    source = make_rank("p0", SOURCE, wrap=gate.behind, mover=wire_only, **config)
    targets = [make_rank(f"d{number}", TARGET, **config) for number in range(3)]
    for target in targets:
        moved(source, target)
    gate.shut()
    for number in range(30):
        targets[number % 3].fetch(source, leased(source, f"r{number}"), f"q{number}")
    for _ in range(2):
        gate.wait_for_post()
    gate.open()
    for target in targets:
        reports = [target.next_notice(Fetched).report for _ in range(10)]
        assert {report.num_bytes for report in reports} == {NUM_TOKENS * BYTES_PER_TOKEN}
        check(target)
    assert {source.next_notice(LeaseEnded).reason for _ in range(30)} == {"done"}
    until_slots_are_free(source, *targets)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_source_that_hangs_leaves_staging_memory_to_others(make_engine, make_rank, gate, num_ranks):
    """Room for four slots at the target, and what hangs wants fifteen, however many ranks it has."""
    hanging = make_engine("p0", EngineShape(num_ranks, 1, 4, 16, "token-major"), wrap=gate.behind, mover=wire_only)
    other = make_rank("p1", SOURCE)
    target = make_rank("d0", TARGET, staging_bytes=8 << 12, staging=only(Strategy.PACK))

    moved_between_all(hanging, [target])
    gate.shut()
    for number in range(3):
        fetch_from_all(hanging, [target], number)
    for _ in range(3):
        gate.wait_for_post()
    target.fetch(other, leased(other), "other")
    assert target.next_notice(Fetched).request_id == "other"
    gate.open()
    assert {target.next_notice(Fetched).request_id for _ in range(3)} == {"q0", "q1", "q2"}
    check(target)
    until_slots_are_free(target)


@pytest.mark.parametrize("strategy", [Strategy.SCATTER, Strategy.PACK])
def test_targets_of_different_parallelism_share_one_source(make_engine, strategy):
    """Two source ranks; targets with one rank and with four: each gets its own share of the heads."""
    sources = make_engine("p0", EngineShape(2, 1, 4, 16, "token-major"))
    shapes = [EngineShape(size, 1, 6, 9, "block-head-major") for size in (1, 4)]
    engines = [make_engine(f"d{n}", shape, staging=only(strategy)) for n, shape in enumerate(shapes)]
    for number, ranks in enumerate(engines):
        fetch_from_all(sources, ranks, number)
    for ranks in engines:
        for rank in ranks:
            assert rank.next_notice(Fetched).report.strategy == strategy
            check(rank)
    for source in sources:
        assert {source.next_notice(LeaseEnded).reason for _ in engines} == {"done"}
