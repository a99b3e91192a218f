"""Kinds of requests that prefill instances answer with errors: pure, on any monotonic clock.

A prefill leg may be what an engine cannot do, whatever the instance: for a while such requests have none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b

from kvferry.http.prefill_fields import fields_of
from kvferry.router.fleet.circuit_breaker import Breaker, BreakerSettings, BreakerState, Trial
from kvferry.router.policy.records import RequestCost
from kvferry.router.request.client_request import ClientRequest

KIND_BREAKER = BreakerSettings(num_failures=5, open_s=5.0, max_open_s=60.0)
# Clients write what they like into requests: no more kinds than these are remembered.
MAX_KINDS = 256
# In a string of JSON the quotes would be escaped: this is a field.
PART_TYPE = re.compile(rb'"type"\s*:\s*"([a-z_]{1,32})"')
DIGEST_BYTES = 16
# Of a tool that is named, not the name: to be forced is what engines may not be able to do.
MAX_CHOICE_BYTES = 32


@dataclass(frozen=True, slots=True)
class RequestKind:
    """`digest` tells kinds apart, whatever clients write; `words` are for the log, and no client's own."""

    digest: bytes
    words: str


def kind_of(request: ClientRequest, cost: RequestCost) -> RequestKind:
    """By the endpoint, the model or adapter, the fields, a forced tool call, the parts that messages are made of, and
    the length of the prompt to a power of two: neither images that no engine can read nor prompts that take too long
    are a reason to do without prefill for others."""
    parts = sorted(set(PART_TYPE.findall(bytes(request.fields.get("messages", b"")))))
    choice = bytes(request.fields.get("tool_choice", b""))[:MAX_CHOICE_BYTES]
    digest = blake2b(digest_size=DIGEST_BYTES)
    length = cost.prompt_tokens.bit_length().to_bytes(2)
    for word in (request.endpoint.encode(), cost.model.encode(errors="surrogatepass"), length, choice, *parts):
        digest.update(b"%d:%b" % (len(word), word))
    digest.update("".join(f"{len(name)}:{name}" for name in sorted(request.fields)).encode(errors="surrogatepass"))
    known = request.fields.keys() & fields_of(request.endpoint).keys()
    return RequestKind(digest.digest(), ", ".join(sorted(known)))


class RequestKinds:
    """A breaker for each kind that has failed since it last went well."""

    def __init__(self, settings: BreakerSettings = KIND_BREAKER) -> None:
        self._settings = settings
        self._breakers: dict[RequestKind, Breaker] = {}

    def __len__(self) -> int:
        return len(self._breakers)

    def may_begin(self, kind: RequestKind, now: float) -> bool:
        """Whether a prefill leg may be tried; while one is tried after a pause, no other one is."""
        breaker = self._breakers.get(kind)
        return breaker is None or breaker.may_begin(now)

    def begin(self, kind: RequestKind, now: float) -> Trial | None:
        """One is tried; `succeeded`, `failed` or `abandoned` follows."""
        return self._breakers[kind].begin(now) if kind in self._breakers else None

    def succeeded(self, kind: RequestKind) -> None:
        self._breakers.pop(kind, None)

    def failed(self, kind: RequestKind, now: float, trial: Trial | None = None) -> bool:
        """No instance could do it. Whether that makes it go without prefill from now on."""
        if kind not in self._breakers and len(self._breakers) >= MAX_KINDS:
            del self._breakers[next(iter(self._breakers))]
        breaker = self._breakers.setdefault(kind, Breaker(self._settings))
        was_open = breaker.state(now) is BreakerState.OPEN
        breaker.failed(now, trial)
        return breaker.state(now) is BreakerState.OPEN and not was_open

    def abandoned(self, kind: RequestKind, trial: Trial | None) -> None:
        """The request ended before anybody could tell."""
        if kind in self._breakers:
            self._breakers[kind].abandoned(trial)

    def clear(self) -> None:
        """There are other engines now."""
        self._breakers.clear()
