"""Rows that a check moves, and what must have come of them: plain indexing, which knows neither planner nor kernels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.plan.programs.copies import Copies

SEED = 11


def noise(num_bytes: int, seed: int = SEED) -> torch.Tensor:
    """Bytes of the host."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8))


def rows(source: torch.Tensor, target: torch.Tensor, places: NDArray[np.int64]) -> Copies:
    """`places` are (offset in source, offset in target, length), in bytes, a row each."""
    starts = np.array([source.data_ptr(), target.data_ptr(), 0], np.uint64)
    columns = (places.astype(np.uint64) + starts).T
    source_at, target_at, length = (np.ascontiguousarray(column) for column in columns)
    return Copies(source_at, target_at, length, len(places))


def copied(source: torch.Tensor, target: torch.Tensor, places: NDArray[np.int64]) -> torch.Tensor:
    """What a target in the host has after rows were copied: they, and nothing else, have changed."""
    after = target.clone()
    for start, goal, length in places.tolist():
        after[goal : goal + length] = source[start : start + length]
    return after
