"""What a peer needs to reach this agent's memory: NIXL's metadata and the registered regions, sealed against damage."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvferry.errors import TransportError
from kvferry.transport.descriptors import DeviceAddress, Natural, check_size
from kvferry.transport.registered_memory import MAX_REGIONS

_MAGIC: Final = b"KVN1"
_DIGEST_BYTES: Final = 16
OF_EACH: Final = Meta(max_length=MAX_REGIONS)


class NixlDescriptor(msgspec.Struct, frozen=True, tag="nixl-1"):
    """What a peer needs: the agent's name and metadata, (address, size in bytes) of each region of memory, and, if any
    of them is on a device, (device, its number) of each region."""

    agent: Annotated[str, Meta(min_length=1, max_length=64)]
    regions: Annotated[tuple[tuple[DeviceAddress, Natural], ...], OF_EACH] = msgspec.field(name="pieces")
    metadata: bytes
    devices: Annotated[tuple[tuple[Annotated[str, Meta(max_length=64)], Natural], ...], OF_EACH] = ()


DECODER: Final = msgspec.msgpack.Decoder(NixlDescriptor)


def digest_of(data: bytes) -> bytes:
    """Return a digest that shows damage; it does not authenticate."""
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def seal(body: bytes) -> bytes:
    """Return the body with length and digest in front. Raises TransportError when it is longer than a peer accepts."""
    return check_size(_MAGIC + len(body).to_bytes(8, "big") + digest_of(body) + body)


def unseal(peer: str, descriptor: bytes) -> bytes:
    """Return the body. Raises TransportError when length or digest is wrong: nothing damaged may reach NIXL."""
    check_size(descriptor)
    head = len(_MAGIC) + 8 + _DIGEST_BYTES
    body = descriptor[head:]
    size = int.from_bytes(descriptor[len(_MAGIC) : len(_MAGIC) + 8], "big")
    is_whole = descriptor.startswith(_MAGIC) and len(body) == size
    if not is_whole or digest_of(body) != descriptor[head - _DIGEST_BYTES : head]:
        raise TransportError(
            f"the descriptor of peer {peer!r} is damaged or not one of nixl", found=f"{len(descriptor)} bytes"
        )
    return body
