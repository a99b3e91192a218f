"""What may go wrong on a machine although nothing fails: pure checks of its facts, each with a hint that fixes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from kvferry.transport.machine.affinity import nearest
from kvferry.transport.machine.facts import LOOPBACK, UNLIMITED, Place, Situation
from kvferry.transport.machine.finding import Finding, Severity
from kvferry.transport.machine.ucx_transports import ACTIVE_MESSAGES, IN_MODULES, has_tcp, names

NOTE, WARNING, ERROR = Severity.NOTE, Severity.WARNING, Severity.ERROR
# Transports that UCX needs to know the memory of a device at all, and those that copy between its processes.
COPIES: Final = {"cuda": "cuda_copy", "rocm": "rocm_copy", "xpu": "ze_copy"}
SHARES: Final = {"cuda": "cuda_ipc", "rocm": "rocm_ipc", "xpu": "ze_ipc"}
OTHER_BUILD: Final = {
    "cuda": "install NIXL for your CUDA: pip install nixl-cu13 or nixl-cu12",
    "rocm": "build UCX --with-rocm and NIXL on it (the wheels on PyPI have none), or use the buffer device cpu",
    "xpu": "build UCX --with-ze and NIXL on it (the wheels on PyPI have none), or use the buffer device cpu",
}
LEAST_LOCKED_BYTES: Final = 1 << 30

_Check = Callable[[Situation], Iterator[Finding]]


def doubts(situation: Situation) -> tuple[Finding, ...]:
    """Everything that is worth saying before anything has been tried."""
    return tuple(finding for check in CHECKS for finding in check(situation))


def _build(situation: Situation) -> Iterator[Finding]:
    """Whether UCX has what this device's memory needs."""
    build, device = situation.build, situation.device
    if not build.is_known or not situation.is_direct:
        return
    if COPIES.get(device, "") not in {"", *build.transports}:
        what = f"this UCX cannot reach {device} memory"
        yield Finding(ERROR, what, f"{build.owner} without {COPIES[device]}", COPIES[device], OTHER_BUILD[device])
    elif situation.may_be_here and SHARES.get(device, "") not in {"", *build.transports}:
        what = f"on one host, {device} memory goes through host memory"
        hint = f"use a UCX whose modules have {SHARES[device]}, or the buffer device cpu, which saves the detour"
        yield Finding(WARNING, what, f"{build.owner} without {SHARES[device]}", SHARES[device], hint)


def _containers(situation: Situation) -> Iterator[Finding]:
    confinement = situation.confinement
    if situation.is_direct and situation.may_be_here and confinement.container:
        what = "engines in different containers cannot share device memory, and silently fall back to tcp"
        found = f"{confinement.container}; pid namespace {confinement.pid_namespace}, ipc {confinement.ipc_namespace}"
        hint = "start the containers with --pid=host --ipc=host (Kubernetes: one pod with shareProcessNamespace: true)"
        yield Finding(NOTE, what, found, "the same namespaces in both engines", hint)


def _attaching(situation: Situation) -> Iterator[Finding]:
    """Host memory between processes of one host."""
    if situation.is_direct or not situation.may_be_here:
        return
    if not situation.confinement.may_attach:
        what = (
            "the kernel does not let processes read each other's memory: cma does not work, and nixl falls back to tcp"
        )
        found = f"kernel.yama.ptrace_scope = {situation.confinement.ptrace_scope}, and no CAP_SYS_PTRACE"
        hint = "sysctl kernel.yama.ptrace_scope=0, or give the process CAP_SYS_PTRACE; shm works without"
        yield Finding(WARNING, what, found, "0, or the capability", hint)
    elif situation.build.is_known and "cma" not in situation.build.transports:
        what = "on one host, nixl goes through tcp"
        hint = "use a UCX with the cma module, or --transport auto, which takes shm or cma of its own"
        yield Finding(WARNING, what, f"{situation.build.owner} without cma", "cma", hint)


