"""Pure checks of a machine's facts: conditions that make transfers slow or fail, each with a hint that fixes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from kvferry.transport.machine.facts import LOOPBACK, UNLIMITED, Place, SystemFacts
from kvferry.transport.machine.finding import Finding, Severity
from kvferry.transport.ucx.tls import ACTIVE_MESSAGES, IN_MODULES, has_tcp, names

NOTE, WARNING, ERROR = Severity.NOTE, Severity.WARNING, Severity.ERROR
# The UCX transports that give access to the memory of a device, and those that share it between processes.
COPIES: Final = {"cuda": "cuda_copy", "rocm": "rocm_copy", "xpu": "ze_copy"}
SHARES: Final = {"cuda": "cuda_ipc", "rocm": "rocm_ipc", "xpu": "ze_ipc"}
OTHER_BUILD: Final = {
    "cuda": "install NIXL for your CUDA: pip install nixl-cu13 or nixl-cu12",
    "rocm": "build UCX --with-rocm and NIXL on it (the wheels on PyPI have none), or use the buffer device cpu",
    "xpu": "build UCX --with-ze and NIXL on it (the wheels on PyPI have none), or use the buffer device cpu",
}
THROUGH_HOST: Final = "choose --buffer-device cpu (vllm serve: kv_buffer_device; SGLang has none)"
LEAST_LOCKED_BYTES: Final = 1 << 30

_Check = Callable[[SystemFacts], Iterator[Finding]]


def check_system(system: SystemFacts) -> tuple[Finding, ...]:
    """All findings that are known before any transfer."""
    return tuple(finding for check in CHECKS for finding in check(system))


def _build(system: SystemFacts) -> Iterator[Finding]:
    """Whether UCX has the modules for the memory of this device."""
    build, device = system.build, system.device
    if not build.is_known or not system.is_direct:
        return
    if COPIES.get(device, "") not in {"", *build.transports}:
        what = f"this UCX cannot reach {device} memory"
        yield Finding(ERROR, what, f"{build.owner} without {COPIES[device]}", COPIES[device], OTHER_BUILD[device])
    elif system.may_be_local and SHARES.get(device, "") not in {"", *build.transports}:
        what = f"on one host, {device} memory goes through host memory"
        hint = f"use a UCX whose modules have {SHARES[device]}, or the buffer device cpu, which saves the detour"
        yield Finding(WARNING, what, f"{build.owner} without {SHARES[device]}", SHARES[device], hint)


def _containers(system: SystemFacts) -> Iterator[Finding]:
    limits = system.limits
    if system.is_direct and system.may_be_local and limits.container:
        what = "engines in different containers cannot share device memory, and silently fall back to tcp"
        found = f"{limits.container}; pid namespace {limits.pid_namespace}, ipc {limits.ipc_namespace}"
        hint = "start the containers with --pid=host --ipc=host (Kubernetes: one pod with shareProcessNamespace: true)"
        yield Finding(NOTE, what, found, "the same namespaces in both engines", hint)


def _attaching(system: SystemFacts) -> Iterator[Finding]:
    """Host memory between processes of one host."""
    if system.is_direct or not system.may_be_local:
        return
    if not system.limits.may_attach:
        what = (
            "the kernel does not let processes read each other's memory: cma does not work, and nixl falls back to tcp"
        )
        found = f"kernel.yama.ptrace_scope = {system.limits.ptrace_scope}, and no CAP_SYS_PTRACE"
        hint = "sysctl kernel.yama.ptrace_scope=0, or give the process CAP_SYS_PTRACE; shm works without"
        yield Finding(WARNING, what, found, "0, or the capability", hint)
    elif system.build.is_known and "cma" not in system.build.transports:
        what = "on one host, nixl goes through tcp"
        hint = "use a UCX with the cma module, or --transport auto, which takes shm or cma of its own"
        yield Finding(WARNING, what, f"{system.build.owner} without cma", "cma", hint)


def _rdma(system: SystemFacts) -> Iterator[Finding]:
    all_rdma = tuple(nic for nic in system.nics if nic.is_rdma)
    if all_rdma and not system.rdma:
        found = ", ".join(f"{nic.name} {nic.state}" for nic in all_rdma)
        hint = "look at the cable and at ibstat; in a container, pass /dev/infiniband on"
        if system.is_direct and system.may_be_remote:
            hint += f"; between hosts without it, {THROUGH_HOST}"
        yield Finding(WARNING, "no RDMA port is up: other hosts are reached over tcp", found, "up", hint)
    elif system.is_direct and not all_rdma and system.may_be_remote:
        what = "there is no RDMA card: device memory reaches other hosts over tcp, through host memory"
        hint = f"nothing to do for engines on one host; between hosts, install a card, or {THROUGH_HOST}"
        yield Finding(NOTE, what, "no card in /sys/class/infiniband", "a card with a port that is up", hint)
    if system.is_direct and system.rdma:
        yield from _nearest_cards(system, all_rdma)


def _nearest_cards(system: SystemFacts, all_rdma: tuple[object, ...]) -> Iterator[Finding]:
    best = system.accelerator.nearest([nic for nic in system.nics if nic.is_rdma])
    if any(nic.is_up for nic in best):
        return
    found = ", ".join(f"{nic.name} {nic.state}" for nic in best)
    what = f"the card nearest to {system.accelerator.name} is not up, so a farther one is used"
    yield Finding(WARNING, what, found, "up", "look at its cable and at ibstat")


def _locked(system: SystemFacts) -> Iterator[Finding]:
    limit = system.limits.locked_bytes
    if system.rdma and limit != UNLIMITED and limit < LEAST_LOCKED_BYTES:
        what = "the limit on locked memory is too low for RDMA to register a cache"
        hint = "ulimit -l unlimited (containers: --ulimit memlock=-1)"
        yield Finding(ERROR, what, f"{limit:,} bytes", "unlimited", hint)


def _user_transports(system: SystemFacts) -> Iterator[Finding]:
    """The user's own list is kept, but it may name transports that are missing."""
    value = system.user.get("UCX_TLS", "")
    if not value or value.startswith("^"):
        return
    listed, build = frozenset(names(value)), system.build
    missing = sorted((listed & IN_MODULES) - build.transports) if build.is_known else []
    if missing:
        hint = "take them out of UCX_TLS, or use a UCX that has them"
        yield Finding(WARNING, "UCX_TLS names transports that this UCX does not have", ", ".join(missing), "", hint)
    messages = listed & ACTIVE_MESSAGES
    if messages and "tcp" not in messages and not system.rdma:
        hint = f"set UCX_TLS={value},tcp"
        found = f"UCX_TLS={value}, and no RDMA port that is up"
        yield Finding(ERROR, "these UCX transports need an RDMA port", found, "a port that is up, or tcp", hint)


