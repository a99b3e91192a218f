"""What the kernels do, in torch, row after row: their specification. Nobody who is in a hurry calls this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies


@dataclass(frozen=True, slots=True, eq=False)
class Bytes:
    """Memory of any device: byte i of `flat`, a uint8 tensor of one dimension, has the address `address + i`."""

    address: int
    flat: torch.Tensor

    def holds(self, start: int, num_bytes: int) -> bool:
        return self.address <= start and start + num_bytes <= self.address + self.flat.numel()

    def part(self, start: int, num_bytes: int) -> torch.Tensor:
        """The bytes from address `start` on."""
        offset = start - self.address
        return self.flat[offset : offset + num_bytes]


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """All memory behind a tensor, whatever its element size, shape, strides and offset."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return Bytes(storage.data_ptr(), flat)


def copy(copies: Copies, source: Sequence[Bytes], target: Sequence[Bytes]) -> None:
    """Copy every row from the memory that holds it at the source to the one that holds it at the target.

    A gather is this with scattered addresses at the source, a scatter is this with scattered addresses at the target.
    Targets must not overlap one another or a source. Raises TransportError naming the first row that no memory holds.
    """
    rows = zip(copies.source.tolist(), copies.target.tolist(), copies.length.tolist(), strict=True)
    for number, (start, goal, num_bytes) in enumerate(rows):
        bits = _part(source, start, num_bytes, f"row {number} at the source")
        _part(target, goal, num_bytes, f"row {number} at the target").copy_(bits)


def _part(memories: Sequence[Bytes], start: int, num_bytes: int, what: str) -> torch.Tensor:
    for memory in memories:
        if memory.holds(start, num_bytes):
            return memory.part(start, num_bytes)
    raise TransportError(
        f"{what} is in none of the given memories",
        found=f"{num_bytes} bytes at {start:#x}",
        expected=", ".join(f"{memory.flat.numel()} bytes at {memory.address:#x}" for memory in memories),
    )
