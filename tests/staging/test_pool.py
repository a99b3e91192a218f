"""The pool's promises, one by one and in any order of requests."""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.errors import ConfigurationError, IllegalEventError, TransferError
from kvferry.staging.free_list import Extent, FreeList
from kvferry.staging.pool import Pool, Slot

MIB = 1 << 20


def rounded(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


class Model(RuleBasedStateMachine):
    """Everything that a pool may never do, whatever it is asked."""

    @initialize(
        units=st.integers(1, 40),
        alignment=st.sampled_from([1, 16, 4096]),
        rest=st.integers(0, 15),
        share=st.sampled_from([inf, 0.5, 0.3, 0.0]),
    )
    def make(self, units: int, alignment: int, rest: int, share: float) -> None:
        self.alignment, self.size = alignment, units * alignment
        self.most = share * self.size
        self.pool = Pool(self.size + min(rest, alignment - 1), alignment, self.most)
        self.held: dict[int, Slot] = {}
        self.owner_of: dict[int, str] = {}
        self.waiting: dict[int, tuple[str, int]] = {}
        self.line: list[str] = []
        self.num_asked = 0

    @rule(owner=st.sampled_from("abcd"), share=st.floats(0, 1), times=st.integers(1, 3))
    def ask(self, owner: str, share: float, times: int) -> None:
        for _ in range(times):
            num_bytes = max(1, round(share * self.size))
            self.pool.ask(self.num_asked, owner, num_bytes)
            self.waiting[self.num_asked] = owner, num_bytes
            self.owner_of[self.num_asked] = owner
            self.num_asked += 1
        if owner not in self.line:
            self.line.append(owner)

    @rule()
    def grant(self) -> None:
        for slot in self.pool.grants():
            owner, num_bytes = self.waiting.pop(slot.key)
            assert slot.num_bytes == num_bytes
            assert all(key > slot.key for key, (other, _) in self.waiting.items() if other == owner)
            self.held[slot.key] = slot
            self.line.remove(owner)
            self.line += [owner] if self.requests_of(owner) else []
        assert self.pool.grants() == []
        self.check_room_is_used()

    def requests_of(self, owner: str) -> list[int]:
        """What an owner waits for, in the order in which it was asked for."""
        return [rounded(num_bytes, self.alignment) for other, num_bytes in self.waiting.values() if other == owner]

    def slots_of(self, owner: str) -> list[int]:
        """What an owner has."""
        return [
            rounded(slot.num_bytes, self.alignment) for key, slot in self.held.items() if self.owner_of[key] == owner
        ]

    def check_room_is_used(self) -> None:
        """The bound on fragmentation: who waits, and may have more, wants more than any hole can have to have; but for
        the first in line one stretch is kept, which may be all that is free, and cut a hole in two."""
        wanted_of = {owner: self.requests_of(owner)[0] for owner in self.line}
        in_line = [
            wanted
            for owner, wanted in wanted_of.items()
            if not self.slots_of(owner) or sum(self.slots_of(owner)) + wanted <= self.most
        ]
        if not in_line:
            return
        free, (first, *others) = self.size - self.pool.held_bytes, in_line
        assert free <= (len(self.held) + 1) * (first - self.alignment)
        for wanted in others:
            assert free - first <= (len(self.held) + 2) * (wanted - self.alignment)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(key)
        del self.held[key]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.waiting)))
        self.pool.release(key)
        owner, _ = self.waiting.pop(key)
        if not self.requests_of(owner):
            self.line.remove(owner)

    @invariant()
    def slots_lie_apart_in_the_arena(self) -> None:
        ordered = sorted(self.held.values(), key=lambda slot: slot.offset)
        assert all(slot.offset % self.alignment == 0 for slot in ordered)
        ends = [slot.offset + slot.num_bytes for slot in ordered]
        assert all(end <= slot.offset for end, slot in zip(ends, ordered[1:], strict=False))
        assert all(slot.offset >= 0 for slot in ordered)
        assert all(end <= self.size for end in ends)

    @invariant()
    def nobody_has_more_than_its_share(self) -> None:
        for owner in "abcd":
            slots = self.slots_of(owner)
            assert len(slots) <= 1 or sum(slots) <= self.most

    @invariant()
    def the_ledger_is_right(self) -> None:
        assert (self.pool.num_held, self.pool.num_waiting) == (len(self.held), len(self.waiting))
        assert self.pool.held_bytes == sum(rounded(slot.num_bytes, self.alignment) for slot in self.held.values())
        assert self.pool.is_empty == (not self.held and not self.waiting)
        assert all(key in self.pool for key in (*self.held, *self.waiting))
        assert self.num_asked not in self.pool

    def teardown(self) -> None:
        """Every request is served while slots are released, and in the end the arena is one piece again."""
        self.grant()
        while self.held:
            self.pool.release(next(iter(self.held)))
            del self.held[next(iter(self.held))]
            self.grant()
        assert not self.waiting
        assert self.pool.is_empty
        self.pool.ask("all", "anybody", self.size)
        assert self.pool.grants() == [Slot("all", 0, self.size)]


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(deadline=None)
@given(data=st.data(), owners=st.integers(2, 6), room=st.integers(1, 5))
def test_owners_that_always_wait_are_never_two_slots_apart(data, owners, room):
    """One owner asks for everything at once and long before the others."""
    pool = Pool(room * 4096 + 100)
    for number in range(50):
        pool.ask(("greedy", number), 0, 4096)
    for owner in range(1, owners):
        for number in range(20):
            pool.ask((owner, number), owner, data.draw(st.integers(1, 4096)))
    held: deque[Slot] = deque()
    served: Counter[object] = Counter()
    for _ in range(20):
        for slot in pool.grants():
            held.append(slot)
            served["greedy" if slot.key[0] == "greedy" else slot.key[0]] += 1
        counts = [served["greedy"], *(served[owner] for owner in range(1, owners))]
        assert max(counts) - min(counts) <= 1
        held.rotate(data.draw(st.integers(0, 5)))
        pool.release(held.popleft().key)


