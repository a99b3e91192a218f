"""Prefill engines by what SGLang knows of them: `host:port`, where an engine's rank 0 listens."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvferry import Located, LocateFailed, Reason, RemoteEngine
from kvferry.errors import FerryError, TransferError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Lookup:
    """Who listens at a place. Neither is there while nobody has answered."""

    engine: RemoteEngine | None = None
    error: FerryError | None = None


class PrefillEngines:
    """Asked on the scheduler's thread, which never waits; told on the agent's. `locate` asks the agent."""

    def __init__(self, locate: Callable[[str], None]) -> None:
        self._locate = locate
        self._lookups: dict[str, Lookup] = {}
        # Lookups by the address that the agent was asked for.
        self._asked: dict[str, list[Lookup]] = {}
        # A host's name can take seconds to look up.
        self._resolver = ThreadPoolExecutor(1, "kvferry-names")

    def find(self, place: str) -> Lookup:
        """What is known of a place. It is asked for once, and again after an error or `forget`."""
        known = self._lookups.get(place)
        if known is None or known.error is not None:
            known = self._lookups[place] = Lookup()
            self._resolver.submit(self._ask, place, known)
        return known

    def forget(self, place: str) -> None:
        """Another start of the engine may listen there by now."""
        self._lookups.pop(place, None)

    def heard(self, notice: Located | LocateFailed) -> None:
        """The agent knows whose address it is, or has given up."""
        for lookup in self._asked.pop(notice.address, ()):
            if isinstance(notice, Located):
                lookup.engine = notice.engine
            else:
                lookup.error = notice.error

    def _ask(self, place: str, lookup: Lookup) -> None:
        try:
            address = _address_of(place)
            self._asked.setdefault(address, []).append(lookup)
            self._locate(address)
        except (OSError, ValueError) as error:
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