def _rdma(situation: Situation) -> Iterator[Finding]:
    all_rdma = tuple(nic for nic in situation.nics if nic.is_rdma)
    if all_rdma and not situation.rdma:
        found = ", ".join(f"{nic.name} {nic.state}" for nic in all_rdma)
        hint = "look at the cable and at ibstat; in a container, pass /dev/infiniband on"
        yield Finding(WARNING, "no RDMA port is up: other hosts are reached over tcp", found, "up", hint)
    elif situation.is_direct and not all_rdma and situation.may_be_elsewhere:
        what = "there is no RDMA card: device memory reaches other hosts over tcp, through host memory"
        hint = "nothing to do for engines on one host; between hosts, install a card or expect the speed of tcp"
        yield Finding(NOTE, what, "no card in /sys/class/infiniband", "a card with a port that is up", hint)
    if situation.is_direct and situation.rdma:
        yield from _far_cards(situation, all_rdma)


def _far_cards(situation: Situation, all_rdma: tuple[object, ...]) -> Iterator[Finding]:
    best = nearest(situation.accelerator, [nic for nic in situation.nics if nic.is_rdma])
    if any(nic.is_up for nic in best):
        return
    found = ", ".join(f"{nic.name} {nic.state}" for nic in best)
    what = f"the card nearest to {situation.accelerator.name} is not up, so a farther one is used"
    yield Finding(WARNING, what, found, "up", "look at its cable and at ibstat")


def _locked(situation: Situation) -> Iterator[Finding]:
    limit = situation.confinement.locked_bytes
    if situation.rdma and limit != UNLIMITED and limit < LEAST_LOCKED_BYTES:
        what = "the limit on locked memory is too low for RDMA to register a cache"
        hint = "ulimit -l unlimited (containers: --ulimit memlock=-1)"
        yield Finding(ERROR, what, f"{limit:,} bytes", "unlimited", hint)


def _user_transports(situation: Situation) -> Iterator[Finding]:
    """A user's own list stays, but it may name what is not there."""
    value = situation.user.get("UCX_TLS", "")
    if not value or value.startswith("^"):
        return
    listed, build = frozenset(names(value)), situation.build
    missing = sorted((listed & IN_MODULES) - build.transports) if build.is_known else []
    if missing:
        hint = "take them out of UCX_TLS, or use a UCX that has them"
        yield Finding(WARNING, "UCX_TLS names transports that this UCX does not have", ", ".join(missing), "", hint)
    messages = listed & ACTIVE_MESSAGES
    if messages and "tcp" not in messages and not situation.rdma:
        hint = f"set UCX_TLS={value},tcp"
        found = f"UCX_TLS={value}, and no RDMA port that is up"
        yield Finding(ERROR, "these UCX transports need an RDMA port", found, "a port that is up, or tcp", hint)


def _user_cache(situation: Situation) -> Iterator[Finding]:
    mine = situation.user.get("UCX_MEMTYPE_CACHE", "n")
    if situation.device == "xpu" and situation.is_direct and mine.lower() not in {"n", "no", "off", "0", "false"}:
        what = "UCX may mistake XPU memory for host memory"
        yield Finding(WARNING, what, f"UCX_MEMTYPE_CACHE={mine}", "n", "unset UCX_MEMTYPE_CACHE: kvferry sets n")


def _user_cards(situation: Situation) -> Iterator[Finding]:
    """Without a token there are peers on this host only, and everything else listens on loopback."""
    mine = situation.user.get("UCX_NET_DEVICES", "")
    plain = {nic.name for nic in situation.nics if not nic.is_rdma} - {LOOPBACK}
    outer = sorted(plain) if mine == "all" else [name for name in map(str.strip, mine.split(",")) if name in plain]
    if outer and situation.place is Place.SAME_HOST and has_tcp(situation.user.get("UCX_TLS", "")):
        what = "UCX listens on an address that other hosts can reach, though all peers are on this host"
        hint = "unset UCX_NET_DEVICES: kvferry chooses the loopback interface; or give engines a token and an address"
        yield Finding(WARNING, what, f"UCX_NET_DEVICES={mine}", LOOPBACK, hint)


CHECKS: Final[tuple[_Check, ...]] = (
    _build,
    _containers,
    _attaching,
    _rdma,
    _locked,
    _user_transports,
    _user_cache,
    _user_cards,
)
