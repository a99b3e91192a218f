"""Whether a transport is as fast as it can be expected to be, so that no fallback stays unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvferry.plan.programs.copies import Direction
from kvferry.transport.descriptors import host_here
from kvferry.transport.machine.facts import Place
from kvferry.transport.machine.finding import Finding, Severity
from kvferry.transport.machine.hardware import nics
from kvferry.transport.machine.process_limits import process_limits
from kvferry.transport.memory_kind import HOST
from kvferry.transport.selection.measurement import FAR_SLOWER, OTHER, Measurement
from kvferry.transport.ucx.environment import user_variables
from kvferry.transport.ucx.tls import RDMA

ON_ONE_HOST: Final = frozenset(
    {"shm", "cma", "posix", "sysv", "xpmem", "knem", "cuda_ipc", "rocm_ipc", "ze_ipc", *RDMA}
)
VERBS: Final = {Direction.READ: "reading", Direction.WRITE: "writing"}


@dataclass(frozen=True, slots=True)
class LocalContext:
    """Facts about this process: the host's name (empty: unknown), whether an RDMA port is up, the transport asked for.

    `user_transports` is the user's own UCX_TLS, `may_attach` whether the kernel lets processes read each other, and
    `may_switch_direction` whether a peer that can only be read far slower than written to is asked to write.
    `buffer_device` is the device whose memory this process registers.
    """

    host: str = ""
    has_rdma: bool = False
    requested: str = "auto"
    user_transports: str = ""
    may_attach: bool = True
    may_switch_direction: bool = False
    buffer_device: str = HOST

    def place_of(self, host: str) -> Place:
        """Where a peer is that says it runs on `host`."""
        if not self.host or not host:
            return Place.UNKNOWN
        return Place.SAME_HOST if host == self.host else Place.OTHER_HOST


def local_context(requested: str, may_switch_direction: bool = True, buffer_device: str = HOST) -> LocalContext:
    """Return the context of an engine with transport `requested`. It may let sources write instead of reading."""
    return LocalContext(
        host=host_here(),
        has_rdma=any(nic.is_rdma and nic.is_up for nic in nics()),
        requested=requested,
        user_transports=user_variables().get("UCX_TLS", ""),
        may_attach=process_limits().may_attach,
        may_switch_direction=may_switch_direction,
        buffer_device=buffer_device,
    )


def diagnose(measured: Measurement, direction: Direction, place: Place, context: LocalContext) -> tuple[Finding, ...]:
    """What is wrong with the transport that was chosen for a peer, in the direction in which it moves bytes."""
    return (
        *_fallback(measured, direction, place, context),
        *_asymmetry(measured, direction, context.may_switch_direction),
    )


def _fallback(measured: Measurement, direction: Direction, place: Place, context: LocalContext) -> Iterator[Finding]:
    if measured.name == context.requested == "tcp":
        # The user has asked for tcp by name: it is no fallback.
        return
    families = {carrier.split("/")[0] for carrier in measured.carriers}
    fine, expected = _expected(place, context.has_rdma)
    if families and families.isdisjoint(fine):
        carriers = " and ".join(measured.carriers)
        what = "transfers use a slower transport than these engines could"
        found = f"{measured.name} over {carriers}, {measured.rates(direction)}"
        yield Finding(Severity.WARNING, what, found, expected, _hint(place, context))


def _expected(place: Place, has_rdma: bool) -> tuple[frozenset[str], str]:
    """The carriers that are expected, and a description of them."""
    if place is Place.SAME_HOST:
        return ON_ONE_HOST, "a transport within the host: shm, cma, or the device's own"
    if has_rdma:
        return RDMA, "RDMA: a port of this host is up"
    return frozenset({"tcp", *ON_ONE_HOST}), ""


def _hint(place: Place, context: LocalContext) -> str:
    """The likeliest cause first: what the user has set, then what the kernel forbids, then what differs at the peer."""
    if context.user_transports:
        return f"UCX_TLS={context.user_transports} is set: unset it, or add what is missing"
    if place is not Place.SAME_HOST:
        return "is the peer's RDMA port up, too, and UCX_NET_DEVICES right on both hosts? kvferry doctor shows both"
    if not context.may_attach:
        return "sysctl kernel.yama.ptrace_scope=0, or give both engines CAP_SYS_PTRACE; shm needs neither"
    return "run both engines as one user in one pid and ipc namespace (containers: --pid=host --ipc=host)"


def is_far_slower(measured: Measurement, direction: Direction) -> bool:
    """Whether this direction is so much slower than the other one that it must take another path."""
    return measured.times_slower(direction) >= FAR_SLOWER


def _asymmetry(measured: Measurement, direction: Direction, may_switch_direction: bool) -> Iterator[Finding]:
    if not is_far_slower(measured, direction):
        return
    ratio, others = measured.times_slower(direction), measured.rates(OTHER[direction])
    what = f"{VERBS[direction]} over {measured.name} is {ratio:.0f} times slower than {VERBS[OTHER[direction]]}"
    yield Finding(
        Severity.WARNING,
        what,
        str(measured.rates(direction)),
        f"about {others}",
        _direction_hint(direction, may_switch_direction),
    )


def _direction_hint(direction: Direction, may_switch_direction: bool) -> str:
    """A hint for the target engine, which decides which side moves a cache."""
    if direction is Direction.WRITE:
        return "--transfer-direction pull, or auto, at the engine that is written to"
    if may_switch_direction:
        return "with --transfer-direction auto the other engine is asked to write instead, and read only if it cannot"
    return "--transfer-direction push, or auto"
