"""The agents of peers that NIXL has loaded, and the connections that UCX has opened to them.

* Removing a remote agent leaves UCX's connection to it open, on both sides, until one of the two processes ends;
  loading it again opens another. UCX ends a process that has no file descriptor left. So idle agents stay loaded.
* A connection that has failed stays failed: only another one, after the agent was removed, works again.
* Each attempt to connect to a peer that is not there leaves a socket open too. So they become rare.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kvferry.errors import TransportError
from kvferry.transport.ucx.introspection import UcxIntrospection

# A peer that is gone takes a little memory, one that lives also the connection that it would need again.
MAX_IDLE_AGENTS = 1024
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0
LOST = "NIXL has lost the connection to the peer, and cannot open another"


@dataclass(slots=True)
class RemoteAgent:
    """A loaded agent: the metadata that it was loaded with, UCX's endpoints to it, and whether they have failed.

    A failed one may be renewed from `renew_at` on, on the monotonic clock, and after that in `delay_s`.
    """

    metadata: bytes
    endpoints: frozenset[int]
    has_failed: bool = False
    renew_at: float = 0.0
    delay_s: float = FIRST_DELAY_S


class RemoteAgents:
    """Those of one agent of ours, by name; those that were needed last come last."""

    def __init__(self, agent: Any, errors: tuple[type[Exception], ...], name: str) -> None:
        """`agent` is NIXL's object, `errors` what it raises, `name` its name."""
        self._agent, self._errors = agent, errors
        self._report = UcxIntrospection(name)
        self._own_endpoints = self._report.endpoints()
        self._loaded: dict[str, RemoteAgent] = {}

    def load(self, name: str, metadata: bytes, busy: Collection[str]) -> None:
        """Load an agent, unless it is loaded as it is. Raises TransportError when its memory has changed and it is
        among the `busy`, who have transfers in progress, or when NIXL cannot load it."""
        known = self._loaded.get(name)
        if known is not None and known.metadata == metadata:
            # The peer is back unchanged: now it is the one that was needed last, and may be reached again.
            known.renew_at = 0.0
            self._loaded[name] = self._loaded.pop(name)
            return
        if known is not None and name in busy:
            raise TransportError(
                "the peer's memory changed while transfers with it are in progress", hint="wait until they end"
            )
        if known is not None:
            self._unload(name)
        self._load(name, metadata)

    def carriers(self, name: str) -> tuple[str, ...]:
        """The transports that UCX reports for the endpoints of this agent."""
        known = self._loaded.get(name)
        endpoints = sorted(known.endpoints) if known else ()
        return tuple(dict.fromkeys(carrier for each in endpoints for carrier in self._report.carriers(each)))

    def failed(self, name: str) -> None:
        """Note that the connection to an agent has failed."""
        if name in self._loaded:
            self._loaded[name].has_failed = True

    def worked(self, name: str) -> None:
        """Note that something was moved over the connection to an agent."""
        if name in self._loaded:
            self._loaded[name].renew_at, self._loaded[name].delay_s = 0.0, FIRST_DELAY_S

    def has_failed(self, name: str) -> bool:
        """Whether a new connection is needed."""
        return name in self._loaded and self._loaded[name].has_failed

    def renew(self, name: str) -> None:
        """Replace the connection to an agent without transfers in progress. Raises TransportError where NIXL does not
        reach it; then it has still failed, and is not tried again for a while."""
        known, now = self._loaded[name], time.monotonic()
        if now < known.renew_at:
            raise TransportError(LOST, expected=f"another attempt in {known.renew_at - now:.1f} s")
        known.renew_at, known.delay_s = now + known.delay_s, min(2 * known.delay_s, MAX_DELAY_S)
        self._remove(name)
        try:
            self._load(name, known.metadata)
        except TransportError as error:
            raise TransportError(LOST, found=error.found) from error
        # Until something has come over it, it may be no better.
        renewed = self._loaded[name]
        renewed.renew_at, renewed.delay_s = known.renew_at, known.delay_s

    def unload_idle(self, needed: Collection[str]) -> None:
        """Remove agents that are not needed, those first that were not for longest. The latest stay, for their peers
        may come back."""
        idle = [name for name in self._loaded if name not in needed]
        for name in idle[: max(0, len(idle) - MAX_IDLE_AGENTS)]:
            self._unload(name)

    def close(self) -> None:
        """Remove all, and let go of NIXL's object."""
        for name in tuple(self._loaded):
            self._unload(name)
        del self._agent

    def _load(self, name: str, metadata: bytes) -> None:
        before = self._report.endpoints()
        try:
            loaded = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise TransportError("NIXL cannot load the peer's metadata", found=repr(error)) from error
        found = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        self._loaded[found] = RemoteAgent(metadata, self._endpoints_since(before))
        if found != name:
            self._unload(found)
            raise TransportError("metadata of another agent", found=repr(found), expected=repr(name))

    def _endpoints_since(self, before: frozenset[int]) -> frozenset[int]:
        """The endpoints of an agent that has just been loaded. UCX takes the one that the peer has opened, if it has:
        it is one of those that belong to nobody, and they are alike."""
        now = self._report.endpoints()
        others = (known.endpoints for known in self._loaded.values())
        return (now - before) or now.difference(self._own_endpoints, *others)

    def _unload(self, name: str) -> None:
        del self._loaded[name]
        self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except self._errors as error:
            # NIXL does not know it any more.
            logging.getLogger(__name__).debug("remove_remote_agent: %r", error)
