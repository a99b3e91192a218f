"""Copies a tile of rows on a device: one Triton kernel for CUDA, ROCm and XPU, gather and scatter alike.

Addresses are absolute, 64 bits wide, and may be those of the device or of pinned host memory that it sees. What the
kernel must do is in `tests/staging/reference_copy.py`. Needs Triton; with TRITON_INTERPRET=1 it runs on the CPU, for
tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvferry.staging.device.launches import Launch


def copy_tile(columns: torch.Tensor, launch: Launch) -> None:
    """Queue the copies on the device's current stream.

    `columns`: those of the tile, int64, on the device; they and all memory must stay until the copies are done.
    Raises what Triton does, of any kind, when the device fails or the kernel cannot be built for it.
    """
    counts = launch.num_starts, launch.num_shifts, launch.num_pieces, launch.row_bytes
    _copy_tile[(launch.num_programs,)](
        columns,
        *counts,
        IS_EVEN=launch.is_even,
        UNIT_BYTES=launch.unit_bytes,
        NUMBER=_NUMBERS[min(launch.unit_bytes, 8)],
        ROWS=launch.rows,
        COLUMNS=launch.columns,
    )


_NUMBERS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


# Numbers that differ from request to request must not each ask for a kernel of their own.
@triton.jit(do_not_specialize=["num_starts", "num_shifts", "num_pieces", "row_bytes"])
def _copy_tile(
    columns,
    num_starts,
    num_shifts,
    num_pieces,
    row_bytes,
    IS_EVEN: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    NUMBER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    NUMBER_BYTES: tl.constexpr = NUMBER.primitive_bitwidth // 8
    # Two numbers of eight bytes are one vector of sixteen. Nothing in the columns says so, hence the hints below.
    NUMBERS: tl.constexpr = UNIT_BYTES // NUMBER_BYTES

    program = tl.program_id(0)
    row = program // num_pieces * ROWS + tl.arange(0, ROWS)
    is_row = row < num_starts * num_shifts
    start, shift = row // num_shifts, row % num_shifts
    source_shift = columns + 2 * num_starts
    target_shift = source_shift + num_shifts
    source = tl.load(columns + start, is_row, 0) + tl.load(source_shift + shift, is_row, 0)
    target = tl.load(columns + num_starts + start, is_row, 0) + tl.load(target_shift + shift, is_row, 0)
    length = tl.where(is_row, row_bytes, 0) if IS_EVEN else tl.load(target_shift + num_shifts + shift, is_row, 0)

    piece = (program % num_pieces).to(tl.int64)
    offset = (piece * COLUMNS + tl.arange(0, COLUMNS)) * NUMBER_BYTES
    is_wanted = tl.max_constancy(offset[None, :] < length[:, None], (1, NUMBERS))
    from_there = (source[:, None] + offset[None, :]).to(tl.pointer_type(NUMBER))
    from_there = tl.max_contiguous(tl.multiple_of(from_there, (1, UNIT_BYTES)), (1, NUMBERS))
    to_here = (target[:, None] + offset[None, :]).to(tl.pointer_type(NUMBER))
    to_here = tl.max_contiguous(tl.multiple_of(to_here, (1, UNIT_BYTES)), (1, NUMBERS))
    tl.store(to_here, tl.load(from_there, is_wanted), is_wanted)
