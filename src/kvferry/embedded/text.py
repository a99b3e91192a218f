"""From token ids to text while they come: never half a character, never a stop string nor a part of one."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Detokenizer", "StopFilter", "TextStream", "Tokenizer"]

REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """The part of a tokenizer that is used here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """Turns ids into text piece by piece; all pieces together are the text of all ids.

    Only a window of ids is decoded each time. It starts at a token whose text is out already, because some
    tokenizers write a token differently at the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window = 0
        self._done = 0

    def push(self, token_id: int) -> str:
        """The text that is certain with this token; empty while a character is not complete."""
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT):
            return ""
        self._window, self._done = self._done, len(self._ids)
        return text

    def flush(self) -> str:
        """The end of the text; bytes that are no character become U+FFFD, as in a whole decode."""
        text = self._new_text()
        self._window = self._done = len(self._ids)
        return text

    def _new_text(self) -> str:
        known = self._decode(self._ids[self._window : self._done])
        return self._decode(self._ids[self._window :])[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class StopFilter:
    """Ends a text before the first of several strings and keeps back what may become one of them."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._kept = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may be shown; after a stop string nothing more."""
        if self.stopped:
            return ""
        text = self._kept + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._kept = True, ""
            return text[: min(found)]
        cut = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was kept back and did not become a stop string."""
        text, self._kept = self._kept, ""
        return text


class TextStream:
    """The text of one answer: ids in, showable text out."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._filter = StopFilter(stops)

    @property
    def stopped(self) -> bool:
        """A stop string was found: nothing after it is shown."""
        return self._filter.stopped

    def push(self, token_id: int, last: bool) -> str:
        """The text that one more token makes showable; all that is left when it is the last one."""
        text = self._filter.push(self._detokenizer.push(token_id))
        if last:
            text += self._filter.push(self._detokenizer.flush())
            text += self._filter.flush()
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that is a beginning of the stop string, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
