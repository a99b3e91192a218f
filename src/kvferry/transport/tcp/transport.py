"""Transport over plain sockets: works everywhere, needs nothing.

The descriptor has a key that a peer must know. The key itself is never sent: every connection proves that it knows it.
A peer can get a key of its own, which is revoked when nothing of it must arrive any more.
The bytes are neither encrypted nor signed: bind to an address that only the engines can reach.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from queue import SimpleQueue
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvferry.errors import TransportError
from kvferry.plan.programs.copies import Copies
from kvferry.transport.base import Completion, Direction, Memory, Ticket
from kvferry.transport.descriptors import Natural, check_size, decode
from kvferry.transport.posting import Posting, connected
from kvferry.transport.registered_memory import MAX_REGIONS, Regions, Registry
from kvferry.transport.tcp.client import PeerClient
from kvferry.transport.tcp.connection import CHUNK_BYTES, KEY_BYTES, KEY_ID_BYTES
from kvferry.transport.tcp.lane import PeerAddress, Transfer
from kvferry.transport.tcp.server import Server


class TcpDescriptor(msgspec.Struct, frozen=True, tag="tcp-3"):
    """What a peer needs: where to connect, the key to know, and (address, size in bytes) of each region."""

    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    key_id: Annotated[bytes, Meta(min_length=KEY_ID_BYTES, max_length=KEY_ID_BYTES)]
    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    regions: Annotated[tuple[tuple[Natural, Natural], ...], Meta(max_length=MAX_REGIONS)] = msgspec.field(name="pieces")


_DECODER: Final = msgspec.msgpack.Decoder(TcpDescriptor)


class TcpTransport:
    """Serves its registered memory on `host` and a port of the system's choice, and asks peers for theirs.

    A peer that neither sends nor takes anything for `stall_timeout_s` ends its tickets with an error.
    `advertised_host` is what peers connect to, when that differs from `host`; empty: the same.
    Raises TransportError when it cannot listen on `host`.
    """

    name = "tcp"
    copies_once = False
    progress_interval_s = float("inf")

    def __init__(self, host: str = "127.0.0.1", *, stall_timeout_s: float = 5.0, advertised_host: str = "") -> None:
        self._stall_timeout_s = stall_timeout_s
        self._registry = Registry()
        self._server = Server(host, self._registry, stall_timeout_s)
        self._host = advertised_host or self._server.address[0]
        self._numbers = count(1)
        self._ended: SimpleQueue[Completion] = SimpleQueue()
        self._notify: Callable[[], None] = lambda: None
        self._peers: dict[str, tuple[PeerClient, Regions]] = {}
        self._stopped: list[PeerClient] = []
        self._open: dict[Ticket, PeerClient] = {}

    def notify_with(self, notify: Callable[[], None]) -> None:
        """The threads of connections call `notify`."""
        self._notify = notify

    def register(self, memory: Memory) -> None:
        """Raises TransportError when the memory overlaps registered memory."""
        self._registry.add(memory)

    def unregister(self, memory: Memory) -> None:
        """Waits until no peer's bytes are being copied from or to it. Raises TransportError when not registered."""
        with self._server.registration.exclusive():
            self._registry.remove(memory)

    def descriptor(self) -> bytes:
        """Raises TransportError when there are more regions than a peer accepts."""
        self._registry.check_describable()
        key, (_, port) = self._server.keys.common, self._server.address
        known = TcpDescriptor(self._host, port, key.key_id, key.secret, self._registry.extents)
        return check_size(msgspec.msgpack.encode(known))

    def descriptor_for(self, peer: str, descriptor: bytes) -> bytes:
        """With a key of the peer's own. Raises TransportError when the descriptor is not one of tcp."""
        key = self._server.keys.for_peer(peer)
        known = decode(peer, descriptor, _DECODER)
        return msgspec.msgpack.encode(msgspec.structs.replace(known, key_id=key.key_id, key=key.secret))

    def revoke(self, peer: str) -> None:
        """Waits until no bytes of the peer are being copied, and ends its connections."""
        self._server.revoke(peer)

    def connect(self, peer: str, descriptor: bytes) -> None:
        """Raises TransportError when the descriptor is not one of tcp.

        The first ticket opens the connection: an unreachable host would otherwise block the agent. So an address at
        which no peer listens is the error of a ticket, that of the self-test.
        """
        self.disconnect(peer)
        known = decode(peer, descriptor, _DECODER)
        address = PeerAddress(known.host, known.port, known.key_id, known.key)
        client = PeerClient(address, self._end, self._stall_timeout_s)
        self._peers[peer] = (client, Regions.of(known.regions))

    def carriers(self, peer: str) -> tuple[str, ...]:
        return (self.name,)

    def disconnect(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            client, _ = known
            client.stop(f"peer {peer!r} was disconnected")
            self._stopped = [old for old in self._stopped if not old.is_over] + [client]

    def post(self, peer: str, copies: Copies, direction: Direction) -> Ticket:
        """Raises TransportError when the peer is not connected, a row leaves registered memory, or no thread can be
        started."""
        client, regions = connected(self._peers, peer)
        local, remote, length = Posting(peer, self._registry.regions, regions, copies, direction).columns(CHUNK_BYTES)
        ticket = Ticket(next(self._numbers))
        try:
            client.submit(Transfer(ticket, direction, local, remote, length))
        except RuntimeError as error:
            hint = "the limit is ulimit -u, or pids.max of a container"
            raise TransportError("no thread can be started for tcp", found=str(error), hint=hint) from error
        self._open[ticket] = client
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        if ticket in self._open:
            self._open[ticket].cancel(ticket)

    def poll(self) -> list[Completion]:
        ended: list[Completion] = []
        while not self._ended.empty():
            ended.append(self._ended.get())
            del self._open[ended[-1].ticket]
        return ended

    def _end(self, completion: Completion) -> None:
        self._ended.put(completion)
        self._notify()

    def moved(self, peer: str) -> int:
        known = self._peers.get(peer)
        return known[0].num_moved if known is not None else 0

    def close(self) -> None:
        """Waits for its threads, at most about twice the stall timeout when a connection is just being made."""
        for peer in list(self._peers):
            self.disconnect(peer)
        self._server.close(self._stall_timeout_s + 1)
        for client in self._stopped:
            client.join(self._stall_timeout_s + 1)
        self._stopped.clear()
        self._registry.clear()
