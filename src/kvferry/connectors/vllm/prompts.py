"""What the prompt of a vLLM request is, for agents that compare it with what they have computed."""

from __future__ import annotations

from vllm.v1.request import Request

from kvferry.errors import RequestError
from kvferry.plan.prompt import UNKNOWN_PROMPT, Prompt

__all__ = ["prompt_of"]

# No adapter's name ends so.
EMBEDDED = "\n prompt_embeds"


def prompt_of(request: Request, num_tokens: int) -> Prompt:
    """Its first `num_tokens` tokens, those of its answer included, and the adapter that computes with them. Where
    tokens stand for embeddings, these cannot be compared; but nobody takes them for the tokens."""
    context = request.lora_request.lora_name if request.lora_request else ""
    if request.prompt_embeds is not None:
        context += EMBEDDED
    try:
        return Prompt.of(request.all_token_ids[:num_tokens], context)
    except RequestError:
        # vLLM takes ids that are none, and an error here would end the engine. That request gets on as it did before.
        return UNKNOWN_PROMPT
