"""The messages of a chat as chat templates take them: checked, and what templates do not read is refused; pure.

Optional fields go to the model's chat template. One that the template does not look at would be ignored: it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import Any, TypeVar

import jinja2
import msgspec

from kvferry.embedded.request.bodies import (
    ChatBody,
    ChatMessage,
    ContentPart,
    TokenizeChatBody,
    ToolCall,
    invalid_value,
    shown,
)
from kvferry.embedded.request.support import SUPPORT, refuse_unsupported
from kvferry.errors import RequestError

Kind = TypeVar("Kind")

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
OPTIONAL = tuple(name for name in ChatMessage.__struct_fields__ if name not in ("role", "content"))


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's chat template, which writes the special tokens itself. It ends with the beginning of an
    answer (`add_generation_prompt`), or amid the last message (`continue_final_message`). `template_values` are values
    of the template's own names, such as `enable_thinking`. `size` is that of the request's body."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_values: dict[str, Any] = field(default_factory=dict)
    size: int = field(default=0, compare=False)


def chat_prompt(body: ChatBody | TokenizeChatBody, size: int) -> ChatPrompt:
    """The prompt of a chat in a body of so many bytes. Raises RequestError for invalid messages, and for fields that
    exclude each other."""
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
        size=size,
    )


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates take them. Raises RequestError for other content than text, and for unread fields."""
    return [_plain(message, f"messages[{index}].") for index, message in enumerate(messages)]


class WatchedMessage(dict[str, Any]):
    """A message that notes which of its fields a chat template has looked at, in `read`."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.read: set[object] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.read.add(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self.read.update(super().keys())
        return super().__iter__()

    def values(self) -> Any:
        self.read.update(super().keys())
        return super().values()

    def items(self) -> Any:
        self.read.update(super().keys())
        return super().items()


def refuse_unread(messages: list[WatchedMessage]) -> None:
    """Raises RequestError naming the first optional field that the template has not looked at."""
    for index, message in enumerate(messages):
        for name in OPTIONAL:
            if name in message.keys() - message.read:
                raise RequestError(
                    f"messages[{index}].{name} is not supported: the model's chat template does not read it",
                    found=f"{name} in a message of role {message['role']}",
                    expected="role and content, and what the template reads",
                    hint=f"leave {name} out, or write it into content",
                    param=f"messages[{index}].{name}",
                )


def _plain(fields: dict[str, Any], where: str) -> dict[str, Any]:
    refuse_unsupported(SUPPORT[ChatMessage], fields, where)
    message = _converted(fields, ChatMessage, where)
    if message.role not in ROLES:
        found, param = f"role {message.role!r}", f"{where}role"
        raise RequestError("unknown role of a message", found=found, expected=", ".join(ROLES), param=param)
    optional = {name: getattr(message, name) for name in OPTIONAL if getattr(message, name)}
    if message.tool_calls:
        optional["tool_calls"] = [_call(call, where) for call in message.tool_calls]
    return {"role": message.role, "content": _content(message, where), **optional}


def _content(message: ChatMessage, where: str) -> str | list[dict[str, str]]:
    if message.content is None and message.role != "assistant":
        found, param = f"role {message.role!r}", f"{where}content"
        raise RequestError("a message has no content", found=found, expected="content: a string", param=param)
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return [_part(part, f"{where}content[{index}].") for index, part in enumerate(message.content)]


@lru_cache(maxsize=8)
def takes_parts(template: str) -> bool:
    """Whether a chat template goes over the parts of a content. As in vLLM, others get the text of all parts as one
    string."""
    tokens = jinja2.Environment().lex(template)
    words = [(kind, value.strip("'\"")) for _, kind, value in tokens if kind not in ("whitespace", "data")]
    for at, word in enumerate(words):
        if word == ("name", "for"):
            # What is gone over ends where it is filtered, or chosen from.
            over = takewhile(lambda one: one[0] != "block_end" and one[1] not in ("|", "if"), words[at:])
            loop = [value for _, value in over]
            if "content" in loop[loop.index("in") :] and "(" not in loop:
                return True
    return False


def in_lines(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is one string, a line for each part."""
    content = message["content"]
    return message if isinstance(content, str) else {**message, "content": "\n".join(part["text"] for part in content)}


def _part(fields: dict[str, Any], where: str) -> dict[str, str]:
    part = _converted(fields, ContentPart, where)
    if part.type != "text":
        what = f"only text content is supported in {where.rstrip('.')}"
        raise RequestError(what, found=part.type, expected="text", param=f"{where}type")
    refuse_unsupported(SUPPORT[ContentPart], fields, where)
    return {"type": "text", "text": part.text}


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    """A tool call for chat templates, which take its arguments as an object. Clients send them as its JSON text."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(
                f"{where}tool_calls has arguments that cannot be read",
                found=str(error),
                expected="a JSON object",
                param=f"{where}tool_calls",
            ) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": call.type, "function": function} | ({"id": call.id} if call.id else {})


def _converted(fields: dict[str, Any], kind: type[Kind], where: str) -> Kind:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise invalid_value(error, {name: shown(value) for name, value in fields.items()}, where) from None
