"""Registration of an engine at a router, and its signature. Pure.

The shared token is never sent: a key derived from it signs the announcement and the time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from enum import StrEnum
from urllib.parse import urlsplit

import msgspec

from kvferry.errors import RequestError

MEMBERS_PATH = "/kvferry/members"
SIGNATURE = "x-kvferry-signature"
KEY_PURPOSE = b"router registration"
# How far the two clocks may differ. For so long a recorded announcement can be replayed.
MAX_AGE_S = 60.0
MAX_SIGNATURE = 100


class Side(StrEnum):
    """The role of an instance."""

    PREFILL = "prefill"
    DECODE = "decode"


class Announcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine at `url` wants requests of `role`; with `leaving`, none any more."""

    url: str
    role: Side
    leaving: bool = False


def decode_announcement(body: bytes) -> Announcement:
    """The announcement in a body. Raises RequestError."""
    try:
        return msgspec.json.decode(body, type=Announcement)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            "invalid registration", found=str(error), expected='{"url": "http://host:port", "role": "decode"}'
        ) from None


def sign(key: bytes, body: bytes, now: float) -> str:
    """The value of the signature header. `now` is seconds of the wall clock."""
    stamp = f"{now:.0f}"
    return f"{stamp}.{_mac(key, stamp, body)}"


def reason_to_refuse(keys: Sequence[bytes], body: bytes, signature: str, now: float) -> str:
    """Why an announcement is refused, as a stable label; empty when its signature is valid with one of the keys."""
    stamp, _, mac = signature[:MAX_SIGNATURE].partition(".")
    if not signature:
        return "unsigned"
    if (
        not stamp.isascii()
        or not stamp.isdigit()
        or not any([hmac.compare_digest(mac.encode(), _mac(key, stamp, body).encode()) for key in keys])
    ):
        return "signature"
    return "clock" if abs(now - int(stamp)) > MAX_AGE_S else ""


def _mac(key: bytes, stamp: str, body: bytes) -> str:
    return hmac.new(key, stamp.encode() + b"\n" + body, hashlib.sha256).hexdigest()


def is_base_url(url: str) -> bool:
    """Whether a path can be put behind it: no query, no fragment, no credentials, and no `/v1`."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    extra = parts.query or parts.fragment or "@" in parts.netloc or parts.path.endswith("/v1")
    # The URL becomes a part of requests as it is.
    is_visible = all("!" <= character <= "~" for character in url)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_visible and not extra
