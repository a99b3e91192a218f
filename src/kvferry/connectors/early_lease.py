"""What an early prefill is promised: the name and the lease that an engine's own front end has chosen for it.

They pass through the body of a request, which a client writes. The front end and the scheduler share a key, and what is
not sealed with it promises nothing: nobody else may say what a lease is called.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

NAME_PREFIX = "early-"


@dataclass(frozen=True, slots=True)
class Promise:
    """`name` is what agents call the request, `lease_id` cannot be guessed. Both are in the reference that the caller
    gets before the prompt is computed."""

    name: str
    lease_id: str


def new_key() -> str:
    """Return a new secret that one engine's front end and scheduler share for as long as they live."""
    return secrets.token_hex(32)


def new_promise() -> Promise:
    """Return a promise whose name and lease id were never used before."""
    return Promise(NAME_PREFIX + secrets.token_hex(16), secrets.token_hex(16))


def sealed(promise: Promise, key: str) -> dict[str, object]:
    """The sealed promise, which replaces a client's own `kvferry` in its `kv_transfer_params`. It is ready for JSON."""
    return {"early": True, "name": promise.name, "lease_id": promise.lease_id, "seal": _seal(promise, key)}


def unsealed(params: Mapping[str, object], key: str) -> Promise | None:
    """The promise in a request's `kv_transfer_params`; None where there is none that was sealed with this key."""
    ours = params.get("kvferry")
    if not key or not isinstance(ours, Mapping):
        return None
    name, lease_id, seal = (ours.get(field) for field in ("name", "lease_id", "seal"))
    if not isinstance(name, str) or not isinstance(lease_id, str) or not isinstance(seal, str):
        return None
    promise = Promise(name, lease_id)
    is_ours = hmac.compare_digest(_seal(promise, key).encode(), seal.encode(errors="surrogatepass"))
    return promise if is_ours else None


def _seal(promise: Promise, key: str) -> str:
    words = f"{promise.name}\n{promise.lease_id}".encode(errors="surrogatepass")
    return hmac.new(key.encode(), words, hashlib.sha256).hexdigest()
