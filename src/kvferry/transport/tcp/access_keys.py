"""The keys by which peers reach the memory of a tcp server: a common one, and one for each peer that has its own."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field

from kvferry.errors import WireError
from kvferry.transport.tcp.connection import KEY_BYTES, KEY_ID_BYTES


@dataclass(frozen=True, slots=True)
class AccessKey:
    """`key_id` is sent with every request, `secret` never is."""

    key_id: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_ID_BYTES))
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)


class AccessKeys:
    """The keys of one server that are valid. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.common = AccessKey()
        self._lock = threading.Lock()
        self._by_peer: dict[str, AccessKey] = {}
        self._valid = {self.common.key_id: self.common.secret}

    def for_peer(self, peer: str) -> AccessKey:
        """The peer's own key, the same one until it is revoked."""
        with self._lock:
            key = self._by_peer.get(peer)
            if key is None:
                key = self._by_peer[peer] = AccessKey()
                self._valid[key.key_id] = key.secret
            return key

    def revoke(self, peer: str) -> bytes:
        """Make a peer's own key void; returns its id, empty when it had none."""
        with self._lock:
            key = self._by_peer.pop(peer, None)
            if key is None:
                return b""
            del self._valid[key.key_id]
            return key.key_id

    def secret_of(self, key_id: bytes) -> bytes:
        """Raises WireError when there is no such key, or it has been revoked."""
        secret = self._valid.get(key_id)
        if secret is None:
            raise WireError("a key that is unknown or has been revoked", found=key_id.hex())
        return secret
