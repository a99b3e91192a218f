"""Text that comes in pieces is the text, and no piece shows too much."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvferry.embedded.engine.detokenizer import Detokenizer, StopFilter, TextOptions, TextStream

TEXTS = st.text(st.sampled_from("ab €ä漢🚢\n"), max_size=40)


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_path)


def test_a_whole_character_or_nothing(tokenizer: Any) -> None:
    ids = tokenizer("🚢漢")["input_ids"]
    assert len(ids) > 2
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) == "🚢漢"
    assert set(pieces) == {"", "🚢", "漢"}


@given(text=TEXTS)
def test_pieces_make_up_the_text(tokenizer: Any, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in tokenizer(text)["input_ids"]]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


@given(ids=st.lists(st.integers(0, 1023), max_size=40))
def test_pieces_make_up_the_text_of_any_ids(tokenizer: Any, ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=True)


@given(
    text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), data=st.data()
)
def test_nothing_of_a_stop_string_is_shown(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stop_filter = StopFilter(tuple(stops))
    shown = []
    for piece in pieces:
        shown.append(stop_filter.push(piece))
        assert not any(stop in "".join(shown) for stop in stops)
        if stop_filter.stopped:
            break
    result = "".join(shown) + stop_filter.flush()
    found = any(stop in text for stop in stops)
    assert stop_filter.stopped == found
    if not found:
        assert result == text
    else:
        assert text.startswith(result)
        assert any(text.startswith(stop, len(result)) for stop in stops)


@cache
def _letters() -> Any:
    class Letters:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join(map(chr, token_ids))

    return Letters()


def test_the_last_token_brings_all_that_was_kept_back() -> None:
    stream = TextStream(_letters(), TextOptions(("xyz",)))
    assert [stream.push(ord("x"), False), stream.push(ord("y"), False)] == ["", ""]
    assert stream.push(ord("!"), True) == "xy!"
    stream = TextStream(_letters(), TextOptions(("xyz",)))
    assert [stream.push(ord("a"), False), stream.push(ord("x"), True)] == ["a", "x"]
    assert not stream.stopped
