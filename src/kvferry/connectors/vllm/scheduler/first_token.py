"""The token that a prefill has sampled, for decode engines that compute no token of a prompt."""

from __future__ import annotations

from vllm.v1.request import Request

from kvferry import FirstToken


def first_token_of(request: Request, num_tokens: int) -> FirstToken | None:
    """What follows the first `num_tokens` tokens of a request, where vLLM has sampled it. How likely it is no connector
    is told."""
    place = num_tokens - request.num_prompt_tokens
    found = list(request.output_token_ids)[place : place + 1] if place >= 0 else []
    return FirstToken(found[0]) if found and found[0] >= 0 else None
