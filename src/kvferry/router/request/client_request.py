"""A client's request as the router sees it: checked on the surface, its values kept as the bytes that came.

Only what the router itself needs is decoded. Everything else stays raw JSON, so an upstream reads the numbers and
strings that the client wrote, not our rendering of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.errors import RequestError
from kvferry.http.disaggregation import decode_only_reason
from kvferry.http.openai import least_prompts
from kvferry.http.request_fields import Endpoint
from kvferry.router.policy.records import RequestCost
from kvferry.router.request.dialects import DIALECTS, Dialect, Rule
from kvferry.router.request.headers import Headers
from kvferry.router.request.lenient_json import decoded

__all__ = [
    "Call",
    "ClientRequest",
    "Endpoint",
    "decode_body",
    "first_token_body",
    "parse_request",
    "prefill_body",
    "room_decode_body",
    "room_prefill_body",
]

Fields = Mapping[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """`raw` is the body as it came, `fields` its top level. `undivided_reason` is empty when the request can be
    split into a prefill and a decode request, else the label of what forbids it. `streams`: it asks for a stream."""

    raw: bytes
    fields: Fields
    endpoint: Endpoint
    undivided_reason: str
    streams: bool = False

    @property
    def dialect(self) -> Dialect:
        """What the router reads and writes in it."""
        return DIALECTS[self.endpoint]

    def given(self, name: str) -> bytes:
        """A field as it came; empty if it is missing or null."""
        found = bytes(self.fields.get(name, b""))
        return b"" if found == b"null" else found


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request with what the router has found out about it.

    `target` is path and query, `headers` are as they came. `started_s` and `deadline_s`, after which the client has no
    use for an answer, are monotonic time.
    """

    target: str
    headers: Headers
    request_id: str
    request: ClientRequest
    cost: RequestCost
    started_s: float
    deadline_s: float


NULL = msgspec.Raw(b"null")
# How much is shown of a value that cannot be used.
MAX_SHOWN_BYTES = 64
MAX_PROMPTS = 1 << 16
TOP_LEVEL = msgspec.json.Decoder(dict[str, msgspec.Raw])

# What a prefill request asks of P, in the keys that vLLM's connectors and their proxies use.
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Fields of the router's own requests. From a client they could name internal hosts.
FOR_ENGINES = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")


def parse_request(raw: bytes, endpoint: Endpoint) -> ClientRequest:
    """Check a body. Raises RequestError that says what was found, what is expected and what to do."""
    fields = _fields(raw)
    for name in FOR_ENGINES:
        if name in fields:
            raise RequestError(
                f"{name} must not be sent by clients",
                found=f"{name} in the body",
                expected="a plain request of OpenAI's or Anthropic's API",
                hint="omit it: the router sets it",
                param=name,
            )
    dialect = DIALECTS[endpoint]
    content = dialect.content
    if not _has_content(fields, dialect):
        raise RequestError(
            f"{content.field} is missing",
            found="the fields " + ", ".join(sorted(fields)) if fields else "an empty object",
            expected=f"{content.field}: {content.expected}",
            hint=f"{endpoint} needs {content.field}",
            param=content.field,
        )
    if endpoint is Endpoint.COMPLETIONS:
        _check_num_prompts(fields)
    values = {rule.field: _value(fields, rule) for rule in (*dialect.rules, content) if rule.field in fields}
    if values.get("background"):
        raise RequestError(
            "a response in the background cannot be asked for",
            found="background: true",
            expected="background: false",
            hint="leave it out, and stream what takes long: responses are not kept here",
            param="background",
        )
    undecided = (rule for rule in dialect.decisive if rule.field in fields and rule.field not in values)
    reason = decode_only_reason(endpoint, values | {rule.field: _value(fields, rule) for rule in undecided})
    return ClientRequest(raw, fields, endpoint, str(reason or ""), bool(values.get("stream")))


def prefill_body(request: ClientRequest, is_early: bool = False) -> bytes:
    """The body of the prefill request: it asks for one token, and to have the cache kept for another engine.

    With `is_early` it is a stream, of which the first event refers to the cache that is going to be computed.
    """
    left_out = request.dialect.dropped
    body: dict[str, Any] = {key: raw for key, raw in request.fields.items() if key not in left_out}
    params = {**REMOTE_DECODE, "kvferry": {"early": True}} if is_early else REMOTE_DECODE
    body |= _for_one_token(request) | {"stream": is_early, "kv_transfer_params": params}
    if is_early:
        body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body)


