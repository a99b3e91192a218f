"""Which UCX settings suit a machine: a pure function from its facts to settings, their reasons, and warnings.

UCX reads its settings when its libraries are loaded. Settings that do not suit the machine rarely fail: UCX takes a
slower transport, or ends in an error without a reason. Values of the user are always kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvferry.transport.machine.facts import LOOPBACK, NicKind, Place, SystemFacts
from kvferry.transport.machine.finding import Finding
from kvferry.transport.memory_kind import HOST
from kvferry.transport.ucx.checks import check_system
from kvferry.transport.ucx.segments import RECEIVED, SEGMENT, SENT, check_segments
from kvferry.transport.ucx.tls import RC, check_transport_set, has_tcp

TRANSPORTS, CARDS = "UCX_TLS", "UCX_NET_DEVICES"
# A kibibyte, as text for UCX: what engines that free and allocate large memory are known to need.
MOST_UNRELEASED: Final = "1024"
# Why UCX chooses the transports itself, by what the registered memory belongs to.
LEFT_TO_UCX: Final = {
    HOST: "host memory: UCX takes cma between processes of one host, and RDMA or tcp between hosts",
    "cuda": "CUDA memory: UCX takes cuda_ipc on one host and RDMA between hosts by itself; cuda_ipc only in threads "
    "with a CUDA context, and between hosts only with UCX_CUDA_IPC_ENABLE_MNNVL=y and memory from CUDA's VMM allocator",
    "rocm": "ROCm memory: UCX takes rocm_ipc on one host and RDMA between hosts by itself",
}


class Origin(StrEnum):
    """Where a value comes from: the user's environment, this module's choice, or the library's default."""

    USER = "environment"
    CHOSEN = "chosen"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable; `value` is empty for the library's default. `reason` says why; for a user's value, which one would
    have been chosen."""

    name: str
    value: str
    origin: Origin
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}" if self.value else f"{self.name} left to UCX"


@dataclass(frozen=True, slots=True)
class Environment:
    """All relevant settings, and findings about the machine."""

    settings: tuple[Setting, ...]
    warnings: tuple[Finding, ...]

    @property
    def chosen(self) -> dict[str, str]:
        """The variables to set before UCX is loaded."""
        return {each.name: each.value for each in self.settings if each.origin is Origin.CHOSEN}


_Rule = Callable[[SystemFacts], Iterator[Setting]]


def choose_environment(system: SystemFacts) -> Environment:
    """UCX's settings for an engine in this system.

    Raises ConfigurationError when the user's own list of transports cannot work at all, and when a process would get
    more at once over sockets than it has room for.
    """
    user = system.user
    check_transport_set(user.get(TRANSPORTS, ""))
    if has_tcp(_transport_list(system)):
        check_segments(user)
    recommended = [each for rule in RULES for each in rule(system)]
    named = {each.name for each in recommended}
    others = sorted(name for name in user if name.startswith("UCX_") and name not in named)
    settings = [
        *(_unless_set(each, user) for each in recommended),
        *(Setting(name, user[name], Origin.USER, "set by you; kvferry never sets it") for name in others),
    ]
    return Environment(tuple(settings), check_system(system))


def _recommended(name: str, value: str, reason: str) -> Setting:
    return Setting(name, value, Origin.CHOSEN if value else Origin.DEFAULT, reason)


def _unless_set(each: Setting, user: Mapping[str, str]) -> Setting:
    """The recommended setting, or the user's own with what was recommended as its reason."""
    if each.name not in user:
        return each
    value = user[each.name]
    would = f"have chosen {each.value}" if each.value else "have left it to UCX"
    would = "have chosen the same" if value == each.value else would
    return Setting(each.name, value, Origin.USER, f"set by you; kvferry would {would}: {each.reason}")


def _transports(system: SystemFacts) -> Iterator[Setting]:
    device = system.device if system.is_direct else HOST
    if device == "xpu":
        yield _xpu(system)
    else:
        yield _recommended(TRANSPORTS, "", LEFT_TO_UCX.get(device, LEFT_TO_UCX[HOST]))


