"""The whole way of a slot on a device: behind the engine's stream, into pinned host memory or memory of its own.

What needs no real device runs in Triton's interpreter as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvferry.agent.memory.arena import Arena
from kvferry.errors import ConfigurationError
from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.tiles import plain
from kvferry.staging.device.arena import device_arena
from kvferry.staging.device.mover import DeviceMover
from kvferry.staging.device.patterns import tiles_of
from kvferry.staging.device.pinned import CudaRuntime, pinned
from kvferry.staging.mover import Moved
from kvferry.transport.base import Memory
from kvferry.transport.registered_memory import Regions
from kvferry.transport.shm.shared_memory import SharedMemory, allocate_shared

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

ROW_BYTES = 64
LAYERS, BLOCKS, TOKENS = 40, 20, 16
# Of every layer all tokens of some blocks, from the middle of the first to the middle of the last.
TABLE = (7, 0, 19, 12, 3, 4, 5, 11)
FIRST, LAST = 5, 8 * TOKENS - 3
NUM_ROWS = LAYERS * (LAST - FIRST)


class Rig:
    """An engine's cache on a device, an arena, and the mover that copies between them."""

    def __init__(self, where: torch.device, side_streams, arena: Arena) -> None:
        self.where, self.arena = where, arena
        self.cache = torch.zeros(LAYERS * BLOCKS * TOKENS, ROW_BYTES, dtype=torch.uint8, device=where)
        memories = Memory(self.cache.data_ptr(), self.cache.nbytes, -1, where.type), arena.memory
        is_pinned = arena.memory.device != where.type
        pins = [pinned(CudaRuntime(where), [arena.memory])] if is_pinned else []
        side = side_streams.SideStream(where)
        self.mover = DeviceMover(side, Regions.of([(memory.address, memory.size_bytes) for memory in memories]), pins)

    @property
    def rows(self) -> np.ndarray:
        """The numbers of the wanted rows in the cache, layer by layer and in the order of the tokens."""
        tokens = np.arange(FIRST, LAST)
        inside = np.array(TABLE)[tokens // TOKENS] * TOKENS + tokens % TOKENS
        return np.add.outer(np.arange(LAYERS) * BLOCKS * TOKENS, inside).ravel()

    def gather(self) -> Copies:
        """The wanted rows, back to back in the arena."""
        source = self.rows.astype(np.uint64) * np.uint64(ROW_BYTES) + np.uint64(self.cache.data_ptr())
        target = np.arange(NUM_ROWS, dtype=np.uint64) * np.uint64(ROW_BYTES) + np.uint64(self.arena.memory.address)
        return Copies(source, target, np.full(NUM_ROWS, ROW_BYTES, np.uint64), NUM_ROWS)

    def scatter(self) -> Copies:
        there = self.gather()
        return Copies(there.target, there.source, there.length, there.pieces)

    def move(self, copies: Copies) -> None:
        self.mover.start("key", plain(copies))
        ended: list[Moved] = []
        while self.mover.busy:
            ended += self.mover.poll()
        assert ended == [Moved("key", "")]

    def packed(self) -> torch.Tensor:
        """What the arena has, row by row."""
        if isinstance(self.arena, SharedMemory):
            flat = torch.frombuffer(bytearray(self.arena.buffer), dtype=torch.uint8)
        else:
            (flat,) = self.arena._tensors
        return flat[: NUM_ROWS * ROW_BYTES].cpu().view(NUM_ROWS, ROW_BYTES)


@pytest.fixture
def where(device) -> torch.device:
    return torch.device("cpu") if device.name == "cpu" else torch.device(device.name, 0)


@pytest.fixture(params=["host", "device"])
def rig(request, where, side_streams) -> Iterator[Rig]:
    size_bytes = NUM_ROWS * ROW_BYTES
    if request.param == "host" and where.type == "xpu":
        pytest.skip("nothing pins host memory for xpu yet")
    is_host = request.param == "host"
    arena = allocate_shared(size_bytes, "kvferry-test") if is_host else device_arena(size_bytes, where, where.type)
    made = Rig(where, side_streams, arena)
    yield made
    if where.type != "cpu":
        made.mover.close()
    arena.close(may_be_written=False)


def noise(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (LAYERS * BLOCKS * TOKENS, ROW_BYTES), dtype=torch.uint8, generator=generator)


def keep_busy(where: torch.device) -> None:
    """Give the engine's stream some milliseconds of work."""
    if where.type != "cpu":
        large = torch.ones(4096, 4096, device=where)
        for _ in range(8):
            large = large @ large


def wait_for_the_engine(where: torch.device) -> None:
    """As whoever tells the agent of blocks does: by an event behind all that the engine has queued."""
    if where.type != "cpu":
        event = torch.get_device_module(where).Event()
        event.record()
        event.synchronize()


def test_what_the_engine_writes_last_is_packed_and_scattered_again(rig):
    assert [tile.num_starts > 1 for tile in tiles_of(rig.gather())] == [True]
    for seed in range(3):
        bits, rows = noise(seed), torch.from_numpy(rig.rows)
        there = bits.to(rig.where)
        keep_busy(rig.where)
        rig.cache.copy_(there)
        wait_for_the_engine(rig.where)
        rig.move(rig.gather())
        assert torch.equal(rig.packed(), bits[rows])
        keep_busy(rig.where)
        rig.cache.zero_()
        wait_for_the_engine(rig.where)
        rig.move(rig.scatter())
        expected = torch.zeros_like(bits)
        expected[rows] = bits[rows]
        assert torch.equal(rig.cache.cpu(), expected)


def test_rows_of_several_tiles_are_packed(rig):
    """A slot that begins and ends in the middle of a layer, and in the middle of a row."""
    bits, rows = noise(7), torch.from_numpy(rig.rows)
    rig.cache.copy_(bits)
    wait_for_the_engine(rig.where)
    whole = rig.gather()
    cut = Copies(*(column[37:-20].copy() for column in (whole.source, whole.target, whole.length)), 1)
    for column in (cut.source, cut.target):
        column[0] += np.uint64(24)
    cut.length[0] -= np.uint64(24)
    cut.length[-1] -= np.uint64(8)
    assert [tile.num_starts > 1 for tile in tiles_of(cut)] == [True, False]
    rig.move(cut)
    expected = torch.zeros(NUM_ROWS, ROW_BYTES, dtype=torch.uint8)
    expected[37:-20] = bits[rows][37:-20]
    expected[37, :24], expected[-21, -8:] = 0, 0
    assert torch.equal(rig.packed(), expected)


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no cuda device here")
    return torch.device("cuda", 0)


@pytest.mark.device
def test_copies_do_not_wait_for_what_the_engine_has_queued(rig):
    """Else each slot would take as long as a step of a busy engine."""
    if rig.where.type == "cpu":
        pytest.skip("a cpu queues nothing")
    rig.move(rig.gather())
    wait_for_the_engine(rig.where)
    for _ in range(40):
        keep_busy(rig.where)
    engine = torch.get_device_module(rig.where).Event()
    engine.record()
    rig.move(rig.gather())
    assert not engine.query()


@pytest.mark.device
def test_addresses_can_be_pinned_again_and_again(cuda):
    for _ in range(3):
        lent = allocate_shared(1 << 20, "kvferry-test")
        bits = torch.frombuffer(lent.buffer, dtype=torch.uint8)
        assert not bits.is_pinned()
        pins = pinned(CudaRuntime(cuda), [lent.memory])
        assert bits.is_pinned()
        pins.close()
        assert not bits.is_pinned()
        del bits
        lent.close(may_be_written=False)


@pytest.mark.device
def test_a_driver_refuses_what_is_pinned_already(cuda):
    lent = allocate_shared(1 << 20, "kvferry-test")
    pins = pinned(CudaRuntime(cuda), [lent.memory])
    with pytest.raises(ConfigurationError, match="cudaHostRegister returned"):
        pinned(CudaRuntime(cuda), [lent.memory])
    with contextlib.suppress(RuntimeError):
        # The runtime tells once more, to whoever launches next on this thread.
        torch.ones(1, device=cuda).add_(1)
    pins.close()
    lent.close(may_be_written=False)
