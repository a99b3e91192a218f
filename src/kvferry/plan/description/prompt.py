"""Which prompt a cache belongs to: what a target says of its own, so that a source can tell it from another one.

A reference is handed around by clients. If one were used with another prompt that is not longer, every byte would
arrive, and be the cache of something else.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from kvferry.errors import RequestError

TOKEN_BYTES = 4
NAME_BYTES = 16
MAX_NAME_BYTES = 64
MAX_TOKENS = 1 << 48


@dataclass(frozen=True, slots=True)
class PromptName:
    """A digest of the first `num_tokens` tokens of a prompt; an empty `value` says nothing. Comes from peers: raises
    RequestError for a name that is too long."""

    num_tokens: int
    value: bytes

    def __post_init__(self) -> None:
        if len(self.value) > MAX_NAME_BYTES or not 0 <= self.num_tokens < MAX_TOKENS:
            found, expected = f"{len(self.value)} bytes for {self.num_tokens} tokens", f"at most {MAX_NAME_BYTES} bytes"
            raise RequestError("the name of a prompt is malformed", found=found, expected=expected)


UNNAMED = PromptName(0, b"")


@dataclass(frozen=True, slots=True)
class PromptInput:
    """Something besides the tokens that a cache depends on, from token number `first_token` on: an adapter, an image,
    a salt. `value` identifies its content, and equals that of another engine with the same content."""

    kind: str
    value: str
    first_token: int = 0

    def encoded(self) -> bytes:
        """The bytes of this input in a digest: no two inputs have the same."""
        head = "".join(f"{len(part)}:{part}" for part in (self.kind, self.value))
        return f"{head}{self.first_token};".encode(errors="surrogatepass")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a request, `token_bytes` each, and what else its cache depends on.

    A token is its id in four bytes. Where embeddings take the place of tokens, each is an id and a digest of its
    embedding: no name of such a prompt equals one that is made of ids alone.
    """

    tokens: bytes = field(default=b"", repr=False)
    inputs: tuple[PromptInput, ...] = field(default=(), repr=False)
    token_bytes: int = TOKEN_BYTES

    @classmethod
    def of(cls, token_ids: Iterable[int], inputs: Iterable[PromptInput] = ()) -> Prompt:
        """Raises RequestError for what is no token id."""
        try:
            return cls(array("I", token_ids).tobytes(), tuple(inputs))
        except (OverflowError, TypeError) as error:
            expected = "token ids from 0 to 2**32 - 1"
            raise RequestError("invalid token id in a prompt", found=str(error), expected=expected) from error

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // self.token_bytes

    def name(self, lease_id: str, num_tokens: int = MAX_TOKENS) -> PromptName:
        """The name of its first `num_tokens` tokens in messages about a lease: another lease, another name."""
        return self._name(lease_id, min(num_tokens, self.num_tokens)) if self.tokens else UNNAMED

    def begins_with(self, name: PromptName, lease_id: str) -> bool:
        """Whether the prompt of that name is this one, or the beginning of it. True if either is not known."""
        if not (self.tokens and name.value):
            return True
        return name.num_tokens <= self.num_tokens and self._name(lease_id, name.num_tokens) == name

    def _name(self, lease_id: str, num_tokens: int) -> PromptName:
        head = f"{len(lease_id)}:{lease_id}".encode(errors="surrogatepass")
        context = self._context(num_tokens)
        digest = blake2b(head + f"{len(context)}:".encode() + context, digest_size=NAME_BYTES)
        digest.update(memoryview(self.tokens)[: num_tokens * self.token_bytes])
        return PromptName(num_tokens, digest.digest())

    def _context(self, num_tokens: int) -> bytes:
        """What the cache of the first tokens depends on; nothing for plain text."""
        width = PromptInput("token_bytes", str(self.token_bytes))
        known = self.inputs if self.token_bytes == TOKEN_BYTES else (width, *self.inputs)
        return b"".join(each.encoded() for each in known if each.first_token < num_tokens)


UNKNOWN_PROMPT = Prompt()
