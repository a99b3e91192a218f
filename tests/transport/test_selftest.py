"""A self-test measures, notices wrong bytes, and ends in time whatever the peer does."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from itertools import count

import numpy as np
import pytest
from faulty_transport import Fault, FaultKind, FaultyTransport
from memory_transport import MemoryFabric, MemoryTransport

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.testing.transports.peer import PeerProcess, digest, make_transport
from kvferry.testing.transports.world import World
from kvferry.transport.base import Completion, Direction, Memory, Ticket
from kvferry.transport.selection import self_test
from kvferry.transport.selection.measurement import Measurement
from kvferry.transport.selection.probe import MARK_BYTES, pattern
from kvferry.transport.selection.self_test import HUNG_S, PROBE_BYTES, Probe, SelfTest, fill_probe, measure
from kvferry.transport.selection.self_test_steps import StepKind


def ticking(step_s: float) -> Callable[[], float]:
    ticks = count()
    return lambda: next(ticks) * step_s


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def start(*faults: Fault) -> World:
        fabric = MemoryFabric()
        made.append(World(lambda: FaultyTransport(MemoryTransport(fabric), faults)))
        return made[0]

    yield start
    for world in made:
        world.close()


def probe_of(world: World, seed: int = 9) -> Probe:
    fill_probe(world.far.views[0], seed)
    return Probe(world.far.address(0, 0), world.far.views[0].size, seed)


def test_without_memory_for_it_a_test_has_failed_and_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, worlds: Callable[..., World]
) -> None:
    """A peer says how long its probe is."""

    def no_memory(size_bytes: int, seed: int) -> np.ndarray:
        raise MemoryError

    world = worlds()
    monkeypatch.setattr(self_test, "pattern", no_memory)
    test = SelfTest(world.near.transport, "far", probe_of(world))
    test.start(0.0)
    assert test.is_settled
    assert test.result is not None
    assert test.result.error == f"no memory for a probe of {probe_of(world).size_bytes} bytes"


def test_a_healthy_peer_is_measured(worlds: Callable[..., World]) -> None:
    """Every copy takes as long as the small one: half of that counts."""
    world = worlds()
    probe = probe_of(world)
    found = measure(world.near.transport, "far", probe, ticking(0.001))
    assert found.error == ""
    assert found.latency_s == pytest.approx(0.001)
    assert found.gigabytes_per_s == pytest.approx(probe.size_bytes / 0.0005 / 1e9)
    assert found.row_gigabytes_per_s == pytest.approx(probe.size_bytes // 8192 * 4096 / 0.0005 / 1e9)
    assert len(world.near.transport._inner._registry.memories) == 2


def test_what_counts_is_the_time_of_copies_alone(worlds: Callable[..., World]) -> None:
    """And of these what they take beside the small one. To look at what has come takes far longer here."""
    world, now = worlds(), 0.0
    probe = probe_of(world)
    test = SelfTest(world.near.transport, "far", probe, 10_000.0)
    test.start(now)
    while test.result is None:
        now += 50.0
        test.advance([], now)
        assert test.must_poll_now
        now += {1: 0.25, probe.size_bytes // 8192: 2.25}[len(test._steps[0].copies)]
        now += 1.0 if test._steps[0].kind is StepKind.WHOLE else 0.0
        test.advance(world.near.transport.poll(), now)
        assert test.must_poll_now == (test.result is None)
    found = test.result
    assert (found.error, found.latency_s) == ("", 0.25)
    assert found.gigabytes_per_s == pytest.approx(probe.size_bytes / 1e9)
    assert found.row_gigabytes_per_s == pytest.approx(probe.size_bytes // 8192 * 4096 / 2.0 / 1e9)


def test_nobody_goes_on_waiting_for_a_copy_that_hangs(worlds: Callable[..., World]) -> None:
    world = worlds()
    test = SelfTest(world.near.transport, "far", probe_of(world), 10_000.0)
    test.start(0.0)
    assert not test.is_copying(0.0)
    test.advance([], 1.0)
    assert test.is_copying(1.0 + HUNG_S / 2)
    assert not test.is_copying(1.0 + HUNG_S)
    world.near.transport.poll()


@pytest.mark.parametrize("post", range(9))
@pytest.mark.parametrize("kind", FaultKind)
def test_faults_become_errors(worlds: Callable[..., World], kind: FaultKind, post: int) -> None:
    world = worlds(Fault(post, kind, polls=10_000, bit=31))
    found = measure(world.near.transport, "far", probe_of(world), ticking(0.01))
    assert found.error
    assert world.near.transport.name == found.name == "memory"


@pytest.mark.parametrize("size", [0, -1, 100, 1 << 40])
def test_a_nonsense_probe_is_an_error(worlds: Callable[..., World], size: int) -> None:
    world = worlds()
    assert measure(world.near.transport, "far", Probe(world.far.address(0, 0), size, 1)).error


def test_wrong_patterns_places_and_peers_are_errors(worlds: Callable[..., World]) -> None:
    world = worlds()
    probe = probe_of(world)
    wrong = measure(world.near.transport, "far", Probe(probe.address, probe.size_bytes, probe.seed + 1))
    assert "bytes are wrong" in wrong.error
    outside = measure(world.near.transport, "far", Probe(1 << 20, probe.size_bytes, 1))
    assert "registered memory" in outside.error
    assert "not connected" in measure(world.near.transport, "nobody", probe).error


def test_scratch_memory_stays_registered_until_the_late_ticket_has_ended(worlds: Callable[..., World]) -> None:
    world = worlds(Fault(0, FaultKind.DELAY, polls=5))
    transport = world.near.transport
    test = SelfTest(transport, "far", probe_of(world))
    test.start(0.0)
    for turn in range(40):
        test.advance([], 0.05 * turn)
    assert test.result is not None
    assert "no answer" in test.result.error
    assert len(transport._inner._registry.memories) == 3
    while not test.is_settled:
        test.advance(transport.poll(), 3.0)
    assert len(transport._inner._registry.memories) == 2


def test_scratch_memory_that_a_transport_does_not_give_back_stays_and_nothing_else_happens(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds()

    def refuse(memory: Memory) -> None:
        raise TransportError("cannot take memory back")

    monkeypatch.setattr(world.near.transport, "unregister", refuse)
    monkeypatch.setattr(self_test, "_unsettled", kept := [])
    assert not measure(world.near.transport, "far", probe_of(world)).error
    assert len(kept) == 1
    assert "cannot take memory back" in caplog.text


def test_a_test_whose_thread_had_no_turn_goes_on(worlds: Callable[..., World]) -> None:
    transport = (world := worlds()).near.transport
    test = SelfTest(transport, "far", probe_of(world))
    test.start(0.0)
    test.advance([], 60.0)
    while test.result is None:
        test.advance(transport.poll(), 60.0)
    assert test.result.error == ""


@pytest.mark.parametrize("empty", range(9))
def test_a_read_that_brings_nothing_is_noticed(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch, empty: int
) -> None:
    world = worlds()
    transport, posts = world.near.transport, count()
    post = transport.post

    def post_nothing_once(peer: str, copies: Copies, direction: Direction) -> Ticket:
        rows = slice(0, 0 if next(posts) == empty else len(copies))
        return post(peer, Copies(copies.source[rows], copies.target[rows], copies.length[rows], 1), direction)

    monkeypatch.setattr(transport, "post", post_nothing_once)
    assert "bytes are wrong" in measure(transport, "far", probe_of(world)).error


def test_completions_of_others_are_left_alone(worlds: Callable[..., World]) -> None:
    world = worlds()
    copies_nothing = np.empty(0, np.uint64)
    other = world.post(Copies(copies_nothing, copies_nothing, copies_nothing, 0), Direction.READ)
    test = SelfTest(world.near.transport, "far", probe_of(world))
    test.start(0.0)
    seen = []
    while test.result is None:
        seen += (completions := world.near.transport.poll())
        test.advance(completions, 0.1)
    assert test.result.error == ""
    assert [completion.ticket for completion in seen].count(other) == 1


def test_the_pattern_depends_on_seed_and_position() -> None:
    first, second, short = np.empty(4099, np.uint8), np.empty(4099, np.uint8), np.empty(5, np.uint8)
    fill_probe(first, 1)
    fill_probe(second, 2)
    fill_probe(short, 1)
    assert np.array_equal(first[:5], short)
    assert np.count_nonzero(first == second) < 100
    assert len(np.unique(first)) == 256
    assert first[:8].tobytes().hex() == "2f0f5b940a2cdd00"


MARKS = 4


def writable_probe_of(world: World) -> Probe:
    """The near part of the far memory, with marks behind it."""
    view = world.far.views[0]
    size = view.size - MARKS * MARK_BYTES
    fill_probe(view[:size], 9)
    view[size:] = 0
    return Probe(world.far.address(0, 0), size, 9, MARKS)


def test_a_writable_probe_is_measured_in_both_directions(worlds: Callable[..., World]) -> None:
    world = worlds()
    probe = writable_probe_of(world)
    before = world.far.views[1].copy()
    found = measure(world.near.transport, "far", probe, ticking(0.001))
    assert (found.error, found.writing.error) == ("", "")
    assert found.writing.latency_s == pytest.approx(0.001)
    assert found.writing.gigabytes_per_s == pytest.approx(probe.size_bytes / 0.0005 / 1e9)
    assert found.carriers == ("memory",)
    # The pattern is as it was, one mark has been written, and nothing else.
    assert np.array_equal(world.far.views[0][: probe.size_bytes], pattern(probe.size_bytes, 9))
    marks = world.far.views[0][probe.size_bytes :].reshape(MARKS, MARK_BYTES)
    assert np.count_nonzero(marks.any(axis=1)) == 1
    assert np.array_equal(world.far.views[1], before)


def test_two_tests_of_one_probe_at_the_same_time_both_pass(worlds: Callable[..., World]) -> None:
    world = worlds()
    probe, transport = writable_probe_of(world), world.near.transport
    tests = [SelfTest(transport, "far", probe, deadline_s=1e9) for _ in range(3)]
    for test in tests:
        test.start(0.0)
    while not all(test.is_settled for test in tests):
        completions = transport.poll()
        for test in tests:
            test.advance(completions, 0.0)
    assert [(test.result.error, test.result.writing.error) for test in tests if test.result] == [("", "")] * 3


@pytest.mark.parametrize("post", [3, 4, 5, 9, 11, 15, 16, 18, 19])
@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.DROP])
def test_what_fails_in_writing_leaves_reading(worlds: Callable[..., World], kind: FaultKind, post: int) -> None:
    world = worlds(Fault(post, kind, polls=10_000))
    probe = writable_probe_of(world)
    found = measure(world.near.transport, "far", probe, ticking(0.01))
    assert found.error == ""
    assert found.gigabytes_per_s > 0
    assert found.row_gigabytes_per_s > 0
    assert found.writing.error
    assert np.array_equal(world.far.views[0][: probe.size_bytes], pattern(probe.size_bytes, 9))


def test_writes_that_bring_nothing_are_noticed(worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    world = worlds()
    transport, post, num_writes = world.near.transport, world.near.transport.post, count(1)

    def post_no_writes(peer: str, copies: Copies, direction: Direction) -> Ticket:
        rows = slice(0, len(copies) if direction is Direction.READ else 0)
        next(num_writes)
        return post(peer, Copies(copies.source[rows], copies.target[rows], copies.length[rows], 1), direction)

    monkeypatch.setattr(transport, "post", post_no_writes)
    found = measure(transport, "far", writable_probe_of(world), ticking(1e-6))
    assert found.error == ""
    assert f"of {MARK_BYTES} bytes are wrong" in found.writing.error


def test_a_mark_that_somebody_else_has_overwritten_is_drawn_again(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds()
    probe, transport = writable_probe_of(world), world.near.transport
    post, reads_of_marks = transport.post, count()

    def overwrite_the_first(peer: str, copies: Copies, direction: Direction) -> Ticket:
        is_mark = len(copies) == 1 and int(copies.source[0]) >= probe.mark(0)
        if direction is Direction.READ and is_mark and next(reads_of_marks) == 0:
            world.far.views[0][probe.size_bytes :] = 0
        return post(peer, copies, direction)

    monkeypatch.setattr(transport, "post", overwrite_the_first)
    found = measure(transport, "far", probe, ticking(1e-6))
    assert (found.error, found.writing.error) == ("", "")
    assert next(reads_of_marks) == 2


class Slices:
    """A clock by which each copy takes a millisecond, and those of `lost` (by their number) a long time slice more."""

    def __init__(self, lost: Container[int]) -> None:
        self.lost, self.now, self.num_copies = lost, 0.0, 0

    def advance(self, test: SelfTest, completions: Sequence[Completion]) -> None:
        if completions:
            self.now += LOST_SLICE_S if self.num_copies in self.lost else COPY_S
            self.num_copies += 1
        test.advance(completions, self.now)


COPY_S, LOST_SLICE_S = 0.001, 0.1
# Nine reads, eight writes and what is read back, as `all_steps` has them.
NUM_COPIES = 20


def measured_with(world: World, lost: Container[int]) -> tuple[Measurement, int]:
    test, slices = SelfTest(world.near.transport, "far", writable_probe_of(world), 60.0), Slices(lost)
    test.start(0.0)
    while test.result is None:
        slices.advance(test, world.near.transport.poll())
    return test.result, slices.num_copies


@pytest.mark.parametrize("first", range(NUM_COPIES - 5))
def test_what_a_busy_machine_takes_for_a_while_is_no_verdict(worlds: Callable[..., World], first: int) -> None:
    """Six copies in a row: whole all_steps of either direction."""
    found, num_copies = measured_with(worlds(), range(first, first + 6))
    assert not found.is_asymmetric
    assert num_copies == NUM_COPIES
    assert found.gigabytes_per_s == pytest.approx(found.writing.gigabytes_per_s)


READ_COPIES = (0, 1, 2, 6, 7, 8, 12, 13, 14)


def test_a_direction_that_seems_far_slower_is_looked_at_again(worlds: Callable[..., World]) -> None:
    found, num_copies = measured_with(worlds(), READ_COPIES)
    assert not found.is_asymmetric
    assert num_copies > NUM_COPIES


def test_one_that_is_far_slower_is_said_to_be(worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    world = worlds()
    transport, is_read = world.near.transport, []
    post = transport.post

    def note(peer: str, copies: Copies, direction: Direction) -> Ticket:
        is_read.append(direction is Direction.READ)
        return post(peer, copies, direction)

    class Reads:
        def __contains__(self, number: object) -> bool:
            return is_read[number]

    monkeypatch.setattr(transport, "post", note)
    found, num_copies = measured_with(world, Reads())
    assert found.times_slower(Direction.READ) == pytest.approx(LOST_SLICE_S / COPY_S)
    assert num_copies == len(is_read) > NUM_COPIES
    assert is_read.count(True) == 2 * 9 + 3


def test_the_time_for_a_second_look_is_no_reason_to_fail(worlds: Callable[..., World]) -> None:
    world = worlds()
    transport = world.near.transport
    test, slices = SelfTest(transport, "far", writable_probe_of(world), 60.0), Slices(READ_COPIES)
    test.start(0.0)
    while slices.num_copies < NUM_COPIES:
        slices.advance(test, transport.poll())
    assert test.result is None
    for turn in range(60 * 20 + 2):
        test.advance([], slices.now + 0.05 * turn)
    assert test.result is not None
    assert (test.result.error, test.result.writing.error) == ("", "")
    assert test.result.is_asymmetric


@pytest.mark.parametrize("name", ["shm", "cma", "tcp", "nixl"])
def test_real_peers_are_measured(name: str) -> None:
    if name == "nixl":
        pytest.importorskip("nixl_cu13")
    transport = make_transport(name)
    with PeerProcess(name, PROBE_BYTES, 3) as peer:
        transport.connect("peer", peer.descriptor)
        # A slow clock: this machine may be busy, and what is tested is not its speed.
        found = measure(transport, "peer", peer.probe, ticking(1e-7))
        assert found.error == ""
        assert found.gigabytes_per_s > 0
        assert found.writing.error == ""
        assert found.writing.gigabytes_per_s > 0
        assert found.carriers
        assert peer.digest() == digest(pattern(PROBE_BYTES, 3))
    transport.close()


def test_the_pattern_of_a_probe_is_made_once_for_all_tests_of_it():
    """With many peers at once, each of them has its own."""
    held = [pattern(1 << 12, seed) for seed in range(3)]
    assert all(pattern(1 << 12, seed) is one for seed, one in enumerate(held))
    assert pattern(1 << 13, 0) is not held[0]
