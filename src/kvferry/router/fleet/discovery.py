"""Instances that come and go while the router serves: registered by themselves, or listed in a file that is watched."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kvferry.errors import ConfigurationError, RequestError
from kvferry.http.openai import INVALID_REQUEST, error_body
from kvferry.http.registration import SIGNATURE, decode_announcement, reason_to_refuse
from kvferry.router.config import RouterConfig, instances_of
from kvferry.router.fleet.instance import Origin
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.policy.records import Instance, Role
from kvferry.router.telemetry.metrics import Metrics
from kvferry.system import os_error_text

REFUSAL_MESSAGES = {
    "closed": "this router does not accept registrations; hint: start it with --accept-registrations",
    "unsigned": "the registration is not signed; hint: give the engine the router's token file",
    "signature": "the signature is wrong; hint: give the engine the router's token file",
    "clock": "the signature is too old; hint: compare the clocks of the two machines",
    "not_local": "without a shared token only engines on this host may register",
}

logger = logging.getLogger(__name__)


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
        if self._registration.key:
            return reason_to_refuse(self._registration.key, body, headers.get(SIGNATURE, ""), time.time())
        host = urlsplit(decode_announcement(body).url).hostname or ""
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


class Section:
    """What one list says of the pool: instances that it does not name any more are taken out again."""

    def __init__(self, pool: InstancePool, origin: Origin) -> None:
        self._pool = pool
        self._origin = origin
        self._listed: frozenset[Instance] = frozenset()

    def set(self, now: frozenset[Instance]) -> None:
        """These are there, and no others of this list."""
        for instance in self._listed - now:
            self._pool.remove(instance, self._origin)
        self._listed = now
        self.renew()

    def renew(self) -> None:
        """Take in what is listed and not there: it may have come in another way before, and left."""
        for instance in sorted(self._listed, key=lambda one: (one.role, one.url)):
            self._pool.add(instance, self._origin)


class Listed(msgspec.Struct, forbid_unknown_fields=True):
    """The contents of a members file."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


class MembersFile:
    """Keeps the pool equal to a file. One that cannot be read leaves everything as it was."""

    def __init__(self, path: str, pool: InstancePool, interval_s: float) -> None:
        self._path = Path(path)
        self._section = Section(pool, Origin.FILE)
        self._interval_s = interval_s
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._trouble = ""

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(self._interval_s)
            self.follow()

    def follow(self) -> None:
        """Take over what is new in the file; what is wrong with it is logged once."""
        trouble = ""
        try:
            self.look()
            self._section.renew()
        except (ConfigurationError, RequestError) as error:
            trouble = str(error)
        if trouble and trouble != self._trouble:
            logger.warning("the members file is not applied: %s", trouble)
        self._trouble = trouble

    def look(self) -> None:
        """Take over what is new in the file. Raises ConfigurationError, once per change that makes no sense."""
        try:
            status = os.stat(self._path)
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._seen:
                return
            self._seen = stamp
            listed = msgspec.json.decode(self._path.read_bytes(), type=Listed)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                "invalid members file",
                found=f"{self._path}: {os_error_text(error)}",
                expected='{"prefill": ["http://host:port"], "decode": ["http://host:port"]}',
            ) from error
        prefill, decode = instances_of(Role.PREFILL, listed.prefill), instances_of(Role.DECODE, listed.decode)
        self._section.set(frozenset((*prefill, *decode)))
