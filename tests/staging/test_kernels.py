"""The kernel leaves what its specification leaves, on every device that is here."""

from __future__ import annotations

import mmap
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_copy import Bytes, bytes_of, copy

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.plan.programs.tiles import Tile, tile_of
from kvferry.staging.device.launches import MAX_ROW_BYTES, PROGRAM_BYTES, launch_of

# Triton says something about multiplications whenever it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def column(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def spread(draw, num_rows: int, unit: int, lengths: list[int]) -> np.ndarray:
    """Offsets, multiples of the unit, at which rows of these lengths do not overlap; in any order."""
    order = draw(st.permutations(range(num_rows)))
    offset, at = np.zeros(num_rows, np.uint64), 0
    for row in order:
        at += draw(st.integers(0, 3)) * unit
        offset[row] = at
        at += lengths[row]
    return offset


@st.composite
def rows(draw) -> tuple[Copies, int]:
    """Offsets of rows, and how much memory they need."""
    unit = draw(st.sampled_from([1, 2, 4, 8, 16, 48]))
    num_rows = draw(st.integers(1, 20))
    if draw(st.booleans()):
        lengths = [draw(st.integers(1, 40)) * unit] * num_rows
    else:
        lengths = draw(st.lists(st.integers(0, 60).map(lambda n: n * unit), min_size=num_rows, max_size=num_rows))
    source = spread(draw, num_rows, unit, lengths)
    target = spread(draw, num_rows, unit, lengths)
    length = np.array(lengths, np.uint64)
    size = int(max((source + length).max(), (target + length).max()))
    return Copies(source, target, length, num_rows), max(size, 1)


def noise(size: int, device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device)


def check(device, tile: Tile, source: torch.Tensor, target: torch.Tensor) -> None:
    """A tile whose addresses are offsets in the two tensors."""
    left, right = bytes_of(source), bytes_of(target)
    expected = target.clone()
    copy(tile.copies(), [Bytes(0, left.flat)], [Bytes(0, bytes_of(expected).flat)])
    device.copy(tile.shifted(left.address, right.address))
    assert torch.equal(target, expected)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=rows(), seed=st.integers(0, 9))
def test_rows_arrive_and_nothing_else_changes(device, drawn, seed):
    copies, size = drawn
    if copies.num_bytes:
        check(device, tile_of(copies), noise(size, device.name, seed), noise(size, device.name, seed + 10))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), num_starts=st.integers(1, 7), num_blocks=st.integers(1, 9), row=st.integers(1, 80))
def test_sums_of_starts_and_shifts_arrive(device, data, num_starts, num_blocks, row):
    """A gather of blocks into a dense stretch: sections of a block at every block of a table."""
    blocks = data.draw(st.permutations(range(num_blocks)))
    steps = np.arange(num_starts, dtype=np.uint64), np.array(blocks, np.uint64)
    tile = Tile(
        source_start=steps[0] * np.uint64(row),
        target_start=steps[0] * np.uint64(num_blocks * row),
        source_shift=steps[1] * np.uint64(num_starts * row),
        target_shift=np.arange(num_blocks, dtype=np.uint64) * np.uint64(row),
        length=np.full(num_blocks, row, np.uint64),
    )
    size = num_starts * num_blocks * row
    assert (len(tile), tile.copies().num_bytes) == (num_starts * num_blocks, size)
    check(device, tile, noise(size, device.name, row), noise(size, device.name, row + 1))


@pytest.mark.parametrize("lengths", [(3 * MAX_ROW_BYTES + 16, 16, 48), (PROGRAM_BYTES * 3, PROGRAM_BYTES * 3)])
def test_long_rows_arrive_piece_by_piece(device, lengths):
    length = column(*lengths)
    source = np.cumsum(length) - length
    size = int(length.sum())
    tile = tile_of(Copies(source, source, length, len(length))).split(MAX_ROW_BYTES)
    assert int(tile.length.max()) <= MAX_ROW_BYTES
    check(device, tile, noise(size, device.name, 1), noise(size, device.name, 2))


def test_any_element_size_and_any_strides(device):
    """A head-major cache of float32, gathered into rows of tokens; the other half of the storage stays as it is."""
    cache = torch.arange(2 * 3 * 8 * 4, dtype=torch.float32, device=device.name).reshape(2, 3, 8, 4)[:, :, ::2, 1:]
    dense = torch.full((2, 4, 3, 3), -1.0, device=device.name)
    wanted = [
        (cache[b, h, t].data_ptr(), dense[b, t, h].data_ptr(), 12) for b in range(2) for t in range(4) for h in range(3)
    ]
    source, target, length = np.array(wanted, np.uint64).T.copy()
    copies = Copies(source, target, length, len(length))
    device.copy(tile_of(copies))
    assert torch.equal(dense, cache.permute(0, 2, 1, 3))
    again = torch.full_like(dense, -2.0)
    moved = np.uint64(dense.data_ptr()), np.uint64(again.data_ptr())
    copy(Copies(source, target - moved[0] + moved[1], length, 1), [bytes_of(cache)], [bytes_of(again)])
    assert torch.equal(again, dense)


def test_addresses_are_64_bits_wide(device):
    """More than 4 GiB from one end to the other: pages that nobody touches take no memory."""
    far = 5 << 30
    if device.name == "cpu":
        with mmap.mmap(-1, far + 4096) as pages:
            flat = torch.frombuffer(pages, dtype=torch.uint8)
            check_far(device, flat, far)
            del flat
    else:
        check_far(device, torch.zeros(far + 4096, dtype=torch.uint8, device=device.name), far)


