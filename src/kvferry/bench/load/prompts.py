"""Random prompts of given lengths, made of named pieces; equal names give equal tokens. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Every model has these ids, and no special token is among them: bytes in most vocabularies.
FIRST_ID, LAST_ID = 32, 255
# Words that most tokenizers know as one token each.
WORDS = (
    *("the", "a", "one", "two", "on", "in", "at", "over", "when", "then", "and", "or", "not", "all", "some", "river"),
    *("water", "boat", "sea", "wind", "night", "day", "hour", "time", "way", "side", "end", "bank", "line", "house"),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_tokens` tokens that follow from `name` alone: prompts that begin with the same pieces begin alike."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Pieces, one after the other."""

    pieces: tuple[Piece, ...]

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)

    def token_ids(self) -> list[int]:
        """Exactly `num_tokens` ids."""
        ids: list[int] = []
        for piece in self.pieces:
            ids.extend(random.Random(piece.name).choices(range(FIRST_ID, LAST_ID + 1), k=piece.num_tokens))
        return ids

    def text(self) -> str:
        """About `num_tokens` tokens, a word each: the server's tokenizer has the last word."""
        words: list[str] = []
        for piece in self.pieces:
            words.extend(random.Random(piece.name).choices(WORDS, k=piece.num_tokens))
        return " ".join(words)
