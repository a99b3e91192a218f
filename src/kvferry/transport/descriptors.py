"""What peers tell each other of their memory: decoded with bounds, and refused with a reason.

`Origin` says which host and pid namespace a process is in: only processes that share both reach each other's memory.
"""

from __future__ import annotations

import os
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvferry.errors import TransportError
from kvferry.system import os_error_text

MAX_DESCRIPTOR_BYTES = 1 << 20

Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
DeviceAddress = Annotated[int, Meta(ge=0)]
"""Intel's GPUs have addresses with the highest of 64 bits. Whoever uses one checks that it is no longer."""
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


def decode(peer: str, descriptor: bytes, decoder: msgspec.msgpack.Decoder[Shape]) -> Shape:
    """Raises TransportError when it is not what `decoder` reads, within its bounds.

    Decoders are built when their module is imported: msgspec prepares a type at its first use, and two threads that
    use it first at once end the process.
    """
    check_size(descriptor)
    try:
        return decoder.decode(descriptor)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(
            f"the descriptor of peer {peer!r} cannot be used",
            found=str(error),
            expected=f"a {decoder.type.__name__}",
            hint="both sides must use the same transport and version",
        ) from error


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """A booted kernel and a pid namespace."""

    boot_id: Annotated[str, Meta(max_length=64)]
    pid_namespace: Natural

    def __str__(self) -> str:
        return f"boot id {self.boot_id}, pid namespace {self.pid_namespace}"


def origin_here() -> Origin:
    """This process's. Raises TransportError where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        return Origin(boot_id, os.stat("/proc/self/ns/pid").st_ino)
    except OSError as error:
        raise TransportError("memory of other processes needs Linux with /proc", found=os_error_text(error)) from error


def host_here() -> str:
    """A name of this host that all its processes agree on, in containers as well; empty where there is none."""
    try:
        return origin_here().boot_id
    except TransportError:
        return ""


def check_same(peer: str, remote: Origin, local: Origin) -> None:
    """Raises TransportError unless both are the same."""
    if remote != local:
        raise TransportError(
            f"the memory of peer {peer!r} cannot be reached from here",
            found=str(remote),
            expected=str(local),
            hint="run both in the same container or pod (shared pid namespace), or use tcp or nixl",
        )
