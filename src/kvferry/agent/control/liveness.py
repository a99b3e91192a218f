"""Whether anybody listens at an address: the host of a process that has ended says at once that nobody does.

A process that was stopped still has its socket, so its host takes the connection; and a host that is gone says nothing.
Neither is taken for an end.
"""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from urllib.parse import urlsplit

from kvferry.session.keys import PeerKey
from kvferry.transport.machine.addresses import family_of


class Knocks:
    """Connections that are tried and closed at once. Belongs to one thread."""

    def __init__(self) -> None:
        self._tried: dict[PeerKey, socket.socket] = {}
        self._unanswered: list[PeerKey] = []

    @property
    def busy(self) -> bool:
        """Whether an answer is ready."""
        return bool(self._unanswered)

    def start(self, peer: PeerKey) -> None:
        """Try again; an attempt that is still open is given up."""
        self.forget(peer)
        try:
            address = urlsplit(peer.address)
            host, port = ip_address(address.hostname or ""), address.port or 0
        except ValueError:
            return
        try:
            tried = socket.socket(family_of(host), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            # This process may have too many files open at the moment. Nothing is learnt, and whoever asks asks again.
            return
        self._tried[peer] = tried
        self._note(peer, tried.connect_ex((str(host), port)))

    def unanswered(self) -> list[PeerKey]:
        """Those at whose address nobody listens, each once."""
        for peer, tried in list(self._ended()):
            self._note(peer, tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        found, self._unanswered = self._unanswered, []
        return found

    def close(self) -> None:
        """Give up. Safe to call twice."""
        for peer in list(self._tried):
            self.forget(peer)

    def forget(self, peer: PeerKey) -> None:
        """Give up one that nobody asks about any more."""
        if tried := self._tried.pop(peer, None):
            tried.close()

    def _ended(self) -> Iterator[tuple[PeerKey, socket.socket]]:
        """The attempts that have come to an end, with a connection or without."""
        if not self._tried:
            return
        looking, by_number = select.poll(), {}
        for peer, tried in self._tried.items():
            looking.register(tried, select.POLLOUT)
            by_number[tried.fileno()] = peer, tried
        for number, _ in looking.poll(0):
            yield by_number[number]

    def _note(self, peer: PeerKey, error: int) -> None:
        """How an attempt ends, or that it goes on."""
        if error == errno.EINPROGRESS:
            return
        self.forget(peer)
        if error == errno.ECONNREFUSED:
            self._unanswered.append(peer)
