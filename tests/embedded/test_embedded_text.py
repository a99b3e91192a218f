"""Text that comes in pieces is the text, and no piece shows too much."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from embedded_server import Served
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvferry.connectors.jobs import Scored, TokenLogprob
from kvferry.embedded.engine.detokenizer import (
    MAX_WINDOW,
    Detokenizer,
    StopFilter,
    TextOptions,
    TextStream,
)
from kvferry.embedded.serving.chunks import scored_token

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


@pytest.fixture(scope="module")
def spaced_tokenizer() -> Any:
    """As in Llama 2, Mistral and TinyLlama: words carry the space before them, and a text is decoded without its
    first."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁the", "▁ferry", "▁goes", "s", ".", "▁.", "<0xE2>", "<0x82>", "<0xAC>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


EURO = (10, 11, 12)
WORDS = st.lists(st.sampled_from([*((token_id,) for token_id in range(10)), EURO]), max_size=30)


@given(words=WORDS, skips=st.booleans(), data=st.data())
def test_no_space_of_an_answer_is_lost(
    spaced_tokenizer: Any, words: list[tuple[int, ...]], skips: bool, data: st.DataObject
) -> None:
    """A character that begins in the prompt is the answer's when it is whole."""
    ids = [token_id for word in words for token_id in word]
    at = data.draw(st.integers(0, len(ids)))
    detokenizer = Detokenizer(spaced_tokenizer, skips, ids[:at])
    pieces = [detokenizer.push(token_id) for token_id in ids[at:]]
    whole_words = max(end for end in accumulate(map(len, words), initial=0) if end <= at)
    known = spaced_tokenizer.decode(ids[:whole_words], skip_special_tokens=skips)
    whole = spaced_tokenizer.decode(ids, skip_special_tokens=skips)
    assert known + "".join(pieces) + detokenizer.flush() == whole


def test_scored_tokens_have_the_space_before_them(spaced_tokenizer: Any) -> None:
    """Together they are the answer's text."""
    prompt, ids = (4,), (5, 7, 2, 6, 8, 9)
    texts: list[str] = []
    before: tuple[int, ...] = prompt
    for token_id in ids:
        likely = tuple(TokenLogprob(each, -1.0) for each in (token_id, 4))
        scored = scored_token(spaced_tokenizer, Scored("r", likely[0], likely), 0, before)
        texts.append(scored.chosen.text)
        assert [one.text for one in scored.top] == [texts[-1], " the"]
        before = (token_id,)
    assert texts == [" ferry", "s", "</s>", " goes", ".", " ."]


def test_an_answer_begins_as_it_does_behind_its_prompt(
    decoder: Served, spaced_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder.engine, "tokenizer", spaced_tokenizer)
    asked = {"prompt": [4], "max_tokens": 3, "ignore_eos": True, "allowed_token_ids": [5, 6], "logprobs": 1}
    _, answer = decoder.ask("/v1/completions", asked | {"return_token_ids": True})
    (choice,) = answer["choices"]
    words = {5: " ferry", 6: " goes"}
    assert choice["text"] == "".join(words[token_id] for token_id in choice["token_ids"])
    assert choice["logprobs"]["tokens"] == [words[token_id] for token_id in choice["token_ids"]]


def test_many_tokens_without_a_text_do_not_make_the_next_ones_slow(spaced_tokenizer: Any) -> None:
    detokenizer = Detokenizer(spaced_tokenizer)
    for _ in range(1000):
        assert detokenizer.push(2) == ""
    assert detokenizer._done - detokenizer._window <= MAX_WINDOW


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
        # The same as letter by letter, whatever the pieces were.
        ends = min(end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops))
        longest = max((stop for stop in stops if text[:ends].endswith(stop)), key=len)
        assert result == text[: ends - len(longest)]


@cache
def _letters() -> Any:
    class Letters:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join(map(chr, token_ids))

    return Letters()


@pytest.mark.parametrize(
    ("text", "min_tokens", "stops", "shown"),
    [
        ("9atf where", 3, ("f wher",), "9at"),
        ("9atf where", 4, ("f wher",), "9at"),
        ("9atf where", 9, ("f wher",), "9atf where"),
        ("abcab", 3, ("ab", "b"), "abc"),
        ("xab cb", 3, ("ab c", "b"), "x"),
        ("aaaa", 3, ("aa",), "aa"),
    ],
)
def test_a_stop_string_counts_if_it_ends_behind_the_first_tokens(
    text: str, min_tokens: int, stops: tuple[str, ...], shown: str
) -> None:
    """As vLLM has it: `min_tokens` says where one may end and not where it may begin."""
    stream = TextStream(_letters(), TextOptions(stops, min_tokens=min_tokens))
    pieces = []
    for number, letter in enumerate(text):
        pieces.append(stream.push(ord(letter), last=number == len(text) - 1))
        if stream.stopped:
            break
    assert "".join(pieces) == shown


def test_the_last_token_brings_all_that_was_kept_back() -> None:
    stream = TextStream(_letters(), TextOptions(("xyz",)))
    assert [stream.push(ord("x"), False), stream.push(ord("y"), False)] == ["", ""]
    assert stream.push(ord("!"), True) == "xy!"
    stream = TextStream(_letters(), TextOptions(("xyz",)))
    assert [stream.push(ord("a"), False), stream.push(ord("x"), True)] == ["a", "x"]
    assert not stream.stopped
