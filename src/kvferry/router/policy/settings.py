"""How a router chooses: the policy, the limits that the operator has set, and the clock of everything measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvferry.router.policy.balanced import balanced
from kvferry.router.policy.records import NO_LIMITS, Limits, Policy


class PrefillFallback(StrEnum):
    """DECODE: the decode instance computes the prompt. REFUSE: nobody does, the client is told to come back."""

    DECODE = "decode"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """`clock` is seconds of a monotonic clock."""

    policy: Policy = balanced
    limits: Limits = NO_LIMITS
    clock: Callable[[], float] = time.monotonic


DEFAULT_POLICY = PolicySettings()
