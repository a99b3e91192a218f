"""CurveZMQ with keys that follow from the shared token: who does not know it can neither connect nor read along.

A connecting side must know the listener's public key, which only holders of the token can compute and which never
travels in clear; and the listener asks, by ZeroMQ's own protocol for that (ZAP), whether the other's key is the one
that follows from the token. Every connection has keys of its own and counts its messages, so that nothing can be
repeated, reflected or reordered; the library sees to that.
"""

from __future__ import annotations

import hmac
from typing import Final

import zmq
from zmq.utils import z85

from kvferry.agent.control.shared_token import SharedToken
from kvferry.errors import ConfigurationError

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
ZAP_DOMAIN: Final = b"kvferry"
ZAP_VERSION: Final = b"1.0"
# Version, request id, domain, address, routing id, mechanism, key.
NUM_ZAP_FRAMES: Final = 7


def secure_listening(socket: zmq.Socket[bytes], token: SharedToken) -> None:
    """Let only holders of the token connect. Raises ConfigurationError when ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise ConfigurationError(
            "this build of ZeroMQ has no encryption",
            found=f"libzmq {zmq.zmq_version()} without CURVE",
            hint="install pyzmq from its wheel: pip install --force-reinstall pyzmq",
        )
    _, secret = _pair(token, b"listener")
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)


def secure_connecting(socket: zmq.Socket[bytes], token: SharedToken) -> None:
    """Connect only to those that use the token."""
    public, secret = _pair(token, b"connector")
    socket.setsockopt(zmq.CURVE_SERVERKEY, _pair(token, b"listener")[0])
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


class Admission:
    """Answers ZeroMQ's question whether a connecting side's key is the right one. Belongs to the channel's thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], token: SharedToken) -> None:
        self._expected = z85.decode(_pair(token, b"connector")[0])
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ADDRESS)

    def answer(self) -> None:
        """Answer all questions that are there."""
        while self.socket.poll(0):
            frames = self.socket.recv_multipart()
            request_id = frames[1] if len(frames) > 1 else b""
            words = (b"200", b"OK") if self._admits(frames) else (b"400", b"not a holder of the token")
            self.socket.send_multipart([ZAP_VERSION, request_id, *words, b"", b""])

    def _admits(self, frames: list[bytes]) -> bool:
        if len(frames) != NUM_ZAP_FRAMES or frames[5] != b"CURVE":
            return False
        return hmac.compare_digest(frames[6], self._expected)


def _pair(token: SharedToken, role: bytes) -> tuple[bytes, bytes]:
    """The public and the secret key of a role, as ZeroMQ writes them."""
    secret = z85.encode(token.derived(b"control channel " + role))
    return zmq.curve_public(secret), secret
