"""Bytes to messages and back. Input is never trusted: what does not decode exactly is a WireError with the reason.

A frame is two magic bytes, one byte for the wire version, and a MessagePack map with a tag.
"""

from __future__ import annotations

import msgspec

from kvferry.errors import FerryError, WireError, WireVersionError
from kvferry.wire.messages import WIRE_VERSION, Message

__all__ = ["MAX_FRAME_BYTES", "MAX_REQUEST_BYTES", "decode", "encode"]

MAGIC = b"KF"
# The largest answer is an offer with its layout; what a target asks is much shorter.
MAX_FRAME_BYTES = 16 << 20
MAX_REQUEST_BYTES = 1 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One frame."""
    return MAGIC + bytes([WIRE_VERSION]) + _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """The message of a frame. Raises WireError: too large, not ours, another wire version, malformed."""
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError("frame too large", found=f"{len(frame)} bytes", expected=f"at most {MAX_FRAME_BYTES}")
    if frame[:2] != MAGIC or len(frame) < 4:
        raise WireError("not a frame of this protocol", found=repr(frame[:8]), expected=f"{MAGIC!r} first")
    if frame[2] != WIRE_VERSION:
        raise WireVersionError(
            "peer speaks another wire version",
            found=f"version {frame[2]}",
            expected=f"version {WIRE_VERSION}",
            hint="run the same release of kvferry on both engines",
        )
    try:
        return _decoder.decode(frame[3:])
    except (msgspec.DecodeError, ValueError, ArithmeticError, RecursionError, FerryError) as error:
        raise WireError("malformed frame", found=str(error)) from error
