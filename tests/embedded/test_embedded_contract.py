"""The embedded engine's own pool before the contract of connectors: it writes and reads as transformers does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from kvferry import Cache
from kvferry.connectors.jobs import Settings
from kvferry.connectors.transformers import Core
from kvferry.testing.connectors import CONTRACT, Check, EngineUnderTest


def engine_of(model: Path) -> EngineUnderTest:
    """An engine that has been loaded but computes nothing: the checks write its cache."""
    core = Core(Settings(str(model), block_tokens=4, num_blocks=24), lambda event: None)

    def bytes_of(state: str, table: Sequence[int], token: int) -> torch.Tensor:
        _, _, layer, part = state.split(".")
        allocator = next(each for each in core._allocators() if int(layer) in each._kv_token_views)
        allocator.block_table["checked"] = list(table)
        (row,) = allocator.get_write_indices("checked", token, 1)
        view = allocator._kv_token_views[int(layer)]["kv".index(part)][row]
        return view.view(torch.uint8).view(*view.shape, view.itemsize)

    def write(state: str, table: Sequence[int], token: int, element: np.ndarray) -> None:
        bytes_of(state, table, token)[:] = torch.from_numpy(element.copy())

    def read(state: str, table: Sequence[int], token: int) -> np.ndarray:
        return bytes_of(state, table, token).numpy().copy()

    return EngineUnderTest(Cache((core.layout(),), (core.memory(),)), write, read, core.stop)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_the_engine_keeps_the_contract(check: Check, model_path: Path) -> None:
    check(lambda: engine_of(model_path))


@pytest.mark.parametrize("check", CONTRACT[:3], ids=lambda check: check.__name__)
@pytest.mark.slow
def test_an_engine_with_rings_keeps_the_contract(check: Check, sliding_path: Path) -> None:
    check(lambda: engine_of(sliding_path))
