"""Which prompt a cache belongs to: what a target says of its own, so that a source can tell it from another one.

A reference is handed around by clients. Used with another prompt that is not longer, every byte would arrive as it
should, and be the cache of something else.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from kvferry.errors import RequestError

__all__ = ["UNKNOWN_PROMPT", "UNNAMED", "Prompt", "PromptName"]

TOKEN_BYTES = 4
NAME_BYTES = 16
MAX_NAME_BYTES = 64
MAX_TOKENS = 1 << 48


@dataclass(frozen=True, slots=True)
class PromptName:
    """A digest of the first `num_tokens` tokens of a prompt; an empty `value` says nothing. Comes from peers: raises
    RequestError for what cannot be one."""

    num_tokens: int
    value: bytes

    def __post_init__(self) -> None:
        if len(self.value) > MAX_NAME_BYTES or not 0 <= self.num_tokens < MAX_TOKENS:
            found, expected = f"{len(self.value)} bytes for {self.num_tokens} tokens", f"at most {MAX_NAME_BYTES} bytes"
            raise RequestError("the name of a prompt is none", found=found, expected=expected)


UNNAMED = PromptName(0, b"")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a request, four bytes each, and what else its cache depends on, such as an adapter's name."""

    tokens: bytes = field(default=b"", repr=False)
    context: str = ""

    @classmethod
    def of(cls, token_ids: Iterable[int], context: str = "") -> Prompt:
        """Raises RequestError for what is no token id."""
        try:
            return cls(array("I", token_ids).tobytes(), context)
        except (OverflowError, TypeError) as error:
            expected = "token ids from 0 to 2**32 - 1"
            raise RequestError("a prompt is not made of tokens", found=str(error), expected=expected) from error

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def name(self, lease_id: str) -> PromptName:
        """What this prompt is called where a lease is spoken of: another lease, another name."""
        return self._name(lease_id, self.num_tokens) if self.tokens else UNNAMED

    def begins_with(self, name: PromptName, lease_id: str) -> bool:
        """Whether what has that name is this prompt, or the beginning of it. If either is not known it may be."""
        if not (self.tokens and name.value):
            return True
        return name.num_tokens <= self.num_tokens and self._name(lease_id, name.num_tokens) == name

    def _name(self, lease_id: str, num_tokens: int) -> PromptName:
        head = "".join(f"{len(part)}:{part}" for part in (lease_id, self.context))
        digest = blake2b(head.encode(errors="surrogatepass"), digest_size=NAME_BYTES)
        digest.update(memoryview(self.tokens)[: num_tokens * TOKEN_BYTES])
        return PromptName(num_tokens, digest.digest())


UNKNOWN_PROMPT = Prompt()
