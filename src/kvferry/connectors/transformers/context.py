"""How long a sequence may be so that its tokens do not depend on what is computed beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Context:
    """The longest sequence, and a sentence that says where this limit comes from."""

    max_tokens: int
    reason: str


def context_of(config: Any) -> Context:
    """The context of a model, by its text config.

    With longrope, upstream turns all tokens of a step by its long factors as soon as one position lies beyond the
    original context (`dynamic_rope_update`): those of short requests beside it as well, but not the first pieces of the
    same prompt. Up to the original context the factors are the short ones, always; vLLM's default is the same limit.
    """
    whole = Context(
        int(getattr(config, "max_position_embeddings", None) or UNLIMITED), "this is the context length of the model"
    )
    original = [int(rope["original_max_position_embeddings"]) for rope in _ropes(config)]
    if min(original, default=UNLIMITED) >= whole.max_tokens:
        return whole
    return Context(min(original), "this is the model's context length before longrope extends it")


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The parameters of every longrope: a model has one kind of positions, or one for each type of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return [one for one in each if one.get("rope_type") == "longrope"]
