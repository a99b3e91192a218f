"""How a TCP connection between two of our processes finds out that the other host says nothing any more.

Without this a connection on which nothing is to be sent outlives the other host by two hours, and one on which there is
something to send by a quarter of an hour.
"""

from __future__ import annotations

import socket

# A connection that is silent for so long is asked for a sign of life, and asked again so often.
IDLE_S, INTERVAL_S, NUM_PROBES = 10, 5, 3
# The same for bytes that nobody acknowledges.
USER_TIMEOUT_MS = 1000 * (IDLE_S + INTERVAL_S * NUM_PROBES)


def keep_alive(sock: socket.socket) -> None:
    """Connections that a listening socket accepts inherit it. Raises OSError for what is no TCP socket."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