@settings(deadline=None)
@given(
    small=st.lists(st.integers(1, 6), min_size=4, max_size=30),
    large=st.integers(8, 32),
    order=st.randoms(use_true_random=False),
)
def test_a_large_request_is_served_when_the_slots_in_one_stretch_are_released(small, large, order):
    """While small ones keep coming, and whichever slots are released, only those held before may delay it."""
    pool = Pool(32, 1)
    for number, units in enumerate(small):
        pool.ask(number, "many", units)
    held = {slot.key for slot in pool.grants()}
    before = set(held)
    pool.ask("large", "one", large)
    while "large" not in held:
        granted = [slot.key for slot in pool.grants()]
        held.update(granted)
        if "large" in held:
            break
        assert before & held, "everything that lay there is gone and it still waits"
        # Later ones are released first: they must not matter.
        key = order.choice(sorted(held - before) or sorted(before & held))
        pool.release(key)
        held.remove(key)
        number = len(small) + pool.num_held + pool.num_waiting
        while number in pool or number in before:
            number += 1
        pool.ask(number, "many", order.randint(1, 6))
    assert "large" in held


def filled(*sizes):
    """A pool in which slots of these sizes, numbered, leave no room."""
    pool = Pool(sum(sizes), 1)
    for number, units in enumerate(sizes):
        pool.ask(number, 1, units)
    pool.grants()
    return pool


def test_small_requests_pass_a_large_one_but_not_into_its_stretch():
    pool = Pool(8, 1)
    pool.ask("a", 1, 3)
    pool.ask("b", 1, 2)
    pool.ask("c", 1, 2)
    assert [slot.offset for slot in pool.grants()] == [0, 3, 5]
    pool.release("a")
    pool.ask("large", 2, 5)  # promised [0, 5): only b lies there
    pool.ask("small", 3, 1)
    pool.ask("again", 3, 3)
    assert pool.grants() == [Slot("small", 7, 1)]
    pool.release("b")
    assert pool.grants() == [Slot("large", 0, 5)]


