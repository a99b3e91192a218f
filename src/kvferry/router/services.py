"""What all requests of one app share."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.router.config import RouterConfig
from kvferry.router.errands import Errands
from kvferry.router.membership import Membership
from kvferry.router.metrics import Metrics
from kvferry.router.pool import Pool
from kvferry.router.tracing import NO_TRACING, Tracing

__all__ = ["Services"]


@dataclass(frozen=True, slots=True)
class Services:
    """Made by the app's lifespan; `pool` is open as long as the app serves."""

    config: RouterConfig
    membership: Membership
    metrics: Metrics
    pool: Pool
    errands: Errands
    tracing: Tracing = NO_TRACING
