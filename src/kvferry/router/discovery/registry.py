"""Engines that announce themselves to the router, at `POST /kvferry/members`, and have to do so again and again."""

from __future__ import annotations

import ipaddress
import time
from urllib.parse import urlsplit

from kvferry.http.openai import INVALID_REQUEST, error_body
from kvferry.http.registration import SIGNATURE, decode_announcement, reason_to_refuse
from kvferry.router.config import RouterConfig, instances_of
from kvferry.router.fleet.instance import Origin
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.policy.records import Role
from kvferry.router.telemetry.metrics import Metrics

REFUSAL_MESSAGES = {
    "closed": "this router does not accept registrations; hint: start it with --accept-registrations",
    "unsigned": "the registration is not signed; hint: give the engine the router's token file",
    "signature": "the signature is wrong; hint: give the engine the router's token file",
    "clock": "the signature is too old; hint: compare the clocks of the two machines",
    "not_local": "without a shared token only engines on this host may register",
}


class Registry:
    """Takes announcements of engines: `POST /kvferry/members`."""

    def __init__(self, config: RouterConfig, pool: InstancePool, metrics: Metrics) -> None:
        self._registration = config.registration
        self._pool = pool
        self._metrics = metrics

    def take(self, body: bytes, headers: dict[str, str], client_host: str) -> tuple[int, dict[str, object]]:
        """Status and body. Raises RequestError, ConfigurationError for announcements that make no sense."""
        refused = self._refused(body, headers, client_host)
        if refused:
            self._metrics.refused_registrations.labels(refused).inc()
            status = 404 if refused == "closed" else 403
            return status, error_body(REFUSAL_MESSAGES[refused], INVALID_REQUEST, f"registration_{refused}", None)
        announcement = decode_announcement(body)
        (instance,) = instances_of(Role(announcement.role), (announcement.url,))
        if announcement.leaving:
            return 200, {"left": self._pool.remove(instance, Origin.REGISTERED)}
        new = self._pool.add(instance, Origin.REGISTERED, self._registration.lease_s)
        return 200, {"new": new, "lease_s": self._registration.lease_s}

    def _refused(self, body: bytes, headers: dict[str, str], client_host: str) -> str:
        if not self._registration.is_open:
            return "closed"
        if self._registration.keys:
            return reason_to_refuse(self._registration.keys, body, headers.get(SIGNATURE, ""), time.time())
        announcement = decode_announcement(body)
        (instance,) = instances_of(Role(announcement.role), (announcement.url,))
        host = urlsplit(instance.url).hostname or ""
        if "origin" in headers:
            # A web page that somebody on this host has opened.
            return "not_local"
        return "" if _is_loopback(client_host) and _is_loopback(host) else "not_local"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
        # Where the router listens on `::`, clients of IPv4 have such addresses.
        mapped = address.ipv4_mapped if address.version == 6 else None
        return (mapped or address).is_loopback
    except ValueError:
        return False
