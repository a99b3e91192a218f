"""Making a cache's pages ahead changes no byte and asks for no memory that is not there."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from kvferry.transport import pages
from kvferry.transport.base import Memory

SIZE_BYTES = 48 << 20
WITHIN_S = 60.0


@pytest.fixture
def memory():
    made = mmap.mmap(-1, SIZE_BYTES)
    view = np.frombuffer(made, np.uint8)
    yield view
    del view


def resident_bytes(view) -> int:
    """How much of the memory has pages, says the kernel."""
    pages_there = np.zeros(SIZE_BYTES // mmap.PAGESIZE, np.uint8)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    arguments = (pointer(int(view.ctypes.data)), size(SIZE_BYTES), pointer(int(pages_there.ctypes.data)))
    assert ctypes.CDLL(None).mincore(*arguments) == 0
    return int(np.count_nonzero(pages_there & 1)) * mmap.PAGESIZE


def test_pages_are_made_and_no_byte_changes(memory):
    memory[5_000_000] = 7
    assert resident_bytes(memory) < SIZE_BYTES // 2
    toucher = pages.Pages([Memory(int(memory.ctypes.data), SIZE_BYTES, -1)])
    assert toucher.wait(WITHIN_S)
    assert resident_bytes(memory) >= SIZE_BYTES - 2 * pages.HUGE_BYTES
    assert memory[5_000_000] == 7
    assert int(memory.sum()) == 7
    toucher.close()
    toucher.close()


@pytest.mark.parametrize("free_bytes", [0, SIZE_BYTES])
def test_memory_that_is_short_is_left_alone(memory, monkeypatch, free_bytes):
    monkeypatch.setattr(pages, "_free_bytes", lambda: free_bytes)
    toucher = pages.Pages([Memory(int(memory.ctypes.data), SIZE_BYTES, -1)])
    assert toucher.wait(WITHIN_S)
    assert resident_bytes(memory) < SIZE_BYTES // 2


def test_small_and_shared_memory_have_nothing_to_make(memory):
    address = int(memory.ctypes.data)
    toucher = pages.Pages([Memory(address, 4096, -1), Memory(address, SIZE_BYTES, 3)])
    assert toucher.wait(WITHIN_S)
    assert resident_bytes(memory) < SIZE_BYTES // 2
