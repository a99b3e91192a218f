"""Tells routers that this engine is there, again and again, and when it leaves."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvferry.http.client_errors import client_error_text
from kvferry.http.registration import MEMBERS_PATH, SIGNATURE, Announcement, Side, sign

logger = logging.getLogger(__name__)

# Of what a router, or something in front of it, says: enough for a line of the log.
MAX_ANSWER_BYTES = 500


@dataclass(frozen=True, slots=True)
class RegistrarConfig:
    """Which routers are told, what they are told, and the key that they believe; without one only on this host.

    A router that was not reached is asked again after `interval_s`, like one that was.
    """

    routers: tuple[str, ...]
    url: str
    roles: tuple[Side, ...]
    key: bytes
    interval_s: float = 5.0
    timeout_s: float = 3.0


class Registrar:
    """`run` until cancelled; then, or before, `leave`. A router that cannot be reached is only logged, once."""

    def __init__(self, config: RegistrarConfig) -> None:
        self._config = config
        self._left = asyncio.Event()
        # What was last wrong with each router.
        self._trouble: dict[str, str] = {}

    async def run(self) -> None:
        """Announce, and renew that. After `leave` only the end of this remains to be waited for."""
        if not self._config.routers:
            return
        if _is_for_this_host(self._config.url) and not all(map(_is_for_this_host, self._config.routers)):
            words = "routers on other hosts cannot reach %s: set --host or --advertise-url"
            logger.warning(words, self._config.url)
        # Engines that have started together are not to come together for ever.
        pause_s = self._config.interval_s * random.uniform(0.5, 1)
        while not self._left.is_set():
            await self._tell_all(leaving=False)
            try:
                async with asyncio.timeout(pause_s):
                    await self._left.wait()
            except TimeoutError:
                pause_s = self._config.interval_s
        await self._tell_all(leaving=True)

    def leave(self) -> None:
        """Have the routers told that no more requests are wanted."""
        self._left.set()

    async def _tell_all(self, leaving: bool) -> None:
        timeout = aiohttp.ClientTimeout(total=self._config.timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            announcements = [Announcement(self._config.url, role, leaving) for role in self._config.roles]
            tellings = [self._tell(session, router, one) for router in self._config.routers for one in announcements]
            for found in await asyncio.gather(*tellings, return_exceptions=True):
                if isinstance(found, Exception):
                    # The top of a task: nobody would hear of its end, and this engine would be forgotten.
                    logger.error("an internal error ended an announcement to a router", exc_info=found)

    async def _tell(self, session: aiohttp.ClientSession, router: str, announcement: Announcement) -> None:
        body = msgspec.json.encode(announcement)
        headers = {"content-type": "application/json"}
        if self._config.key:
            headers[SIGNATURE] = sign(self._config.key, body, time.time())
        try:
            async with session.post(router.rstrip("/") + MEMBERS_PATH, data=body, headers=headers) as response:
                text = (await response.content.read(MAX_ANSWER_BYTES)).decode(errors="replace")
                trouble = "" if response.status == 200 else f"it answered {response.status}: {text}"
        except (aiohttp.ClientError, OSError) as error:
            trouble = client_error_text(error)
        if trouble and self._trouble.get(router) != trouble:
            logger.warning("could not register with the router at %s: %s", router, trouble)
        self._trouble[router] = trouble


def _is_for_this_host(url: str) -> bool:
    """Whether others would find themselves there, or nobody."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback or ip_address(host).is_unspecified
    except ValueError:
        return False
