"""How answers look in the two endpoints of the OpenAI dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.embedded.serving.chunks import AnswerChunk, Candidate, ScoredToken


class CompletionObjects:
    id_prefix = "cmpl-"
    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def whole(self, piece: AnswerChunk) -> dict[str, Any]:
        return self.chunk(piece)

    def chunk(self, piece: AnswerChunk) -> dict[str, Any]:
        return _choice(piece.index, {"text": piece.text}, completion_logprobs(piece.scored), piece.finish_reason)

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        return []

    def with_prompts(self, body: dict[str, Any], prompts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        choices = [one | {"prompt_token_ids": list(prompts[one["index"]])} for one in body["choices"]]
        return body | {"choices": choices}


class ChatObjects:
    id_prefix = "chatcmpl-"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def whole(self, piece: AnswerChunk) -> dict[str, Any]:
        shown = {"message": {"role": "assistant", "content": piece.text}}
        return _choice(piece.index, shown, chat_logprobs(piece.scored), piece.finish_reason)

    def chunk(self, piece: AnswerChunk) -> dict[str, Any]:
        shown = {"delta": {"content": piece.text} if piece.text else {}}
        return _choice(piece.index, shown, chat_logprobs(piece.scored), piece.finish_reason)

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        shown = {"delta": {"role": "assistant", "content": ""}}
        return [_choice(index, shown, None, "") for index in range(num_choices)]

    def with_prompts(self, body: dict[str, Any], prompts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        return body | {"prompt_token_ids": list(prompts[0])}


def _choice(index: int, shown: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str) -> dict[str, Any]:
    return {"index": index, **shown, "logprobs": logprobs, "finish_reason": finish_reason or None}


def usage(num_prompt_tokens: int, num_new_tokens: int) -> dict[str, int]:
    """Tokens of the prompt and of the answer, the one that ended it included."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
    }


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
        "content": [_candidate(token.chosen) | {"top_logprobs": list(map(_candidate, token.top))} for token in tokens]
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.text.encode())}