def _user_cache(system: SystemFacts) -> Iterator[Finding]:
    value = system.user.get("UCX_MEMTYPE_CACHE", "n")
    if system.device == "xpu" and system.is_direct and value.lower() not in {"n", "no", "off", "0", "false"}:
        what = "UCX may mistake XPU memory for host memory"
        yield Finding(WARNING, what, f"UCX_MEMTYPE_CACHE={value}", "n", "unset UCX_MEMTYPE_CACHE: kvferry sets n")


def _user_cards(system: SystemFacts) -> Iterator[Finding]:
    """Without a token all peers are on this host, and all other sockets listen on loopback."""
    value = system.user.get("UCX_NET_DEVICES", "")
    plain = {nic.name for nic in system.nics if not nic.is_rdma} - {LOOPBACK}
    outer = sorted(plain) if value == "all" else [name for name in map(str.strip, value.split(",")) if name in plain]
    if outer and system.place is Place.SAME_HOST and has_tcp(system.user.get("UCX_TLS", "")):
        what = "UCX listens on an address that other hosts can reach, though all peers are on this host"
        hint = "unset UCX_NET_DEVICES: kvferry chooses the loopback interface; or give engines a token and an address"
        yield Finding(WARNING, what, f"UCX_NET_DEVICES={value}", LOOPBACK, hint)


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
