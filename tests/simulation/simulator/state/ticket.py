"""Bytes on their way from one rank to another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.session.keys import SlotKey, WorkKey
from simulator.state.naming import request_of
from simulator.state.rank import Access, Rank


@dataclass(slots=True, eq=False)
class Ticket:
    """Bytes on their way from `source_rank` to `target_rank`; `owner` is the one that has posted it.

    `source` and `target` are indices of bytes, of which `moved` have moved. `fails_at` is the number of bytes after
    which it ends with an error; a hanging one moves nothing until somebody loses interest in it. Nothing moves by an
    `access` that is not valid any more.
    """

    owner: Rank
    source_rank: Rank
    target_rank: Rank
    key: WorkKey
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    access: Access
    step_s: float = 0.0
    fails_at: int = 0
    hangs: bool = False
    moved: int = 0
    is_open: bool = True
    unwanted: bool = False
    ended_at: float = 0.0

    @property
    def is_revoked(self) -> bool:
        """Whether the target has seen to it that nothing of it arrives."""
        return self.is_write and not self.access.is_valid

    @property
    def is_staged(self) -> bool:
        """Whether it fills a slot of staging memory."""
        return len(self.target) > 0 and bool(self.target.max() >= self.target_rank.memory.map.num_bytes)

    @property
    def is_write(self) -> bool:
        """Whether the source has posted it."""
        return self.owner is self.source_rank

    @property
    def request_id(self) -> str:
        """What the target calls its request."""
        work = self.key.work if isinstance(self.key, SlotKey) else self.key
        return request_of(work.claim_id)
