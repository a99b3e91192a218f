"""Who may have which bytes of one arena of staging memory: slots on request, in turns. Pure integers.

Nothing fails for lack of room: a wish waits until there is a place for it. What is promised about that:

* **Turns.** Owners (peers) take turns, one wish at a time, each owner's wishes in the order in which they were made.
  Whose wish finds a place goes to the end of the line. So of owners that always wait, with wishes of one size, none
  gets more than one slot ahead of another.
* **No starvation.** The first in line whose wish does not fit is promised a stretch of the arena: the one that needs
  the fewest bytes to be given back. Wishes behind it may pass, but never into that stretch. So it is served at the
  latest when the slots that lie there have been released, whatever else is asked meanwhile. Nobody gets in front of it:
  an owner with n others before it has at most n such waits ahead of it.
* **Shares.** Owners that may fall silent together (the ranks of one engine) have a share in common. Who of them has a
  slot gets no other one with which they would have more than `most_bytes`, and is passed until one has been given back:
  slots can stay with them for as long as they are silent, and others need some meanwhile. Their turn is kept. "In line"
  means those that may have more.
* **Fragmentation.** A slot is the beginning of the smallest hole that holds it, and released neighbours are joined at
  once. Wishes of one size therefore fill the arena without gaps; and the first in line, with n bytes (rounded up to the
  alignment), fits in any case when more than (slots held + 1) * (n - alignment) bytes are free, because there is at
  most one hole more than there are slots. Another owner's next wish fits when more than (slots held + 2) *
  (n - alignment) bytes are free beside those of the first: the stretch that is kept for it may cut one hole in two.

A released slot may be given away by the next call of `grants`: release it only when nothing can touch it any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from kvferry.errors import ConfigurationError, IllegalEventError, TransferError
from kvferry.staging.free_list import NOWHERE, Room, Stretch

ALIGNMENT_BYTES = 4096
ENGINE_SHARE = 3 / 4
"""Of a pool, for all ranks of one engine: two that pack for one target at once have three slots of the default size
each, and others two when that engine hangs."""

NOTHING: Final = (None, NOWHERE)


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
        self._room = Room(size_bytes // alignment_bytes * alignment_bytes)
        self._most_bytes, self._share_of = most_bytes, share_of
        self._held: dict[Hashable, Stretch] = {}
        # What each share has.
        self._bytes_of: Counter[Hashable] = Counter()
        # Owners in the order of their turns, and the wishes of each in the order in which they were made.
        self._line: dict[Hashable, dict[Hashable, int]] = {}
        # Whose each key is, whether it waits or has its slot.
        self._owner_of: dict[Hashable, Hashable] = {}
        # Only the first in line is promised a stretch: the key of its wish, and where.
        self._promised: tuple[Hashable, Stretch] = NOTHING

    def __contains__(self, key: Hashable) -> bool:
        """Whether a key has a slot or waits for one."""
        return key in self._owner_of

    @property
    def size_bytes(self) -> int:
        """What all slots together may take; a single slot may take all of it."""
        return self._room.size_bytes

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        return len(self._owner_of) - len(self._held)

    @property
    def held_bytes(self) -> int:
        """Bytes that nobody else can have, up to the next multiple of the alignment of each slot."""
        return self._room.size_bytes - self._room.free_bytes

    @property
    def is_empty(self) -> bool:
        """Whether nobody has a slot or waits for one."""
        return not self._owner_of

    def ask(self, key: Hashable, owner: Hashable, num_bytes: int) -> None:
        """Get in line for a slot; a later `grants` has it.

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
        self._line.setdefault(owner, {})[key] = num_bytes
        self._owner_of[key] = owner

    def grants(self) -> list[Slot]:
        """The wishes that are served now, in their order; each comes out once."""
        granted: list[Slot] = []
        while slot := self._next():
            granted.append(slot)
        return granted

    def release(self, key: Hashable) -> None:
        """Give a slot back, or withdraw a wish that still waits.

        Raises IllegalEventError for an unknown key: who releases twice might release what is somebody else's next time.
        """
        if key not in self._owner_of:
            raise IllegalEventError(
                "a slot is released that is not in use", found=f"{key}", expected="one release each"
            )
        if held := self._held.pop(key, None):
            self._room.give(held)
            self._count(self._owner_of[key], -held.num_bytes)
        else:
            self._leave(key)
        del self._owner_of[key]

    def _next(self) -> Slot | None:
        """Serve the first in line that can be; None when nobody can."""
        owners = [owner for owner in self._line if self._may_have_more(owner)]
        if not owners:
            return None
        first, *others = owners
        if place := self._room.fit(self._wanted_bytes(first)):
            return self._serve(first, place)
        key = self._next_key(first)
        if self._promised[0] != key:
            self._promised = key, self._room.emptiest(self._wanted_bytes(first))
        _, promised = self._promised
        # Most of the time there is no room for anybody: that is seen without looking for a place for each.
        largest_bytes = self._room.largest_bytes(promised)
        for owner in others:
            wanted_bytes = self._wanted_bytes(owner)
            if wanted_bytes <= largest_bytes and (place := self._room.fit(wanted_bytes, promised)):
                return self._serve(owner, place)
        return None

    def _may_have_more(self, owner: Hashable) -> bool:
        held_bytes = self._bytes_of[self._share_of(owner)]
        return not held_bytes or held_bytes + self._wanted_bytes(owner) <= self._most_bytes

    def _wanted_bytes(self, owner: Hashable) -> int:
        """What the next slot of an owner takes."""
        num_bytes = self._line[owner][self._next_key(owner)]
        return -(-num_bytes // self._alignment_bytes) * self._alignment_bytes

    def _serve(self, owner: Hashable, place: Stretch) -> Slot:
        key = self._next_key(owner)
        num_bytes = self._line[owner][key]
        self._room.take(place)
        self._held[key] = place
        self._count(owner, place.num_bytes)
        self._leave(key)
        if wishes := self._line.pop(owner, None):
            self._line[owner] = wishes
        return Slot(key, place.start, num_bytes)

    def _next_key(self, owner: Hashable) -> Hashable:
        return next(iter(self._line[owner]))

    def _count(self, owner: Hashable, num_bytes: int) -> None:
        """So many bytes more are held by an owner."""
        share = self._share_of(owner)
        self._bytes_of[share] += num_bytes
        if not self._bytes_of[share]:
            del self._bytes_of[share]

    def _leave(self, key: Hashable) -> None:
        """Take a wish out of the line, and its owner when that was the last one."""
        owner = self._owner_of[key]
        del self._line[owner][key]
        if not self._line[owner]:
            del self._line[owner]
        if key == self._promised[0]:
            self._promised = NOTHING
