"""Prefill engines by what SGLang knows of them: `host:port`, where a server's rank 0 listens, and a room.

A server with data parallelism is several engines, each with some of the rooms.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import ip_address

from kvferry import Located, LocateFailed, Reason, RemoteEngine
from kvferry.errors import FerryError, TransferError

logger = logging.getLogger(__name__)

MAX_PLACES = 1024
# Clients choose the names, and one that no name server answers for takes a thread for its time.
MAX_NAMES = 64
NAME_THREADS = 8


Told = Callable[[RemoteEngine], None]


@dataclass(slots=True)
class Lookup:
    """Who listens at a place. Neither is there while nobody has answered; `waiting` are told who does."""

    engine: RemoteEngine | None = None
    error: FerryError | None = None
    waiting: list[Told] = field(default_factory=list)


class PrefillEngines:
    """Asked on the scheduler's thread, which never waits; told on the agent's. `locate` asks the agent."""

    def __init__(self, locate: Callable[[str, int], None]) -> None:
        self._locate = locate
        self._lock = threading.Lock()
        # By place and number. Clients choose them: only so many are remembered, the latest ones.
        self._lookups: dict[tuple[str, int], Lookup] = {}
        # How many engines there are at a place, once one of them is known.
        self._sizes: dict[str, int] = {}
        # What waits for the address of a place, by number. A host's name can take seconds to look up.
        self._resolving: dict[str, list[tuple[int, Lookup]]] = {}
        self._resolver = ThreadPoolExecutor(NAME_THREADS, "kvferry-names")
        # Lookups and their places, by what the agent was asked for.
        self._asked: dict[tuple[str, int], list[tuple[str, Lookup]]] = {}
        self._stopped: FerryError | None = None

    def find(self, place: str, number: int = 0) -> Lookup:
        """What is known of a place's engine whose number is `number` modulo how many there are: a room, or the number
        itself. It is asked for once, and again after an error or `forget`."""
        with self._lock:
            key = place, number % self._sizes[place] if place in self._sizes else number
            known = self._lookups.get(key)
            if known is not None and known.error is None:
                return known
            known = self._remember(key, Lookup(error=self._stopped))
            if known.error is not None:
                return known
            is_first, is_name = place not in self._resolving, not _is_numeric(place)
            if is_first and is_name and len(self._resolving) >= MAX_NAMES:
                what = "too many names of prefill engines are being looked up at the moment"
                known.error = TransferError(Reason.UNREACHABLE, what, found=place, hint="does the name server answer?")
                return known
            self._resolving.setdefault(place, []).append((key[1], known))
            if is_first and is_name:
                # Before `stop` shuts it down.
                self._resolver.submit(self._resolve, place)
        if is_first and not is_name:
            self._resolve(place)
        return known

    def tell(self, lookup: Lookup, told: Told) -> None:
        """Call `told` when it is known who listens: at once, or on the agent's thread. Never if nobody does."""
        with self._lock:
            if lookup.engine is None:
                lookup.waiting.append(told)
                return
        told(lookup.engine)

    def forget(self, place: str) -> None:
        """Another start of the server may listen there by now."""
        with self._lock:
            self._sizes.pop(place, None)
            for key in [key for key in self._lookups if key[0] == place]:
                del self._lookups[key]

    def heard(self, notice: Located | LocateFailed) -> None:
        """The agent knows whose address it is, or has given up."""
        told: list[Told] = []
        with self._lock:
            waiting = self._asked.pop((notice.address, notice.number), ())
            for place, lookup in waiting:
                if isinstance(notice, LocateFailed):
                    lookup.error = notice.error
                    continue
                lookup.engine = notice.engine
                told += lookup.waiting
                lookup.waiting.clear()
                # Unless it was forgotten meanwhile.
                if (place, notice.number) in self._lookups:
                    self._sizes[place] = notice.data_parallel_size
                    self._remember((place, notice.number % notice.data_parallel_size), lookup)
        if isinstance(notice, Located):
            for tell in told:
                tell(notice.engine)

    def _remember(self, key: tuple[str, int], lookup: Lookup) -> Lookup:
        if key not in self._lookups and len(self._lookups) >= MAX_PLACES:
            oldest = next(iter(self._lookups))
            del self._lookups[oldest]
            self._sizes.pop(oldest[0], None)
        self._lookups[key] = lookup
        return lookup

    def stop(self, error: FerryError) -> None:
        """The agent has stopped: nobody will answer any more."""
        with self._lock:
            self._stopped = error
            waiting = [lookup for lookups in self._asked.values() for _, lookup in lookups]
            waiting += [lookup for lookups in self._resolving.values() for _, lookup in lookups]
            self._asked.clear()
            self._resolving.clear()
        for lookup in waiting:
            lookup.error = error
        self._resolver.shutdown(wait=False, cancel_futures=True)

    def _resolve(self, place: str) -> None:
        """Ask for every engine of a place that somebody waits for."""
        try:
            address = _address_of(place)
        except (OSError, ValueError, OverflowError) as error:
            what, hint = (
                f"the prefill engine {place} has no address",
                "is bootstrap_host the prefill server's own name?",
            )
            unknown = TransferError(Reason.UNREACHABLE, what, found=str(error), hint=hint)
            with self._lock:
                for _, lookup in self._resolving.pop(place, ()):
                    lookup.error = unknown
            return
        with self._lock:
            waiting = self._resolving.pop(place, ())
            for number, lookup in waiting:
                self._asked.setdefault((address, number), []).append((place, lookup))
        for number in dict.fromkeys(number for number, _ in waiting):
            self._ask(address, number)

    def _ask(self, address: str, number: int) -> None:
        try:
            self._locate(address, number)
        except FerryError as error:
            with self._lock:
                for _, lookup in self._asked.pop((address, number), ()):
                    lookup.error = error


def _is_numeric(place: str) -> bool:
    """Whether a place names its host by an IP address, for which nobody has to be asked."""
    try:
        ip_address(_split(place)[0])
    except ValueError:
        return False
    return True


def _address_of(place: str) -> str:
    """`tcp://IP:port` of `host:port` or `[host]:port`. Raises OSError for a name that nobody knows."""
    host, port = _split(place)
    ip = str(socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4][0])
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


def _split(place: str) -> tuple[str, str]:
    host, _, port = place.rpartition(":")
    return host.strip("[]"), port