def decode_body(request: ClientRequest, transfer: bytes) -> bytes:
    """The client's own bytes with `transfer`, the JSON object that P answered, as one more field."""
    return _with_fields(request.raw, b'{"kv_transfer_params":' + transfer + b"}")


def room_prefill_body(request: ClientRequest, room: bytes) -> bytes:
    """The body of a prefill request of SGLang, whose cache and first token are found by the fields of `room`, a JSON
    object. How many tokens the answer may have is D's concern."""
    return _with_fields(msgspec.json.encode(_before_first_token(request)), _renamed(request, room))


def first_token_body(request: ClientRequest, room: bytes) -> bytes:
    """The same for engines other than SGLang's, which are asked for one token, drawn as the client wants it."""
    body = _before_first_token(request) | _for_one_token(request)
    least = decoded(request.fields.get("min_tokens", NULL), int)
    if least is not None:
        # More than one would be refused. With 0, the first token may be one that ends the answer.
        body["min_tokens"] = min(least, 1)
    return _with_fields(msgspec.json.encode(body), room)


def _before_first_token(request: ClientRequest) -> dict[str, Any]:
    left_out, unkept = request.dialect.dropped_before_first_token, request.dialect.unkept
    return {key: raw for key, raw in request.fields.items() if key not in left_out} | {"stream": False, **unkept}


def _for_one_token(request: ClientRequest) -> dict[str, Any]:
    """The fields that ask for one token, and for the answer not to be kept."""
    first, *others = request.dialect.lengths
    names = (first, *(name for name in others if name in request.fields))
    return {**dict.fromkeys(names, 1), **request.dialect.unkept}


def room_decode_body(request: ClientRequest, room: bytes) -> bytes:
    """The client's own bytes with the fields of `room`, a JSON object."""
    return _with_fields(request.raw, _renamed(request, room))


def _renamed(request: ClientRequest, room: bytes) -> bytes:
    """The fields of `room`, with a new name in place of the client's, if it gives one: SGLang takes none that it may
    know since a try that failed. Completions and chats have a field for that in every room."""
    if request.endpoint is not Endpoint.RESPONSES or "request_id" not in request.fields:
        return room
    name = hashlib.blake2b(room, digest_size=16).hexdigest()
    return _with_fields(room, b'{"request_id":"resp_%b"}' % name.encode())


def _with_fields(raw: bytes, more: bytes) -> bytes:
    """`raw` with the fields of `more` added. Both are JSON objects, and neither is empty."""
    return raw.rstrip(b" \t\r\n").removesuffix(b"}") + b"," + more.removeprefix(b"{")


def _fields(raw: bytes) -> Fields:
    expected, hint = "a JSON object", "send the body as UTF-8 JSON"
    try:
        raw.decode("utf-8")
        return TOP_LEVEL.decode(raw)
    except msgspec.ValidationError as error:
        raise RequestError("the body is not a JSON object", found=str(error), expected=expected, hint=hint) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError("the body is not valid JSON", found=str(error), expected=expected, hint=hint) from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply", expected=expected, hint=hint) from error


def _check_num_prompts(fields: Fields) -> None:
    """Raises RequestError for so many prompts that others would wait for seconds while they are looked at."""
    if (num_prompts := least_prompts(bytes(fields.get("prompt", b"")))) > MAX_PROMPTS:
        raise RequestError(
            "too many prompts in one request",
            found=f"at least {num_prompts:,} prompts",
            expected=f"at most {MAX_PROMPTS:,}",
            hint="send several requests",
            param="prompt",
        )


def _value(fields: Fields, rule: Rule) -> Any:
    try:
        return rule.decoder.decode(fields[rule.field])
    except msgspec.DecodeError as error:
        raise RequestError(
            f"{rule.field} cannot be used",
            found=_short(fields[rule.field]),
            expected=rule.expected,
            hint=f"see the reference of the API for {rule.field}",
            param=rule.field,
        ) from error
    except RecursionError as error:
        what = f"{rule.field} is nested too deeply"
        raise RequestError(what, expected=rule.expected, param=rule.field) from error


def _short(value: msgspec.Raw) -> str:
    """The beginning of a value, as it was sent, since its sender looks for it."""
    sent = memoryview(value)
    rest = "\N{HORIZONTAL ELLIPSIS}" if len(sent) > MAX_SHOWN_BYTES else ""
    return bytes(sent[:MAX_SHOWN_BYTES]).decode("utf-8", "replace") + rest


def _has_content(fields: Fields, dialect: Dialect) -> bool:
    names = (dialect.content.field, dialect.or_else)
    return any(bytes(fields.get(name, NULL)) != b"null" for name in names)
