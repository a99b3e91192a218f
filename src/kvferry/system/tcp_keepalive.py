"""TCP keep-alive: a connection ends when the other host is gone.

Without this a connection on which nothing is to be sent outlives the other host by two hours, and one on which there is
something to send by a quarter of an hour.
"""

from __future__ import annotations

import socket

# A probe after so many seconds of silence, then one every so many seconds, and how many may go unanswered.
IDLE_S, INTERVAL_S, NUM_PROBES = 10, 5, 3
# The same limit for bytes that are not acknowledged.
USER_TIMEOUT_MS = 1000 * (IDLE_S + INTERVAL_S * NUM_PROBES)


def keep_alive(sock: socket.socket) -> None:
    """Connections that a listening socket accepts inherit it. Raises OSError for what is no TCP socket."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
