"""Prefill engines by what SGLang knows of them: `host:port`, where an engine's rank 0 listens."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvferry import Located, LocateFailed, Reason, RemoteEngine
from kvferry.errors import FerryError, TransferError

logger = logging.getLogger(__name__)

MAX_PLACES = 1024


@dataclass(slots=True)
class Lookup:
    """Who listens at a place. Neither is there while nobody has answered."""

    engine: RemoteEngine | None = None
    error: FerryError | None = None


class PrefillEngines:
    """Asked on the scheduler's thread, which never waits; told on the agent's. `locate` asks the agent."""

    def __init__(self, locate: Callable[[str], None]) -> None:
        self._locate = locate
        # Clients choose the places: only so many are remembered, the latest ones.
        self._lookups: dict[str, Lookup] = {}
        # Lookups by the address that the agent was asked for.
        self._lock = threading.Lock()
        self._asked: dict[str, list[Lookup]] = {}
        self._stopped: FerryError | None = None
        # A host's name can take seconds to look up.
        self._resolver = ThreadPoolExecutor(1, "kvferry-names")

    def find(self, place: str) -> Lookup:
        """What is known of a place. It is asked for once, and again after an error or `forget`."""
        known = self._lookups.get(place)
        if known is None or known.error is not None:
            if len(self._lookups) >= MAX_PLACES:
                del self._lookups[next(iter(self._lookups))]
            known = self._lookups[place] = Lookup()
            self._resolver.submit(self._ask, place, known)
        return known

    def forget(self, place: str) -> None:
        """Another start of the engine may listen there by now."""
        self._lookups.pop(place, None)

    def heard(self, notice: Located | LocateFailed) -> None:
        """The agent knows whose address it is, or has given up."""
        with self._lock:
            waiting = self._asked.pop(notice.address, ())
        for lookup in waiting:
            if isinstance(notice, Located):
                lookup.engine = notice.engine
            else:
                lookup.error = notice.error

    def stop(self, error: FerryError) -> None:
        """The agent has stopped: nobody will answer any more."""
        with self._lock:
            self._stopped = error
            waiting = [lookup for lookups in self._asked.values() for lookup in lookups]
            self._asked.clear()
        for lookup in waiting:
            lookup.error = error

    def _ask(self, place: str, lookup: Lookup) -> None:
        try:
            address = _address_of(place)
            with self._lock:
                if self._stopped is not None:
                    raise self._stopped
                self._asked.setdefault(address, []).append(lookup)
            self._locate(address)
        except (OSError, ValueError, OverflowError) as error:
            what, hint = (
                f"the prefill engine {place} has no address",
                "is bootstrap_host the prefill server's own name?",
            )
            lookup.error = TransferError(Reason.UNREACHABLE, what, found=str(error), hint=hint)
        except FerryError as error:
            lookup.error = error


def _address_of(place: str) -> str:
    """`tcp://IP:port` of `host:port` or `[host]:port`. Raises OSError for a name that nobody knows."""
    host, _, port = place.rpartition(":")
    ip = str(socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0][4][0])
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"
