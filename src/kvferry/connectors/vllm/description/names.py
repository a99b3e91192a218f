"""From vLLM's names of layers to names that every engine of the model uses."""

from __future__ import annotations

from kvferry.connectors.vllm.description.facts import EngineFacts
from kvferry.errors import LayoutError

_DRAFTS = ("mtp", "draft", "eagle", "medusa", "nextn")


def prefix_of(layer: str, engine: EngineFacts) -> str:
    """`model.layers.3` for `language_model.model.layers.3.self_attn.attn`; `draft.layers.0` for a speculator's first.

    Raises LayoutError when the name has no number.
    """
    parts = layer.split(".")
    numbered = [at for at, part in enumerate(parts) if part.isdecimal()]
    if not numbered:
        raise LayoutError(
            "the name of a layer contains no number", found=layer, expected="as in model.layers.3.self_attn.attn"
        )
    first, number = parts[: numbered[0]], int(parts[numbered[0]])
    # A layer of several attention modules numbers those too.
    rest = "".join(f".{parts[at]}" for at in numbered[1:])
    beyond = 0 < engine.num_layers <= number
    if beyond and "layers" not in first:
        # Falcon-H1 numbers the state-space halves of its layers from the last attention layer on: `model.6.mixer`.
        return f"model.layers.{number - engine.num_layers}{rest}"
    if beyond or engine.layer(layer).is_draft or any(part.startswith(_DRAFTS) for part in first):
        return f"draft.layers.{number - engine.num_layers if beyond else number}{rest}"
    return f"model.layers.{number}{rest}"