def check_far(device, flat: torch.Tensor, far: int) -> None:
    flat[:64] = noise(64, device.name, 3)
    base = np.uint64(flat.data_ptr())
    there, back = column(far, far + 96), column(0, 32)
    device.copy(tile_of(Copies(back + base, there + base, column(32, 32), 2)))
    assert torch.equal(flat[far : far + 32], flat[:32])
    assert torch.equal(flat[far + 96 : far + 128], flat[32:64])
    assert not flat[far + 32 : far + 96].any()
    # The same distance as a shift, back to another place.
    device.copy(Tile(column(int(base)), column(int(base) + 128), column(far), column(0), column(32)))
    assert torch.equal(flat[128:160], flat[:32])


@pytest.mark.device
@pytest.mark.parametrize("device", ["cuda", "xpu"], indirect=True)
def test_pinned_host_memory_is_read_and_written(device):
    host = noise(4096, "cpu", 4).pin_memory()
    there = torch.zeros(4096, dtype=torch.uint8, device=device.name)
    offset = np.arange(0, 4096, 64, dtype=np.uint64)
    length = np.full(64, 64, np.uint64)
    copies = Copies(offset, offset[::-1].copy(), length, 64)
    device.copy(tile_of(copies.shifted(host.data_ptr(), there.data_ptr())))
    assert torch.equal(there.cpu(), host.reshape(64, 64).flip(0).reshape(-1))
    host.zero_()
    device.copy(tile_of(copies.shifted(there.data_ptr(), host.data_ptr())))
    assert torch.equal(there.cpu(), host.reshape(64, 64).flip(0).reshape(-1))


@pytest.mark.parametrize("odd", ["source_start", "target_start", "source_shift", "target_shift", "length"])
@pytest.mark.parametrize(("by", "unit"), [(0, 16), (8, 8), (4, 4), (2, 2), (1, 1), (3, 1), (12, 4), (32, 16)])
def test_vectors_are_as_wide_as_everything_is_aligned(odd, by, unit):
    fields = {name: column(64, 128) for name in ("source_start", "target_start", "source_shift", "target_shift")}
    fields["length"] = column(64, 64)
    fields[odd] = fields[odd] + column(0, by)
    assert launch_of(Tile(**fields)).unit_bytes == unit


@given(drawn=rows())
def test_programs_cover_every_row_and_are_not_many_more(drawn):
    copies, _ = drawn
    tile = tile_of(copies).split(MAX_ROW_BYTES)
    if not len(tile):
        return
    launch = launch_of(tile)
    number_bytes = min(launch.unit_bytes, 8)
    assert launch.rows * launch.columns * number_bytes == PROGRAM_BYTES
    assert launch.num_pieces * launch.columns * number_bytes >= launch.row_bytes == int(tile.length.max())
    assert launch.num_programs // launch.num_pieces * launch.rows >= len(tile)
    assert launch.is_even == (len(set(tile.length.tolist())) == 1)
    # Half of each program at most is beyond the longest row.
    assert launch.columns * number_bytes < 2 * launch.row_bytes or launch.columns == 1


def test_the_reference_names_the_row_that_lies_nowhere():
    there, here = Bytes(100, torch.arange(10, dtype=torch.uint8)), Bytes(500, torch.zeros(5, dtype=torch.uint8))
    copy(Copies(column(105, 100), column(500, 503), column(3, 2), 2), [there], [here])
    assert here.flat.tolist() == [5, 6, 7, 0, 1]
    with pytest.raises(TransportError, match=r"row 1 at the source .*3 bytes at 0x6c"):
        copy(Copies(column(105, 108), column(500, 502), column(1, 3), 2), [there], [here])
    with pytest.raises(TransportError, match=r"row 0 at the target .*3 bytes at 0x1f7"):
        copy(Copies(column(100), column(503), column(3), 1), [there], [here])


@pytest.mark.parametrize(
    ("backend", "arch", "lanes", "wide"),
    [("cuda", 90, 32, r"(ld|st)\.global\.v2\.b64"), ("hip", "gfx942", 64, r"global_(load|store)_dwordx4")],
)
@pytest.mark.parametrize("is_even", [True, False])
def test_compiled_code_has_the_widest_loads_and_stores(
    backend, arch, lanes, wide, is_even, fresh_kernels, monkeypatch, tmp_path
):
    """Compiling needs no device. The hints in the kernel are easy to lose, and then it is half as wide."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = fresh_kernels("kernels_compiled")
    numbers = dict.fromkeys(("num_starts", "num_shifts", "num_pieces", "row_bytes"), "i32")
    constants = {"IS_EVEN": is_even, "UNIT_BYTES": 16, "NUMBER": kernels.tl.int64, "ROWS": 32, "COLUMNS": 32}
    signature = {"columns": "*i64", **numbers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernels._copy_tile, signature, constexprs=constants)
    found = triton.compile(source, target=GPUTarget(backend, arch, lanes)).asm
    code = found["ptx" if backend == "cuda" else "amdgcn"]
    assert {kind for kind in re.findall(wide, code)} == ({"ld", "st"} if backend == "cuda" else {"load", "store"})
