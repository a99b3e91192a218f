"""Kinds of requests: what one asks of prefill may be what an engine cannot do, whatever the instance. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b

from kvferry.http.request_fields import fields_of
from kvferry.router.policy.records import RequestCost
from kvferry.router.request.client_request import ClientRequest

# It matches only a field: in a string of JSON the quotes would be escaped.
PART_TYPE = re.compile(rb'"type"\s*:\s*"([a-z_]{1,32})"')
DIGEST_BYTES = 16
# Cuts off the name of a forced tool: whichever it is, a forced call is what engines may not be able to do.
MAX_CHOICE_BYTES = 32


@dataclass(frozen=True, slots=True)
class RequestKind:
    """`digest` tells kinds apart, whatever clients write; `words` are for the log, and no client's own."""

    digest: bytes
    words: str


def kind_of(request: ClientRequest, cost: RequestCost) -> RequestKind:
    """The kind of a request: its endpoint, model or adapter, fields, forced tool call, types of message parts, and the
    length of the prompt to a power of two. So neither images that no engine can read nor prompts that take too long
    are a reason to do without prefill for others."""
    parts = sorted(set(PART_TYPE.findall(request.given(request.dialect.content.field))))
    choice = bytes(request.fields.get("tool_choice", b""))[:MAX_CHOICE_BYTES]
    digest = blake2b(digest_size=DIGEST_BYTES)
    length = cost.prompt_tokens.bit_length().to_bytes(2)
    for word in (request.endpoint.encode(), cost.model.encode(errors="surrogatepass"), length, choice, *parts):
        digest.update(b"%d:%b" % (len(word), word))
    digest.update("".join(f"{len(name)}:{name}" for name in sorted(request.fields)).encode(errors="surrogatepass"))
    known = request.fields.keys() & fields_of(request.endpoint).keys()
    return RequestKind(digest.digest(), ", ".join(sorted(known)))
