"""Bytes to messages and back. Input is never trusted: what does not decode exactly is a WireError with the reason.

A frame is two magic bytes, one byte for the wire version, the CRC-32 of the rest, and a MessagePack map with a tag. The
checksum is there because a message with a flipped bit may well decode: a grant would then name other blocks.
"""

from __future__ import annotations

from zlib import crc32

import msgspec

from kvferry.errors import FerryError, WireError, WireVersionError
from kvferry.wire.messages import WIRE_VERSION, Message

MAGIC = b"KF"
# The largest answer is an offer with its layout. What a target asks is shorter, also where it offers the layouts of all
# its ranks: 50 KB each for 80 layers.
MAX_FRAME_BYTES = 16 << 20
MAX_REQUEST_BYTES = 4 << 20
HEAD_BYTES = 7

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One frame."""
    return frame_of(_encoder.encode(message))


def frame_of(body: bytes) -> bytes:
    """The frame of a message that is encoded already."""
    return MAGIC + bytes([WIRE_VERSION]) + crc32(body).to_bytes(4, "big") + body


def decode(frame: bytes) -> Message:
    """The message of a frame. Raises WireError: too large, not ours, another wire version, damaged, malformed."""
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError("frame too large", found=f"{len(frame)} bytes", expected=f"at most {MAX_FRAME_BYTES}")
    if frame[:2] != MAGIC or len(frame) < 4:
        raise WireError("not a frame of this protocol", found=repr(frame[:8]), expected=f"{MAGIC!r} first")
    if frame[2] != WIRE_VERSION:
        raise WireVersionError(
            "the peer uses another wire version",
            found=f"version {frame[2]}",
            expected=f"version {WIRE_VERSION}",
            hint="run the same release of kvferry on both engines",
        )
    body = frame[HEAD_BYTES:]
    if crc32(body).to_bytes(4, "big") != frame[3:HEAD_BYTES]:
        raise WireError("damaged frame", found=f"{len(body)} bytes", expected="bytes that match their checksum")
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, ValueError, ArithmeticError, RecursionError, FerryError) as error:
        raise WireError("malformed frame", found=str(error)) from error
