"""Log-probabilities of an answer's tokens, as the two endpoints of the OpenAI dialect show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry.connectors.jobs import Scored, TokenLogprob
from kvferry.embedded.engine.detokenizer import Tokenizer

# JSON has no infinity; the number is vLLM's.
LEAST = -9999.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token as text, and the logarithm of its probability."""

    text: str
    logprob: float

    def as_chat(self) -> dict[str, Any]:
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.text.encode())}


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer, its place in the answer's text in characters, and the likeliest tokens there."""

    chosen: Candidate
    top: tuple[Candidate, ...]
    text_offset: int


def scored_token(tokenizer: Tokenizer, scored: Scored, text_offset: int) -> ScoredToken:
    """From token ids to text, each token by itself."""

    def candidate(found: TokenLogprob) -> Candidate:
        text = tokenizer.decode([found.token_id], skip_special_tokens=False)
        return Candidate(text, max(found.logprob, LEAST))

    return ScoredToken(candidate(scored.chosen), tuple(candidate(one) for one in scored.top), text_offset)


def completion_logprobs(tokens: tuple[ScoredToken, ...]) -> dict[str, Any] | None:
    """The object of `/v1/completions`; the chosen token is among the likeliest, whether it is one or not."""
    if not tokens:
        return None
    return {
        "tokens": [token.chosen.text for token in tokens],
        "token_logprobs": [token.chosen.logprob for token in tokens],
        "top_logprobs": [{one.text: one.logprob for one in (*token.top, token.chosen)} for token in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


def chat_logprobs(tokens: tuple[ScoredToken, ...]) -> dict[str, Any] | None:
    """The object of `/v1/chat/completions`."""
    if not tokens:
        return None
    return {
        "content": [token.chosen.as_chat() | {"top_logprobs": [one.as_chat() for one in token.top]} for token in tokens]
    }
