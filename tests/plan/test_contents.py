"""A name for what is kept, wherever it lies."""

from __future__ import annotations

from kvferry.plan.description.describe import EngineShape, describe
from kvferry.plan.description.layout import contents
from kvferry.plan.description.model import latent


def name(dim: int, block_tokens: int) -> str:
    model = latent(num_layers=2, dim=dim, dtype="int8", item_bytes=1)
    shape = EngineShape(1, 1, block_tokens, 4, "token-major")
    (layout,) = describe(model, shape, 0)
    assert contents(layout) == contents(layout, layout)
    return contents(layout)


def test_only_what_is_kept_counts_and_not_where():
    assert name(4, 16) == name(4, 32)
    assert name(4, 16) != name(8, 16)
