"""The messages of a chat: every field of a message and of a part of its content, and what becomes of it; pure.

Optional fields go to the model's chat template. One that the template does not look at would be ignored: it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from kvferry.embedded.request.fields import CHAT, NO_MEDIA, NO_PREFIX_CACHE, Support, Verdict, refuse_unsupported
from kvferry.errors import RequestError

Kind = TypeVar("Kind")

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
IF_READ = "when the chat template reads it"


def _rows(verdict: Verdict, reason: str, names: str, *harmless: Any) -> tuple[Support, ...]:
    return tuple(Support(name, CHAT, verdict, reason, harmless) for name in names.split())


MESSAGE_SUPPORT: tuple[Support, ...] = (
    *_rows(Verdict.HONOURED, "", "role content"),
    *_rows(Verdict.HONOURED, IF_READ, "name tool_calls tool_call_id reasoning_content reasoning"),
    *_rows(Verdict.REFUSED, "send it as tool_calls", "function_call"),
    *_rows(Verdict.REFUSED, "send it as content", "refusal"),
    *_rows(Verdict.REFUSED, "the engine does not search the web", "annotations", []),
    *_rows(Verdict.REFUSED, NO_MEDIA, "audio"),
)
PART_SUPPORT: tuple[Support, ...] = (
    *_rows(Verdict.HONOURED, "", "type text"),
    *_rows(Verdict.REFUSED, NO_MEDIA, "image_url input_audio audio_url video_url file"),
    *_rows(Verdict.REFUSED, "the engine does not search the web", "annotations", []),
    *_rows(Verdict.NO_EFFECT, NO_PREFIX_CACHE, "cache_control"),
)
OPTIONAL = tuple(row.name for row in MESSAGE_SUPPORT if row.reason == IF_READ)
MESSAGE_ROWS, PART_ROWS = ({row.name: row for row in rows} for rows in (MESSAGE_SUPPORT, PART_SUPPORT))


class _Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: _Function
    id: str | None = None
    type: Literal["function"] = "function"


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As chat templates take them. Raises RequestError for what is not text, and for fields that nobody would read."""
    if not messages:
        raise RequestError("messages is empty", expected="at least one message", param="messages")
    return [_plain(message, f"messages[{index}].") for index, message in enumerate(messages)]


class WatchedMessage(dict[str, Any]):
    """A message that notes which of its fields a chat template has looked at, in `read`."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.read: set[object] = set()

    def __deepcopy__(self, _memo: object) -> WatchedMessage:
        """Transformers renders copies: they note in the same set."""
        copy = WatchedMessage({name: super(WatchedMessage, self).__getitem__(name) for name in self.keys()})
        copy.read = self.read
        return copy

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
    refuse_unsupported(MESSAGE_ROWS, fields, where)
    message = _converted(fields, _Message, where)
    if message.role not in ROLES:
        found, param = f"role {message.role!r}", f"{where}role"
        raise RequestError("unknown role of a message", found=found, expected=", ".join(ROLES), param=param)
    optional = {name: getattr(message, name) for name in OPTIONAL if getattr(message, name)}
    if message.tool_calls:
        optional["tool_calls"] = [_call(call, where) for call in message.tool_calls]
    return {"role": message.role, "content": _text(message, where), **optional}


def _text(message: _Message, where: str) -> str:
    if message.content is None and message.role != "assistant":
        found, param = f"role {message.role!r}", f"{where}content"
        raise RequestError("a message has no content", found=found, expected="content: a string", param=param)
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "".join(_part(part, f"{where}content[{index}].") for index, part in enumerate(message.content))


def _part(fields: dict[str, Any], where: str) -> str:
    part = _converted(fields, _Part, where)
    if part.type != "text":
        what = f"only text content is supported in {where.rstrip('.')}"
        raise RequestError(what, found=part.type, expected="text", param=f"{where}type")
    refuse_unsupported(PART_ROWS, fields, where)
    return part.text


def _call(call: _ToolCall, where: str) -> dict[str, Any]:
    """Chat templates take arguments as an object, clients send them as its JSON text."""
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
        expected = "a message as the OpenAI API defines it"
        name = where.rstrip(".")
        raise RequestError(f"{name} is invalid", found=str(error), expected=expected, param=name) from None
