"""What the prompt of a vLLM request is, for agents that compare it with what they have computed."""

from __future__ import annotations

from vllm.v1.request import Request

from kvferry.errors import RequestError
from kvferry.plan.prompt import UNKNOWN_PROMPT, Prompt

__all__ = ["prompt_of"]


def prompt_of(request: Request, num_tokens: int) -> Prompt:
    """Its first `num_tokens` tokens, and the adapter that computes with them. Where tokens only stand for embeddings
    nothing can be compared."""
    if request.prompt_embeds is not None or not request.prompt_token_ids:
        return UNKNOWN_PROMPT
    adapter = request.lora_request.lora_name if request.lora_request else ""
    try:
        return Prompt.of(request.prompt_token_ids[:num_tokens], adapter)
    except RequestError:
        # vLLM takes ids that are none, and an error here would end the engine. That request gets on as it did before.
        return UNKNOWN_PROMPT
