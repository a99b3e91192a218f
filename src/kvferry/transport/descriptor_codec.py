"""Descriptors come from outside: decoded with bounds, refused with a reason."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvferry.errors import TransportError

MAX_DESCRIPTOR_BYTES = 1 << 20

Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Shape = TypeVar("Shape", bound=msgspec.Struct)


def check_size(descriptor: bytes) -> bytes:
    """The same descriptor. Raises TransportError when it is longer than the other side accepts."""
    if len(descriptor) > MAX_DESCRIPTOR_BYTES:
        raise TransportError(
            "the descriptor is too long",
            found=f"{len(descriptor)} bytes",
            expected=f"at most {MAX_DESCRIPTOR_BYTES} bytes",
            hint="register fewer, larger pieces of memory",
        )
    return descriptor


def decode(peer: str, descriptor: bytes, kind: type[Shape]) -> Shape:
    """Raises TransportError when it is not a `kind` within its bounds."""
    check_size(descriptor)
    try:
        return msgspec.msgpack.decode(descriptor, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(
            f"the descriptor of peer {peer!r} cannot be used",
            found=str(error),
            expected=f"a {kind.__name__}",
            hint="both sides must use the same transport and version",
        ) from error
