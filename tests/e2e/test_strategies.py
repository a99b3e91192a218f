"""Every way through staging memory, between whole engines."""

from __future__ import annotations

import pytest
from conftest import BYTES_PER_TOKEN, both
from test_main_job import prompt_of


@pytest.mark.parametrize(
    ("transport", "strategy"),
    [
        ("auto", "pack"),
        pytest.param("tcp", "scatter", marks=pytest.mark.slow),
        pytest.param("tcp", "pack", marks=pytest.mark.slow),
        pytest.param("auto", "scatter", marks=pytest.mark.slow),
    ],
)
def test_the_answer_is_the_same_through_staging_memory(start_fleet, strategy, transport):
    fleet = start_fleet(transport=transport, decode_block_tokens=32, more=("--strategy", strategy))
    for num_tokens in (1, 100, 2500):
        answer, alone = both(fleet, prompt_of(num_tokens))
        assert answer.token_ids == alone.token_ids
        assert (answer.report["tokens_computed"], answer.report["recomputed"]) == (1, "")
        assert answer.report["bytes"] == (num_tokens - 1) * BYTES_PER_TOKEN
        if num_tokens > 1:
            assert answer.report["strategy"] == strategy
    fleet.__exit__(None, None, None)
