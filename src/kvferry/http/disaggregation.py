"""Which requests one prefill cannot stand for: the rules that the router and the connectors share, pure.

A prefill request answers with the cache of one sequence. Several prompts would all be decoded from the first one's
cache, and the second of several samples would read blocks that the prefill engine has freed. The logits of the prompt,
and other things computed with it, exist only where the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvferry.http.request_fields import DecodeOnlyReason, Endpoint, fields_of


def needs_prompt_logits(prompt_logprobs: int | None) -> bool:
    """Whether a request wants the logits of its prompt, whose cache must therefore be computed where it is decoded.

    `prompt_logprobs` is vLLM's sampling parameter, to which its front end brings `echo` as well: 0 asks for them, too.
    """
    return prompt_logprobs is not None


def decode_only_reason(endpoint: Endpoint, asked: Mapping[str, Any]) -> DecodeOnlyReason | None:
    """The label of what forbids a prefill request, or None. `asked` has the decoded values of the `DECISIVE` fields."""
    for name, label in DECISIVE[endpoint].items():
        if name in asked and name not in FOR_PROMPT_LOGITS and CONDITIONS.get(name, _is_given)(asked[name]):
            return label
    if _is_given(asked.get("prompt")) and _is_given(asked.get("prompt_embeds")):
        return DecodeOnlyReason.SEVERAL_SEQUENCES
    return DecodeOnlyReason.PROMPT_LOGPROBS if needs_prompt_logits(_prompt_logprobs(endpoint, asked)) else None


def _prompt_logprobs(endpoint: Endpoint, asked: Mapping[str, Any]) -> int | None:
    """vLLM's sampling parameter, as its front end makes it of the fields. The number itself does not matter here."""
    if _is_given(asked.get("prompt_logprobs")):
        return 0
    if not _is_given(asked.get("echo")):
        return None
    # A chat with `echo` asks for `top_logprobs` logits of its prompt: 0 by default, which asks for logits as well.
    return 0 if endpoint is Endpoint.CHAT or _is_given(asked.get("logprobs")) else None


def _is_given(value: object) -> bool:
    """Whether a field asks for something: 0 does, unlike null and false."""
    return value is not None and value is not False


def _is_several(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _are_several_prompts(value: object) -> bool:
    """Whether there are several prompts. A list of token ids is one."""
    return isinstance(value, list) and len(value) > 1 and not isinstance(value[0], int)


def _depends_on_length(value: object) -> bool:
    """Whether it depends on `max_tokens`, which the prefill request changes: -1 means what the context leaves."""
    return isinstance(value, int) and value < 0


def _runs_in_engine(value: object) -> bool:
    """Whether the engine itself runs one of the tools: it then goes on with a prompt that nobody has prefilled."""
    tools = value if isinstance(value, list) else []
    return any(isinstance(tool, dict) and tool.get("type") in ENGINE_TOOLS for tool in tools)


def _cuts(value: object) -> bool:
    """Whether a part of the prompt may be left out. Which one depends on `max_output_tokens`, which the prefill request
    changes. vLLM leaves something out unless it is told `disabled`, and null does not tell it that."""
    return value != "disabled"


# Types of tools that vLLM 0.32 and SGLang 0.5.23 run. Others, such as functions, are for the client to run.
ENGINE_TOOLS = ("code_interpreter", "container", "mcp", "web_search_preview")
CONDITIONS: Mapping[str, Callable[[object], bool]] = {
    "n": _is_several,
    "best_of": _is_several,
    "prompt": _are_several_prompts,
    "prompt_embeds": _are_several_prompts,
    "truncate_prompt_tokens": _depends_on_length,
    "truncation": _cuts,
    "tools": _runs_in_engine,
}
# These fields decide together, in `_prompt_logprobs`.
FOR_PROMPT_LOGITS = frozenset(("prompt_logprobs", "echo", "logprobs"))

DECISIVE: Mapping[Endpoint, Mapping[str, DecodeOnlyReason]] = {
    endpoint: {"logprobs": DecodeOnlyReason.PROMPT_LOGPROBS}
    | {name: field.decode_only for name, field in fields_of(endpoint).items() if field.decode_only}
    for endpoint in Endpoint
}
"""The fields whose values can stand against a prefill request, with the labels."""
