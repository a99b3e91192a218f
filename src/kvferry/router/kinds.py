"""Kinds of requests that prefill instances answer with errors: pure, on any monotonic clock.

A prefill leg may be what an engine cannot do, whatever the instance: for a while such requests have none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b

from kvferry.request_fields import fields_of
from kvferry.router.breaker import Breaker, BreakerState, Fuse
from kvferry.router.request import ClientRequest

__all__ = ["KIND_FUSE", "MAX_KINDS", "Kind", "Kinds", "kind_of"]

KIND_FUSE = Fuse(num_failures=5, open_s=5.0, max_open_s=60.0)
# Clients write what they like into requests: no more kinds than these are remembered.
MAX_KINDS = 256
# In a string of JSON the quotes would be escaped: this is a field.
PART_TYPE = re.compile(rb'"type"\s*:\s*"([a-z_]{1,32})"')
DIGEST_BYTES = 16
# Of a tool that is named, not the name: to be forced is what engines may not be able to do.
MAX_CHOICE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Kind:
    """`digest` tells kinds apart, whatever clients write; `words` are for the log, and no client's own."""

    digest: bytes
    words: str


def kind_of(request: ClientRequest, model: str) -> Kind:
    """By the endpoint, the model or adapter, the fields, a forced tool call, and the parts that messages are made of:
    images that no engine can read are no reason to do without prefill for text."""
    parts = sorted(set(PART_TYPE.findall(bytes(request.fields.get("messages", b"")))))
    choice = bytes(request.fields.get("tool_choice", b""))[:MAX_CHOICE_BYTES]
    digest = blake2b(digest_size=DIGEST_BYTES)
    for word in (request.endpoint.encode(), model.encode(errors="surrogatepass"), choice, *parts):
        digest.update(b"%d:%b" % (len(word), word))
    digest.update("".join(f"{len(name)}:{name}" for name in sorted(request.fields)).encode(errors="surrogatepass"))
    known = request.fields.keys() & fields_of(request.endpoint).keys()
    return Kind(digest.digest(), ", ".join(sorted(known)))


class Kinds:
    """A breaker for each kind that has failed since it last went well."""

    def __init__(self, fuse: Fuse = KIND_FUSE) -> None:
        self._fuse = fuse
        self._breakers: dict[Kind, Breaker] = {}

    def __len__(self) -> int:
        return len(self._breakers)

    def may_begin(self, kind: Kind, now: float) -> bool:
        """Whether a prefill leg may be tried; while one is tried after a pause, no other one is."""
        breaker = self._breakers.get(kind)
        if breaker is None:
            return True
        may_begin = breaker.may_begin(now)
        if may_begin:
            breaker.begin(now)
        return may_begin

    def succeeded(self, kind: Kind) -> None:
        self._breakers.pop(kind, None)

    def failed(self, kind: Kind, now: float) -> bool:
        """No instance could do it. Whether that makes it go without prefill from now on."""
        if kind not in self._breakers and len(self._breakers) >= MAX_KINDS:
            del self._breakers[next(iter(self._breakers))]
        breaker = self._breakers.setdefault(kind, Breaker(self._fuse))
        was_open = breaker.state(now) is BreakerState.OPEN
        breaker.failed(now)
        return breaker.state(now) is BreakerState.OPEN and not was_open

    def abandoned(self, kind: Kind) -> None:
        """The request ended before anybody could tell."""
        if kind in self._breakers:
            self._breakers[kind].abandoned()

    def clear(self) -> None:
        """There are other engines now."""
        self._breakers.clear()
