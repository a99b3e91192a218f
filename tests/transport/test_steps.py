"""What a self-test copies, and in which order: reads and writes take turns."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from kvferry.plan.programs.copies import Direction
from kvferry.transport.selection.probe import MARK_BYTES, Probe
from kvferry.transport.selection.self_test_steps import NUM_ROUNDS, READS, WRITES, ScratchBuffer, StepKind, all_steps

SIZE_BYTES, FAR, NEAR = 1 << 16, 1 << 30, 1 << 20
MARK = FAR + SIZE_BYTES + MARK_BYTES


def scratch(num_marks: int = 4) -> ScratchBuffer:
    return ScratchBuffer(NEAR, Probe(FAR, SIZE_BYTES, 3, num_marks))


def test_each_kind_is_copied_several_times_and_the_directions_take_turns() -> None:
    steps = all_steps(scratch(), [MARK])
    counts = Counter(step.kind for step in steps)
    assert {counts[kind] for kind in (*READS, *WRITES)} == {NUM_ROUNDS}
    assert (counts[StepKind.MARK_BACK], counts[StepKind.WHOLE_BACK]) == (1, 1)
    # Between two copies of one kind there is one of the other direction, of each kind but the mark.
    for kind in (*READS, *WRITES):
        others = WRITES if kind in READS else READS
        for first, second in pairwise(number for number, step in enumerate(steps) if step.kind is kind):
            assert set(others) <= {step.kind for step in steps[first:second]}


def test_a_mark_is_looked_at_right_after_it_was_written_for_the_last_time() -> None:
    kinds = [step.kind for step in all_steps(scratch(), [MARK])]
    assert kinds[kinds.index(StepKind.MARK_BACK) - 1] is StepKind.MARK
    assert StepKind.MARK not in kinds[kinds.index(StepKind.MARK_BACK) :]


def test_what_is_written_all_over_is_looked_at_last() -> None:
    assert all_steps(scratch(), [MARK])[-1].kind is StepKind.WHOLE_BACK


def test_without_a_mark_there_is_none() -> None:
    assert {StepKind.MARK, StepKind.MARK_BACK}.isdisjoint(step.kind for step in all_steps(scratch(), []))


def test_a_probe_that_may_only_be_read_is_only_read() -> None:
    steps = all_steps(scratch(num_marks=0), [])
    assert {step.direction for step in steps} == {Direction.READ}
    assert Counter(step.kind for step in steps) == dict.fromkeys(READS, NUM_ROUNDS)
    assert scratch(num_marks=0).size_bytes == SIZE_BYTES


def test_nothing_is_read_into_what_is_written_and_every_copy_stays_within_its_memory() -> None:
    room = scratch()
    for step in all_steps(room, [MARK]):
        far, near = step.copies.source, step.copies.target
        if step.direction is Direction.WRITE:
            far, near = near, far
        last = int((near + step.copies.length).max())
        assert FAR <= int(far.min()) < int((far + step.copies.length).max()) <= MARK + MARK_BYTES
        if step.direction is Direction.READ:
            assert NEAR <= int(near.min()) < last <= room.write_address
        else:
            assert room.write_address <= int(near.min()) < last <= NEAR + room.size_bytes
