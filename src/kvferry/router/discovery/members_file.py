"""Instances that a file lists, which is watched while the router serves."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import msgspec

from kvferry.errors import ConfigurationError, RequestError
from kvferry.router.config import instances_of
from kvferry.router.discovery.section import Section
from kvferry.router.fleet.instance import Origin
from kvferry.router.fleet.instance_pool import InstancePool
from kvferry.router.policy.records import Role
from kvferry.system import os_error_text

logger = logging.getLogger(__name__)


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
        """Follow the file for ever."""
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
            content = self._path.read_bytes()
            # What could not be read is looked at again, what makes no sense is not.
            self._seen = stamp
            listed = msgspec.json.decode(content, type=Listed)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                "invalid members file",
                found=f"{self._path}: {os_error_text(error)}",
                expected='{"prefill": ["http://host:port"], "decode": ["http://host:port"]}',
            ) from error
        prefill, decode = instances_of(Role.PREFILL, listed.prefill), instances_of(Role.DECODE, listed.decode)
        if self._section and not (prefill or decode):
            raise ConfigurationError(
                "a members file without members",
                found=f"{self._path}: empty lists",
                expected="at least one engine",
                hint="a template may have gone wrong; engines that are gone are found out without it",
            )
        self._section.set(frozenset((*prefill, *decode)))
