"""From the fields of a body with messages to a prompt: the same for a chat and for `/tokenize`; pure."""

from __future__ import annotations

from typing import Any, Protocol

from kvferry.embedded.request.messages import plain_messages
from kvferry.embedded.request.prompts import ChatPrompt
from kvferry.errors import RequestError


class ChatFields(Protocol):
    """What decides the tokens of messages, with vLLM's names and defaults; null is the default."""

    @property
    def messages(self) -> list[dict[str, Any]]: ...

    @property
    def add_generation_prompt(self) -> bool | None: ...

    @property
    def continue_final_message(self) -> bool | None: ...

    @property
    def add_special_tokens(self) -> bool | None: ...

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


def chat_prompt(body: ChatFields) -> ChatPrompt:
    """Raises RequestError for messages that are none, and for fields that exclude each other."""
    generates, continues = body.add_generation_prompt is not False, bool(body.continue_final_message)
    if generates and continues:
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other",
            found="both",
            expected="one of them",
            hint="set add_generation_prompt to false; it is true by default",
            param="add_generation_prompt",
        )
    return ChatPrompt(
        messages=plain_messages(body.messages),
        add_generation_prompt=generates,
        continue_final_message=continues,
        add_special_tokens=bool(body.add_special_tokens),
        template_values=body.chat_template_kwargs or {},
    )