def test_a_large_request_takes_a_better_place_than_the_promised_one():
    pool = filled(2, 2, 2, 2)
    pool.ask("large", 2, 4)
    assert pool.grants() == []  # promised [0, 4)
    pool.release(2)
    pool.release(3)
    assert pool.grants() == [Slot("large", 4, 4)]
    pool.release(0)
    pool.ask("next", 3, 2)
    assert pool.grants() == [Slot("next", 0, 2)]


def test_a_withdrawn_request_leaves_its_stretch_to_others():
    pool = Pool(4, 1)
    pool.ask("held", 1, 3)
    pool.grants()
    pool.ask("large", 2, 4)
    pool.ask("small", 3, 1)
    assert pool.grants() == []
    pool.release("large")
    assert pool.grants() == [Slot("small", 3, 1)]


@pytest.mark.parametrize("end", ["served", "withdrawn"])
def test_each_large_request_is_promised_a_stretch_of_its_own(end):
    pool = filled(2, 2, 2, 2)
    pool.ask("first", 1, 4)
    assert pool.grants() == []  # promised [0, 4)
    if end == "served":
        pool.release(0)
        pool.release(1)
        assert pool.grants() == [Slot("first", 0, 4)]
    else:
        pool.release("first")
    pool.release(3)
    pool.ask("second", 1, 4)
    pool.ask("small", 2, 2)
    assert pool.grants() == []  # promised [4, 8)
    pool.release(2)
    assert pool.grants() == [Slot("second", 4, 4)]


def test_a_small_request_stays_out_of_the_stretch_even_if_it_fits_better_there():
    pool = filled(2, 1, 2, 1, 2)
    pool.release(4)
    pool.ask("large", 2, 4)
    assert pool.grants() == []  # promised [4, 8), where [6, 8) is free
    pool.release(0)
    pool.release(1)
    pool.ask("small", 3, 2)
    assert pool.grants() == [Slot("small", 0, 2)]


def test_a_promise_is_kept_when_another_stretch_gets_emptier():
    pool = filled(2, 2, 2, 2)
    pool.ask("large", 2, 4)
    assert pool.grants() == []  # promised [0, 4)
    pool.release(2)
    pool.ask("small", 3, 2)
    assert pool.grants() == [Slot("small", 4, 2)]
    pool.release(0)
    pool.release(1)
    assert pool.grants() == [Slot("large", 0, 4)]


def test_who_never_gives_back_leaves_room_to_others():
    pool = Pool(8, 1, most_bytes=4)
    for number in range(6):
        pool.ask(("silent", number), "silent", 2)
    assert len(pool.grants()) == 2
    for number in range(20):
        pool.ask(("other", number), "other", 2)
        assert [slot.key for slot in pool.grants()] == [("other", number)]
        pool.release(("other", number))
    pool.ask("large", "another", 8)
    assert pool.grants() == []
    pool.release(("silent", 0))
    assert [slot.key for slot in pool.grants()] == [("silent", 2)], "its turn was kept"


def test_owners_may_have_a_share_in_common():
    """The ranks of an engine, say, which hang together."""
    pool = Pool(8, 1, most_bytes=6, share_of=lambda owner: owner[0])
    for number in range(4):
        for owner in ("ab", "ac"):
            pool.ask((owner, number), owner, 2)
    assert [slot.key for slot in pool.grants()] == [("ab", 0), ("ac", 0), ("ab", 1)]
    for number in range(20):
        pool.ask(("other", number), "other", 2)
        assert [slot.key for slot in pool.grants()] == [("other", number)]
        pool.release(("other", number))
    pool.release(("ab", 0))
    assert [slot.key for slot in pool.grants()] == [("ac", 1)], "they take turns all the same"


