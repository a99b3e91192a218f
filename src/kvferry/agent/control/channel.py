"""The sockets of the control channel: one that targets connect to, and one per source that this agent connects to.

ZeroMQ frames messages, reconnects, and keeps a slow peer from blocking the agent: a message that cannot be queued is
dropped and counted, and the session repeats what was not answered. With a shared token every connection is encrypted
and both sides prove that they know it (`curve`); without one, the channel stays within this host.
"""

from __future__ import annotations

import errno
import weakref
from collections import Counter
from dataclasses import dataclass

import zmq

from kvferry.agent.control.addresses import listening_address
from kvferry.agent.control.connection_limit import MAX_CONNECTIONS, LimitedListener
from kvferry.agent.control.curve import Admission, secure_listening
from kvferry.agent.control.poller import Poller
from kvferry.agent.control.shared_token import NO_TOKEN, SharedToken
from kvferry.agent.control.sockets import open_socket, received, send_now
from kvferry.agent.control.source_connections import MAX_SOURCES, MAX_WATCHED, SourceConnections
from kvferry.agent.control.time_slice import short_slices
from kvferry.errors import ConfigurationError
from kvferry.session.keys import PeerKey
from kvferry.wire.codec import MAX_REQUEST_BYTES

# That of targets, its monitor, and those that admit them.
OTHER_SOCKETS = 16


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """A frame from a peer: from the `source` that this agent has connected to, or from a target with this
    `routing_id`."""

    source: tuple[PeerKey, ...]
    routing_id: str
    frame: bytes


class ControlChannel:
    """Only one thread uses it. `address` is where targets connect to."""

    def __init__(
        self, host: str, port: int, token: SharedToken = NO_TOKEN, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        """Listen on `host`; port 0 lets the system choose.

        Raises ConfigurationError when that is impossible, and without a token for any host but this one.
        """
        address = listening_address(host, token)
        try:
            self._listener = LimitedListener(address, port, max_connections)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {host}:{port} for the transfer's control channel",
                found=error.strerror or str(error),
                hint="--transfer-host is an address of this host, such as 127.0.0.1"
                if error.errno == errno.EADDRNOTAVAIL
                else "choose another --transfer-port, or 0 for any free one",
            ) from error
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOURCES + 2 * MAX_WATCHED + OTHER_SOCKETS)
        self._poller = Poller()
        self._sources = SourceConnections(self._context, self._poller, token)
        # Also where nobody closes it: a context that is collected before its sockets waits for them for ever.
        self._end = weakref.finalize(self, _close, self._listener, self._context, self._poller)
        self._end.atexit = False
        try:
            # ZeroMQ authenticates through this socket, so it exists before the router.
            with short_slices():
                # The first socket starts the context's threads, which shall get a core at once when a message comes.
                self._admission = tuple(Admission(self._context, each) for each in (token,) if each)
                self._router = open_socket(self._context, self._poller, zmq.ROUTER, MAX_REQUEST_BYTES)
            # Otherwise it would silently drop what a slow peer does not take.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if token:
                secure_listening(self._router, token)
            self._monitor = self._listener.attach(self._router)
        except (ConfigurationError, zmq.ZMQError, OSError):
            self.close()
            raise
        for socket in (self._monitor, *(each.socket for each in self._admission)):
            self._poller.register(socket)
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def watch(self, fd: int) -> None:
        """Return early from `receive` when this file descriptor can be read."""
        self._poller.watch(fd)

    def send(self, peer: PeerKey, frame: bytes) -> bool:
        """Send to a source; connects on first use. False when that fails, is not allowed, or its queue is full."""
        return self._sources.send(peer, frame)

    def reply(self, routing_id: str, frame: bytes) -> bool:
        """Answer a target by its routing id. False when its queue is full or it has disconnected."""
        return send_now(self._router, self._poller, [bytes.fromhex(routing_id), frame])

    def forget(self, peer: PeerKey) -> None:
        """Close the connection to a source; unknown ones are fine."""
        self._sources.forget(peer)

    def refused_by(self) -> list[PeerKey]:
        """The sources of which it has turned out since the last call that they end every handshake: they do not hold
        our token, or are no agents. The next message to one connects anew."""
        return self._sources.refused_by()

    def receive(self, wait_s: float) -> list[ReceivedFrame]:
        """The frames that have arrived, after waiting at most `wait_s` seconds for the first; a bounded number."""
        ready = self._poller.poll(wait_s)
        for admission in self._admission:
            if admission.socket in ready:
                admission.answer()
        if self._monitor in ready:
            self._listener.watch(self._monitor)
        found: list[ReceivedFrame] = []
        if self._router in ready:
            for parts in received(self._router):
                # A target's DEALER sends exactly one part; anything else is refused like other invalid frames.
                found.append(ReceivedFrame((), parts[0].hex(), parts[1] if len(parts) == 2 else b""))
        found += [ReceivedFrame((peer,), "", frame) for peer, frame in self._sources.receive(ready)]
        for socket in ready:
            # Not those of connections that have just ended.
            if not socket.closed:
                self._poller.note_used(socket)
        return found

    def take_counts(self) -> Counter[tuple[str, str]]:
        """Connections that were refused since the last time: (`connections_refused`, reason)."""
        refused, self._listener.refused = self._listener.refused, Counter()
        return Counter({("connections_refused", reason): number for reason, number in refused.items()})

    @property
    def num_connections(self) -> int:
        """Connections of others to this agent, including those that are not authenticated yet."""
        return self._listener.num_connections

    def close(self) -> None:
        """Close all sockets; nothing is sent any more. Safe to call twice."""
        self._end.detach()
        _close(self._listener, self._context, self._poller)


def _close(listener: LimitedListener, context: zmq.Context[zmq.Socket[bytes]], poller: Poller) -> None:
    """The poller knows all sockets: as long as it is there they are, and the context can close them."""
    listener.close()
    context.destroy(linger=0)
    poller.close()
