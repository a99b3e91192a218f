"""What an engine can take in one request."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.embedded.engine.records import Request
from kvferry.errors import PromptTooLongError, RequestError


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
                param="max_tokens" if request.prompt else "prompt",
            )
        self.check_ids("prompt", request.prompt)
        self.check_ids("stop_token_ids", tuple(request.stop_token_ids))
        for name, token_ids in request.sampling.token_ids.items():
            self.check_ids(name, token_ids)
        num_tokens = len(request.prompt) + request.max_new_tokens
        if num_tokens > self.max_tokens:
            raise PromptTooLongError(
                "the prompt and its answer are too long for this engine",
                found=f"{len(request.prompt)} prompt tokens + {request.max_new_tokens} new tokens",
                expected=f"at most {self.max_tokens} together",
                hint=f"shorten the prompt or lower max_tokens: {self.reason}",
                param="max_tokens",
            )

    def check_ids(self, name: str, token_ids: tuple[int, ...]) -> None:
        """Check the token ids in one field of a request. Raises RequestError."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
            raise RequestError(
                f"{name} has a token id that is not in the model's vocabulary",
                found=str(wrong),
                expected=f"0 <= id < {self.vocab_size}",
                param=name,
            )
