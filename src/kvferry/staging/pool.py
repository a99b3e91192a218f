"""Who may have which bytes of one arena of staging memory: slots on request, in turns. Pure integers.

No request fails for lack of memory: it waits until a slot fits. The pool promises:

* **Fairness.** Owners (peers) are served round robin, one request at a time, and each owner's requests in their order.
  So of owners that always wait, with requests of one size, none gets more than one slot ahead of another.
* **No starvation.** When the first owner's request does not fit, an extent of the arena is reserved for it: the one
  that needs the fewest bytes to be freed. Later requests may be served before it, but never from that extent. So it is
  served at the latest when the slots that lie there have been released, whatever else is requested meanwhile. No owner
  overtakes it: an owner behind n others waits for n such reservations at most.
* **Shares.** Owners that may stop responding together (the ranks of one engine) have a share in common. Owners that
  have a slot get no other one with which their share would exceed `most_bytes`; they are skipped, and keep their turn,
  until one of their slots is released: an engine that hangs keeps its slots, and others need some meanwhile. "First"
  above means the first owner that may have more.
* **Fragmentation.** Slots are allocated best fit, and released neighbours are joined at once. So requests of one size
  fill the arena without gaps. The first owner's request of n bytes (rounded up to the alignment) fits in any case when
  more than (slots held + 1) * (n - alignment) bytes are free, because there is at most one free extent more than there
  are slots. The next owner's request fits when more than (slots held + 2) * (n - alignment) bytes are free beside those
  of the first: the reserved extent may cut one free extent in two.

A released slot may be granted again by the next call of `grants`: release it only when nothing can touch it any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from kvferry.errors import ConfigurationError, IllegalEventError, TransferError
from kvferry.staging.free_list import EMPTY, Extent, FreeList

ALIGNMENT_BYTES = 4096
ENGINE_SHARE = 3 / 4
"""The part of a pool that all ranks of one engine may have. Two ranks that pack for one target at once then have three
slots of the default size each, and others have two when that engine hangs."""

NO_RESERVATION: Final = (None, EMPTY)


@dataclass(frozen=True, slots=True)
class Slot:
    """Bytes of the arena that belong to `key` until it is released: `num_bytes` as asked, from `offset` on."""

    key: Hashable
    offset: int
    num_bytes: int


class Pool:
    """Slots of one arena of `size_bytes`; each begins at a multiple of `alignment_bytes`. All owners of one share may
    have `most_bytes`, or one slot that is larger; `share_of` says whose share an owner's is, its own by default.

    Raises ConfigurationError when the alignment is no power of two or the arena does not hold as much.
    """

    def __init__(
        self,
        size_bytes: int,
        alignment_bytes: int = ALIGNMENT_BYTES,
        most_bytes: float = inf,
        share_of: Callable[[Any], Hashable] = lambda owner: owner,
    ) -> None:
        if alignment_bytes < 1 or alignment_bytes & (alignment_bytes - 1):
            raise ConfigurationError("invalid alignment", found=f"{alignment_bytes} bytes", expected="a power of two")
        if size_bytes < alignment_bytes:
            raise ConfigurationError(
                "staging memory must not be empty",
                found=f"{size_bytes} bytes",
                expected=f"at least {alignment_bytes} bytes",
                hint="some hundred MiB suit most links",
            )
        self._alignment_bytes = alignment_bytes
        self._free_list = FreeList(size_bytes // alignment_bytes * alignment_bytes)
        self._most_bytes, self._share_of = most_bytes, share_of
        self._held: dict[Hashable, Extent] = {}
        # The bytes that each share holds.
        self._bytes_of: Counter[Hashable] = Counter()
        # Owners in the order of their turns; the waiting requests of each, as sizes by key, in their order.
        self._waiting: dict[Hashable, dict[Hashable, int]] = {}
        # The owner of each key, whether it waits or has its slot.
        self._owner_of: dict[Hashable, Hashable] = {}
        # The first owner's request may have an extent reserved: its key, and where.
        self._reserved: tuple[Hashable, Extent] = NO_RESERVATION

    def __contains__(self, key: Hashable) -> bool:
        """Whether a key has a slot or waits for one."""
        return key in self._owner_of

    @property
    def size_bytes(self) -> int:
        """The size of the arena; a single slot may take all of it."""
        return self._free_list.size_bytes

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        return len(self._owner_of) - len(self._held)

    @property
    def held_bytes(self) -> int:
        """Bytes in slots, each rounded up to the alignment."""
        return self._free_list.size_bytes - self._free_list.free_bytes

    @property
    def is_empty(self) -> bool:
        """Whether there is no slot and no waiting request."""
        return not self._owner_of

    def ask(self, key: Hashable, owner: Hashable, num_bytes: int) -> None:
        """Request a slot; a later `grants` has it.

        Raises TransferError when it could never be served, and IllegalEventError when the key is already known.
        """
        if key in self:
            raise IllegalEventError("a key asks for a second slot", found=f"{key}", expected="one slot per key")
        if not 0 < num_bytes <= self.size_bytes:
            raise TransferError(
                "staging",
                "the slot is larger than staging memory",
                found=f"{num_bytes} bytes",
                expected=f"1 to {self.size_bytes} bytes",
                hint="smaller slots, or more staging memory",
            )
        self._waiting.setdefault(owner, {})[key] = num_bytes
        self._owner_of[key] = owner

    def grants(self) -> list[Slot]:
        """The requests that are served now, in their order, each once."""
        granted: list[Slot] = []
        while slot := self._next():
            granted.append(slot)
        return granted

    def release(self, key: Hashable) -> None:
        """Give a slot back, or withdraw a request that still waits.

        Raises IllegalEventError for an unknown key: a second release could hit the next holder of that key.
        """
        if key not in self._owner_of:
            raise IllegalEventError(
                "a slot is released that is not in use", found=f"{key}", expected="one release each"
            )
        if held := self._held.pop(key, None):
            self._free_list.free(held)
            self._count(self._owner_of[key], -held.num_bytes)
        else:
            self._dequeue(key)
        del self._owner_of[key]

    def _next(self) -> Slot | None:
        """Serve the first owner that can be served; None when none can."""
        owners = [owner for owner in self._waiting if self._may_have_more(owner)]
        if not owners:
            return None
        first, *others = owners
        if extent := self._free_list.best_fit(self._wanted_bytes(first)):
            return self._serve(first, extent)
        key = self._next_key(first)
        if self._reserved[0] != key:
            self._reserved = key, self._free_list.emptiest(self._wanted_bytes(first))
        _, reserved = self._reserved
        # Most of the time nothing fits: the largest free extent tells that without a search for each owner.
        largest_bytes = self._free_list.largest_bytes(reserved)
        for owner in others:
            wanted_bytes = self._wanted_bytes(owner)
            if wanted_bytes <= largest_bytes and (extent := self._free_list.best_fit(wanted_bytes, reserved)):
                return self._serve(owner, extent)
        return None

    def _may_have_more(self, owner: Hashable) -> bool:
        held_bytes = self._bytes_of[self._share_of(owner)]
        return not held_bytes or held_bytes + self._wanted_bytes(owner) <= self._most_bytes

    def _wanted_bytes(self, owner: Hashable) -> int:
        """The bytes that the next slot of an owner takes."""
        num_bytes = self._waiting[owner][self._next_key(owner)]
        return -(-num_bytes // self._alignment_bytes) * self._alignment_bytes

    def _serve(self, owner: Hashable, extent: Extent) -> Slot:
        key = self._next_key(owner)
        num_bytes = self._waiting[owner][key]
        self._free_list.allocate(extent)
        self._held[key] = extent
        self._count(owner, extent.num_bytes)
        self._dequeue(key)
        # The owner goes to the end of the line.
        if rest := self._waiting.pop(owner, None):
            self._waiting[owner] = rest
        return Slot(key, extent.start, num_bytes)

    def _next_key(self, owner: Hashable) -> Hashable:
        return next(iter(self._waiting[owner]))

    def _count(self, owner: Hashable, num_bytes: int) -> None:
        """Add to the bytes that the share of an owner holds."""
        share = self._share_of(owner)
        self._bytes_of[share] += num_bytes
        if not self._bytes_of[share]:
            del self._bytes_of[share]

    def _dequeue(self, key: Hashable) -> None:
        """Remove a request that waits, and its owner when that was the last one."""
        owner = self._owner_of[key]
        del self._waiting[owner][key]
        if not self._waiting[owner]:
            del self._waiting[owner]
        if key == self._reserved[0]:
            self._reserved = NO_RESERVATION
