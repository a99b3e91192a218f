"""What requests are about: all texts begin with the same tokens, and each is about one of a few images.

In some runs the engines name no prompts. There every request has a cache of its own, and nobody hands on the reference
of another one: that would not be noticed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from zlib import crc32

from kvferry.plan.description.prompt import UNKNOWN_PROMPT, Prompt, PromptInput

NUM_IMAGES = 5
ANY_IMAGE = 1 << 32


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """Prompts with the same image begin alike: what is computed of them is, too."""

    num_tokens: int
    image: int

    @classmethod
    def drawn(cls, rng: random.Random, max_tokens: int, has_names: bool) -> PromptSpec:
        """Any length and any image; where prompts have no names, hardly two with one image."""
        return cls(rng.randint(1, max_tokens), rng.randrange(NUM_IMAGES if has_names else ANY_IMAGE))

    def salt(self, has_fixed_states: bool) -> int:
        """Which bytes are the right ones. A state of fixed size depends on how many tokens there are."""
        return crc32(f"{self.image}|{self.num_tokens if has_fixed_states else ''}".encode())


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """What an engine is to compute: so many tokens of a prompt, whose bytes are then those of `salt`."""

    prompt: Prompt
    num_tokens: int
    salt: int


class Naming:
    """How the engines of a run name prompts, if they do."""

    def __init__(self, has_names: bool) -> None:
        self._has_names = has_names

    def prompt(self, spec: PromptSpec, num_tokens: int) -> Prompt:
        """The first tokens of a question, or more of them."""
        return self._prompt(spec, num_tokens) if self._has_names else UNKNOWN_PROMPT

    def _prompt(self, spec: PromptSpec, num_tokens: int) -> Prompt:
        return Prompt.of(range(num_tokens), [PromptInput("image", str(spec.image))])