def test_a_slot_larger_than_a_share_is_an_owners_only_one():
    pool = Pool(8, 1, most_bytes=4)
    pool.ask("large", "a", 6)
    pool.ask("small", "a", 1)
    assert [slot.key for slot in pool.grants()] == ["large"]
    pool.release("large")
    assert [slot.key for slot in pool.grants()] == ["small"]


def test_who_may_have_more_again_is_before_who_came_later():
    pool = Pool(8, 1, most_bytes=4)
    for number in range(2):
        pool.ask(("a", number), "a", 2)
        pool.ask(("b", number), "b", 2)
    assert [slot.offset for slot in pool.grants()] == [0, 2, 4, 6]
    pool.ask("of a", "a", 4)
    pool.ask("of c", "c", 3)
    assert pool.grants() == []  # a has its share, so c is promised [0, 3)
    pool.release(("a", 0))
    pool.release(("a", 1))
    assert pool.grants() == []  # a is promised [0, 4)
    pool.release(("b", 0))
    assert pool.grants() == [Slot("of a", 0, 4)]
    pool.release(("b", 1))
    assert pool.grants() == [Slot("of c", 4, 3)]


def test_a_slot_is_cut_from_the_smallest_hole_that_holds_it():
    pool = filled(4, 1, 2, 1, 2, 2)
    for number in (0, 2, 4):
        pool.release(number)
    pool.ask("two", 1, 2)
    pool.ask("one", 1, 1)
    pool.ask("four", 1, 4)
    assert [slot.offset for slot in pool.grants()] == [5, 8, 0]


def test_equal_sizes_fill_the_arena_without_gaps():
    pool = Pool(10 * MIB + 5, 4096)
    for number in range(25):
        pool.ask(number, number % 3, MIB - 1)
    held = deque(pool.grants())
    for step in range(15):
        assert pool.num_held == 10
        assert pool.held_bytes == 10 * MIB
        held.rotate(step)
        pool.release(held.popleft().key)
        held.extend(pool.grants())


@pytest.mark.parametrize(("size", "alignment"), [(4095, 4096), (0, 1), (64, 3), (64, 0), (64, -2)])
def test_an_arena_that_holds_nothing_is_refused(size, alignment):
    with pytest.raises(ConfigurationError):
        Pool(size, alignment)


@pytest.mark.parametrize("num_bytes", [0, -1, 2 * MIB + 1])
def test_a_request_that_never_fits_fails_alone(num_bytes):
    pool = Pool(2 * MIB + 4095)
    with pytest.raises(TransferError, match="1 to 2097152 bytes"):
        pool.ask("key", "owner", num_bytes)
    assert pool.is_empty


def test_a_key_is_asked_once_and_released_once():
    pool = Pool(MIB)
    pool.ask("key", "owner", 1)
    with pytest.raises(IllegalEventError, match="second slot"):
        pool.ask("key", "other", 1)
    pool.grants()
    with pytest.raises(IllegalEventError, match="second slot"):
        pool.ask("key", "owner", 1)
    pool.release("key")
    with pytest.raises(IllegalEventError, match="not in use"):
        pool.release("key")


@settings(deadline=None)
@given(cuts=st.sets(st.integers(1, 39)), taken=st.sets(st.integers(0, 39)), num_bytes=st.integers(1, 40))
def test_the_emptiest_stretch_is_the_emptiest(cuts, taken, num_bytes):
    room = FreeList(40)
    edges = [0, *sorted(cuts), 40]
    used = [Extent(a, b) for i, (a, b) in enumerate(pairwise(edges)) if i in taken]
    for stretch in used:
        room.allocate(stretch)
    bitmap = [any(a <= i < b for a, b in used) for i in range(40)]
    best = min(sum(bitmap[start : start + num_bytes]) for start in range(41 - num_bytes))
    start, stop = room.emptiest(num_bytes)
    assert stop - start == num_bytes
    assert sum(bitmap[start:stop]) == best