def _xpu(system: SystemFacts) -> Setting:
    build = system.build
    if build.is_known and "ze_copy" not in build.transports:
        return _recommended(TRANSPORTS, "", "no set reaches XPU memory: this UCX was built without Level Zero")
    has_ipc = not build.is_known or "ze_ipc" in build.transports
    ipc = ("ze_ipc",) if system.may_be_local and has_ipc else ()
    if _can_use_rdma(system):
        names = ("ib", "rc", "ze_copy", *ipc)
        reason = "XPU memory and an RDMA port that is up: the card reads device memory; rc carries the messages"
    else:
        names = (*ipc, "ze_copy", "tcp")
        reason = "XPU memory without RDMA: tcp carries the messages, which no ze transport can"
        reason += "; ze_ipc maps the peer's memory" if ipc else "; without ze_ipc the bytes go through host memory"
    return _recommended(TRANSPORTS, ",".join(names), reason)


def _can_use_rdma(system: SystemFacts) -> bool:
    build = system.build
    return bool(system.rdma) and (not build.is_known or not build.transports.isdisjoint(RC))


def _cards(system: SystemFacts) -> Iterator[Setting]:
    """Cards are chosen for device memory only: host memory is as near to one card as to another."""
    near = system.accelerator.nearest(system.rdma) if system.is_direct else ()
    wanted, reasons = [nic.name for nic in near], []
    if near and len(near) < len(system.rdma):
        kinds = "/".join(sorted({str(nic.kind) for nic in near} - {NicKind.ETHERNET}))
        several = f"of {len(system.rdma)} RDMA ports that are up these ({kinds})"
        reasons.append(f"{several} are nearest to {system.accelerator.name}")
    if system.place is Place.SAME_HOST and has_tcp(_transport_list(system)):
        wanted.append(LOOPBACK)
        reasons.append(
            f"all peers are on this host, so UCX's sockets listen on {LOOPBACK}, which no other host can reach"
        )
    if reasons:
        yield _recommended(CARDS, ",".join(wanted), "; ".join(reasons))


def _transport_list(system: SystemFacts) -> str:
    """The list of transports that UCX will have: the user's, or the recommended one."""
    return system.user.get(TRANSPORTS) or next(_transports(system)).value


def _memory_types(system: SystemFacts) -> Iterator[Setting]:
    if system.device == "xpu" and system.is_direct:
        yield _recommended("UCX_MEMTYPE_CACHE", "n", "otherwise UCX may mistake XPU memory for host memory")


def _reads_over_cuda_ipc(system: SystemFacts) -> Iterator[Setting]:
    if system.device == "cuda" and system.is_direct and system.may_be_local:
        reason = "without NVLink UCX reads over tcp instead of cuda_ipc, up to a hundred times slower than it writes"
        yield _recommended("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on", reason)


def _segments_over_tcp(system: SystemFacts) -> Iterator[Setting]:
    """UCX's file of settings may say less, so both are said: what a process receives, and what it sends."""
    if has_tcp(_transport_list(system)):
        reason = "peers send as much over UCX's sockets, and UCX does not check whether there is room for it"
        yield _recommended(RECEIVED, SEGMENT, reason)
        reason = "otherwise a read over UCX's sockets is answered in pieces of 8 KiB, which is slower"
        yield _recommended(SENT, SEGMENT, reason)


def _registrations(system: SystemFacts) -> Iterator[Setting]:
    reason = "otherwise UCX keeps memory that engines have freed"
    yield _recommended("UCX_RCACHE_MAX_UNRELEASED", MOST_UNRELEASED, reason)


def _log_file(system: SystemFacts) -> Iterator[Setting]:
    yield _recommended("UCX_LOG_FILE", "stderr", "otherwise UCX writes its warnings to standard output")


RULES: Final[tuple[_Rule, ...]] = (
    *(_transports, _cards, _memory_types, _reads_over_cuda_ipc, _segments_over_tcp, _registrations, _log_file),
)
