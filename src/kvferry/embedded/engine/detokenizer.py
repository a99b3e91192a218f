"""From token ids to text while they come: never half a character, never a stop string nor a part of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

REPLACEMENT = "\ufffd"
# So many tokens of a prompt say how the first one after it is written, as in vLLM.
CONTEXT_TOKENS = 8
MAX_CHARACTER_BYTES = 4
# Behind so many tokens without a text, the next one is written as at the start of a text.
MAX_WINDOW = 64


class Tokenizer(Protocol):
    """The part of a tokenizer that is used here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """Turns the ids behind a prompt into text piece by piece; all pieces together are the text of all ids.

    Only a window of ids is decoded each time. It starts at a token that has a text which is out already, because some
    tokenizers write a token differently at the start of a text: without the space before it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._window = 0
        self._done = len(self._ids)
        self._is_placed = False

    def push(self, token_id: int) -> str:
        """The text that is certain with this token; empty while a character is not complete."""
        if not self._is_placed:
            self._place()
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT):
            return ""
        if text or self._done - self._window >= MAX_WINDOW:
            self._window = self._done
        self._done = len(self._ids)
        return text

    def flush(self) -> str:
        """The end of the text; bytes that are no character become U+FFFD, as in a whole decode."""
        text = self._new_text()
        self._window = self._done = len(self._ids)
        return text

    def _place(self) -> None:
        """Find what is known of the prompt. Not before there is an answer: the prompt has been checked then."""
        self._is_placed = True
        # The context may begin within a character; and a prompt of token ids may end within one, which is shown when
        # it is whole.
        for start, missing in product(range(MAX_CHARACTER_BYTES), repeat=2):
            ids = self._ids[start : len(self._ids) - missing]
            text = self._decode(ids)
            if text == text.strip(REPLACEMENT):
                self._window, self._done = start, start + len(ids)
                break

    def _new_text(self) -> str:
        known = self._decode(self._ids[self._window : self._done])
        return self._decode(self._ids[self._window :])[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


class StopFilter:
    """Ends a text before the first of several strings and keeps back what may become one of them."""

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._kept = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may be shown; after a stop string nothing more. Of several the one counts that ends first, as
        if each letter came alone."""
        if self.stopped:
            return ""
        num_old, text = len(self._kept), self._kept + text
        if found := [(at + len(stop), at) for stop in self._stops if (at := _find(stop, text, num_old)) >= 0]:
            end, at = min(found)
            self.stopped, self._kept = True, ""
            return text[:end] if self._include_stop else text[:at]
        return self._show(text)

    def pass_over(self, text: str) -> str:
        """The text that may be shown of one in which no stop string ends the answer; one may begin in it."""
        return self._show(self._kept + text)

    def _show(self, text: str) -> str:
        cut = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was kept back and did not become a stop string."""
        text, self._kept = self._kept, ""
        return text


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text. Strings of `stops` count from the token after the first `min_tokens`; `include_stop`
    shows the string, or the token, that has ended the answer."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


class TextStream:
    """The text of one answer to a prompt: ids in, showable text out."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions, prompt: Sequence[int] = ()) -> None:
        self._options = options
        self._detokenizer = Detokenizer(tokenizer, options.skip_special_tokens, prompt)
        self._filter = StopFilter(options.stops, options.include_stop)
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string was found: nothing after it is shown."""
        return self._filter.stopped

    def push(self, token_id: int, last: bool, is_stop: bool = False) -> str:
        """The text that one more token makes showable; all that is left when it is the last one. `is_stop` says that
        the token itself ends the answer."""
        self._num_tokens += 1
        new = "" if is_stop and not self._options.include_stop else self._detokenizer.push(token_id)
        text = self._filtered(new)
        if last:
            text += self._filtered(self._detokenizer.flush())
            text += self._filter.flush()
        return text

    def _filtered(self, text: str) -> str:
        is_early = self._num_tokens <= self._options.min_tokens
        return self._filter.pass_over(text) if is_early else self._filter.push(text)


def _find(stop: str, text: str, num_old: int) -> int:
    """Where a stop string begins that ends behind the first `num_old` letters; -1 if none does."""
    return text.find(stop, max(0, num_old - len(stop) + 1))


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that is a beginning of the stop string, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
