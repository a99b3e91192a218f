"""Liveness probes: a refused connection proves that the process of a peer has ended.

A stopped process still has its socket, so its host accepts connections, until its queue of them is full; a host that is
gone does not answer. Neither is taken for an end. A host that leaves several probes in a row unanswered is silent; a
word of the peer ends the row.
`kvferry.session.target.liveness` decides what follows, and when a silent peer counts as lost.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from urllib.parse import urlsplit

from kvferry.session.keys import PeerKey
from kvferry.transport.machine.addresses import family_of

# The session asks for a probe at most every second, and two parts of it may ask at the same time.
MAX_UNANSWERED = 3
YOUNG_S = 0.5
# Errors that say that nobody has answered, as far as this host knows. Others are this host's own.
UNANSWERED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


class LivenessProbes:
    """TCP connections that are opened and closed at once. Only one thread uses them. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._attempts: dict[PeerKey, socket.socket] = {}
        self._begun_at: dict[PeerKey, float] = {}
        self._refused: list[PeerKey] = []
        self._num_unanswered: Counter[PeerKey] = Counter()
        self._silent: list[PeerKey] = []

    @property
    def busy(self) -> bool:
        """Whether `refused_peers` or `silent_peers` has something to return."""
        return bool(self._refused or self._silent)

    def start(self, peer: PeerKey) -> None:
        """Probe a peer; a probe of it that is still open, and not young, is given up, and counts as one that was not
        answered."""
        self._take_ended()
        if peer in self._attempts and self._clock() - self._begun_at[peer] < YOUNG_S:
            return
        self._give_up(peer)
        if self._num_unanswered[peer] >= MAX_UNANSWERED:
            del self._num_unanswered[peer]
            self._silent.append(peer)
        try:
            address = urlsplit(peer.address)
            host, port = ip_address(address.hostname or ""), address.port or 0
        except ValueError:
            return
        try:
            attempt = socket.socket(family_of(host), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            # This process may have too many open files at the moment. The session probes again.
            return
        self._attempts[peer], self._begun_at[peer] = attempt, self._clock()
        try:
            error = attempt.connect_ex((str(host), port))
        except OSError:
            # An address that this host cannot read, such as one in a network that only another host has.
            self._drop(peer)
        else:
            self._handle(peer, error)

    def refused_peers(self) -> list[PeerKey]:
        """The peers that have refused a connection since the last call, each once."""
        self._take_ended()
        found, self._refused = self._refused, []
        return found

    def silent_peers(self) -> list[PeerKey]:
        """The peers whose hosts have left `MAX_UNANSWERED` probes in a row without an answer since the last call."""
        found, self._silent = self._silent, []
        return found

    def close(self) -> None:
        """Give up. Safe to call twice."""
        for peer in list(self._attempts):
            self.forget(peer)

    def forget(self, peer: PeerKey) -> None:
        """Give up the probe of a peer."""
        self._num_unanswered.pop(peer, None)
        self._drop(peer)

    def _take_ended(self) -> None:
        for peer, attempt in list(self._ended()):
            self._handle(peer, attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _ended(self) -> Iterator[tuple[PeerKey, socket.socket]]:
        """The probes that have ended, with a connection or without."""
        if not self._attempts:
            return
        poller, by_number = select.poll(), {}
        for peer, attempt in self._attempts.items():
            poller.register(attempt, select.POLLOUT)
            by_number[attempt.fileno()] = peer, attempt
        for number, _ in poller.poll(0):
            yield by_number[number]

    def _handle(self, peer: PeerKey, error: int) -> None:
        """Take the result of a probe, unless it is still open."""
        if error == errno.EINPROGRESS:
            return
        if error in UNANSWERED:
            self._give_up(peer)
        elif error in (0, errno.ECONNREFUSED):
            self.forget(peer)
        else:
            self._drop(peer)
        if error == errno.ECONNREFUSED:
            self._refused.append(peer)

    def _give_up(self, peer: PeerKey) -> None:
        if self._drop(peer):
            self._num_unanswered[peer] += 1

    def _drop(self, peer: PeerKey) -> bool:
        """Whether there was one."""
        self._begun_at.pop(peer, None)
        if attempt := self._attempts.pop(peer, None):
            attempt.close()
        return attempt is not None
