"""A cache of 1 GiB in a process of its own, in and out of which slots of 24 MiB are copied.

`python peak_memory.py DTYPE` writes by how many bytes at most the process grew while that was done.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from mover_side import Side

from kvferry.jax_caches import FIRST_ADDRESS, JaxCaches
from kvferry.layout import EngineShape, attention, describe

NUM_LAYERS, BLOCK_TOKENS, NUM_HEADS, HEAD_DIM = 8, 16, 8, 128
ARRAY_BYTES, SLOT_BYTES = 64 << 20, 24 << 20
NUM_ARRAYS = 2 * NUM_LAYERS
NUM_SLOTS = 10
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def main() -> None:
    dtype = sys.argv[1]
    item_bytes = np.dtype(dtype).itemsize
    unit = BLOCK_TOKENS * NUM_HEADS * HEAD_DIM * item_bytes
    num_blocks = ARRAY_BYTES // unit
    shape = EngineShape(1, 1, BLOCK_TOKENS, num_blocks, format="token-major")
    (layout,) = describe(attention(NUM_LAYERS, NUM_HEADS, HEAD_DIM, dtype, item_bytes), shape, FIRST_ADDRESS)
    made = jax.jit(lambda: jnp.zeros((num_blocks, BLOCK_TOKENS, NUM_HEADS, HEAD_DIM), dtype))
    side = Side(JaxCaches([made() for _ in range(NUM_ARRAYS)], [layout]), num_bytes=SLOT_BYTES)
    side.host[:] = 1
    outside = side.address + np.arange(SLOT_BYTES // unit) * unit
    before = resident_bytes("VmRSS")
    CLEAR.write_text("5")  # The peak begins anew.
    for number in range(NUM_SLOTS):
        block = (7 * number + 3 * np.arange(len(outside) // NUM_ARRAYS)) % num_blocks
        inside = np.concatenate([region.address + block * unit for region in layout.regions])
        for rows in ((outside[: len(inside)], inside), (inside, outside[: len(inside)])):
            if error := side.move(*rows, [unit] * len(inside)):
                raise SystemExit(error)
    print(resident_bytes("VmHWM") - before)
    side.close()


if __name__ == "__main__":
    main()
