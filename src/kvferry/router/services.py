"""What all requests of one app share."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.router.config import RouterConfig
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.telemetry.metrics import Metrics
from kvferry.router.telemetry.tracing import NO_TRACING, Tracing
from kvferry.router.upstream.http_client import HttpClient


@dataclass(frozen=True, slots=True)
class Services:
    """Made by the app's lifespan; `http` is open as long as the app serves."""

    config: RouterConfig
    pool: InstancePool
    metrics: Metrics
    http: HttpClient
    tracing: Tracing = NO_TRACING
