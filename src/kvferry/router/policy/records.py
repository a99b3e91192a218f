"""What a policy is asked and what it may answer: pure records. `balanced` is the policy that comes with the router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Role(StrEnum):
    """What an instance is for: PREFILL computes the cache of a prompt, DECODE writes the answer."""

    PREFILL = "prefill"
    DECODE = "decode"


class Instance(msgspec.Struct, frozen=True, cache_hash=True):
    """One upstream server: `url` without a trailing slash, e.g. `http://127.0.0.1:8100`."""

    url: str
    role: Role


Pair = tuple[Instance, Instance]
"""A prefill instance and a decode instance."""


def pair_of(one: Instance, other: Instance) -> Pair:
    """The two, of different roles, in the order of a pair."""
    return (one, other) if one.role is Role.PREFILL else (other, one)


@dataclass(frozen=True, slots=True)
class RequestCost:
    """What a request will cost, as far as one can tell without a tokenizer.

    `prefixes` are names of the prompt's beginnings, the shortest first: two prompts that share a name begin alike.
    Each stands for `prefix_tokens` more tokens. `is_divisible` says whether a prefill can stand for the request.
    """

    prompt_tokens: int = 1
    new_tokens: int = 1
    prefixes: tuple[int, ...] = ()
    prefix_tokens: int = 0
    model: str = ""
    is_divisible: bool = True

    def work(self, role: Role) -> int:
        """Tokens of work for an instance: to compute, or to write. Each written token reads the prompt's cache."""
        return self.prompt_tokens if role is Role.PREFILL else self.new_tokens + self.prompt_tokens // 8


NO_COST = RequestCost()


class Load(msgspec.Struct, frozen=True):
    """What is known about one instance at the moment of a choice.

    One that is `healthy` answers; one that is also `ready` wants requests. `num_outstanding` requests of
    `outstanding_tokens` tokens of work are assigned to it and not finished. `last_chosen` is the serial number of
    the choice that took it last, 0 when none did yet. `tokens_per_s` is how fast it was seen to compute prompts, 0
    when that is not known. `cached_tokens` of the prompt were sent to it before. `num_partners` instances of the other
    role, of those that were looked at, can work with it. Prompts that begin alike meet at one that `is_home`. One
    that does not compute prompts (`computes_prompts`) serves nothing without a partner.
    """

    instance: Instance
    healthy: bool
    num_outstanding: int
    last_chosen: int
    ready: bool = True
    outstanding_tokens: int = 0
    tokens_per_s: float = 0.0
    cached_tokens: int = 0
    num_partners: int = 1
    is_home: bool = True
    computes_prompts: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator wants of a policy; 0 means no limit.

    A first token may take `ttft_s`; a decode instance takes `max_requests` at a time. Prompts of which fewer than
    `skip_below_tokens` are to be computed are left to the decode instance; with `skip_by_cost` that number is the one
    that is computed from measured times, if it is higher.
    """

    ttft_s: float = 0.0
    max_requests: int = 0
    skip_below_tokens: int = 0
    skip_by_cost: bool = False


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class RoutingQuery:
    """Which instance takes `role`? `prefill` and `decode` are those that may be chosen, and their loads; where there
    are more than 64, some of them.

    When a prefill instance is asked for, `decode` is only the instance that was chosen; when a decode instance is asked
    for that shall take a cache that is computed, `prefill` is only the instance that has it. `handover_s` is what it
    usually takes from a computed prompt to the first token elsewhere, 0 when that is not known. A request that is tried
    again has been admitted before.
    """

    role: Role
    cost: RequestCost
    prefill: tuple[Load, ...]
    decode: tuple[Load, ...]
    limits: Limits = NO_LIMITS
    handover_s: float = 0.0
    is_retry: bool = False

    @property
    def candidates(self) -> tuple[Load, ...]:
        return self.prefill if self.role is Role.PREFILL else self.decode


@dataclass(frozen=True, slots=True)
class UseInstance:
    """The decision to use this instance."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class SkipPrefill:
    """The decision, where a prefill instance is asked for, that the decode instance computes the prompt. `reason` is a
    stable label, `detail` words."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Overloaded:
    """The decision that no instance takes the request: the client is told to come back after `retry_after_s`."""

    reason: str
    retry_after_s: int


@dataclass(frozen=True, slots=True)
class NoInstance:
    """No instance can take it. `reason` is a stable label, where there is a better one than that."""

    reason: str = ""


Decision = UseInstance | SkipPrefill | Overloaded | NoInstance
Policy = Callable[[RoutingQuery], Decision]
