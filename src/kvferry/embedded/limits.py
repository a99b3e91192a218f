"""What an engine can take in one request."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.embedded.entry import Request
from kvferry.errors import PromptTooLongError, RequestError

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Token ids below `vocab_size`, and sequences of `max_tokens` tokens; `reason` says where the latter comes from."""

    vocab_size: int
    max_tokens: int
    reason: str

    def check(self, request: Request) -> None:
        """Raises RequestError, PromptTooLongError. An id beyond the vocabulary would end the engine's thread."""
        if request.max_new_tokens < 1 or not request.prompt:
            raise RequestError(
                "a request needs a prompt and at least one new token",
                found=f"{len(request.prompt)} prompt tokens, {request.max_new_tokens} new ones",
                expected="at least one of each",
            )
        self.check_ids("a token id", request.prompt)
        named = (*request.sampling.token_ids, *request.stop_token_ids)
        if named:
            self.check_ids("a token id in stop_token_ids, logit_bias or allowed_token_ids", named)
        num_tokens = len(request.prompt) + request.max_new_tokens
        if num_tokens > self.max_tokens:
            raise PromptTooLongError(
                "the prompt and its answer are too long for this engine",
                found=f"{len(request.prompt)} prompt tokens + {request.max_new_tokens} new tokens",
                expected=f"at most {self.max_tokens} together",
                hint=f"shorten the prompt or lower max_tokens: {self.reason}",
            )

    def check_ids(self, what: str, token_ids: tuple[int, ...]) -> None:
        """Of one id or more. Raises RequestError."""
        if not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise RequestError(
                f"{what} is not in the model's vocabulary",
                found=f"ids from {min(token_ids)} to {max(token_ids)}",
                expected=f"0 <= id < {self.vocab_size}",
            )
