"""Which loop copies rows: numpy's until numba's is translated, and for good where numba is not installed.

Translating takes a second or two, loading what an earlier start has translated some tenths. No transfer waits for
it: a thread does it while transports are opened.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.extras import how_to_install
from kvferry.plan.programs.tiles import Tile
from kvferry.transport.registered_memory import LocatedRows, Offsets
from kvferry.transport.rowcopy import with_numpy

logger = logging.getLogger(__name__)

Copy: TypeAlias = Callable[[LocatedRows, LocatedRows, Offsets], Iterator[int]]
CopyTile: TypeAlias = Callable[[Tile], Iterator[None]]


@dataclass(frozen=True, slots=True)
class Copier:
    """What copies rows: `name` is `numba` or `numpy`; `reason` says why it is not the faster one, if it is not.

    `copy_tile`, if there is one, takes rows as sums, with addresses of this process that were checked already.
    """

    name: str
    reason: str
    copy: Copy
    copy_tile: CopyTile | None = None


class BackgroundCompilation:
    """Has a thread of its own make the faster copier, once; `copier` is the one to use at any time.

    `make` is called with whether the translation may be kept on disk. If it raises, it is called again without.
    """

    def __init__(self, make: Callable[[bool], Copier]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._started = False
        self._over = threading.Event()
        self.copier = Copier("numpy", "nothing faster is compiled yet", with_numpy.copy)

    def start(self) -> None:
        """Return at once, also when it has been started before."""
        with self._lock:
            if self._started:
                return
            self._started = True
        # Not a daemon: a process must not end in the middle of LLVM.
        threading.Thread(target=self._run, name="kvferry-compile-rows").start()

    def wait(self, timeout_s: float) -> bool:
        """Whether it was over within that time, well or not. For tests and benchmarks."""
        return self._over.wait(timeout_s)

    def _run(self) -> None:
        reason = ""
        for on_disk in (True, False):
            try:
                self.copier = self._make(on_disk)
                break
            except Exception as error:  # noqa: BLE001 - the top of a thread: whatever is wrong, numpy does it
                reason = f"{type(error).__name__}: {error}"
        else:
            self.copier = Copier("numpy", reason, with_numpy.copy)
        hint = f"; short rows take longer ({reason}); hint: {how_to_install('native')}"
        logger.info("rows are copied by %s%s", self.copier.name, hint if self.copier.reason else "")
        self._over.set()


def _make_native(on_disk: bool) -> Copier:
    from kvferry.transport.rowcopy.with_numba import compile_rows

    rows = compile_rows(on_disk)
    return Copier("numba", "", rows.copy, rows.copy_tile)


_preparation = BackgroundCompilation(_make_native)


def compile_in_background() -> None:
    """Begin to make the faster copier in a thread of its own, once per process. Returns at once."""
    _preparation.start()


def wait_until_compiled(timeout_s: float) -> bool:
    """Wait for what `compile_in_background` has begun; whether it is over, well or not."""
    return _preparation.wait(timeout_s)


def current() -> Copier:
    """The copier to use now."""
    return _preparation.copier
