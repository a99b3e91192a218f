"""Which UCX settings suit a machine: one pure function from its facts to settings, their reasons, and warnings.

UCX reads its settings when its libraries are loaded. A set that does not suit the machine rarely fails: it moves the
bytes over something slower, or ends in an error without a reason. What the user has set always stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvferry.transport.machine.affinity import nearest
from kvferry.transport.machine.checks import doubts
from kvferry.transport.machine.facts import LOOPBACK, NicKind, Place, Situation
from kvferry.transport.machine.finding import Finding
from kvferry.transport.machine.ucx_transports import RC, check_transport_set, has_tcp

TRANSPORTS, CARDS = "UCX_TLS", "UCX_NET_DEVICES"
# A kibibyte, as text for UCX: what engines that free and allocate large memory are known to need.
MOST_UNRELEASED: Final = "1024"


class Origin(StrEnum):
    """Where a value comes from: the user's environment, our choice, or the library's own default."""

    USER = "environment"
    CHOSEN = "chosen"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable; `value` is empty for the library's default. `reason` says why; for a user's value, what else it
    would have been."""

    name: str
    value: str
    origin: Origin
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}" if self.value else f"{self.name} left to UCX"


@dataclass(frozen=True, slots=True)
class Environment:
    """All settings that matter, and what may go wrong with them."""

    settings: tuple[Setting, ...]
    warnings: tuple[Finding, ...]

    @property
    def chosen(self) -> dict[str, str]:
        """What is to be set before UCX is loaded."""
        return {each.name: each.value for each in self.settings if each.origin is Origin.CHOSEN}


@dataclass(frozen=True, slots=True)
class _Wish:
    """The right value of a variable, as long as the user has none; empty is the library's default."""

    name: str
    value: str
    reason: str


_Rule = Callable[[Situation], Iterator[_Wish]]


def choose_environment(situation: Situation) -> Environment:
    """UCX's settings for an engine in this situation.

    Raises ConfigurationError when the user's own list of transports cannot work at all.
    """
    user = situation.user
    check_transport_set(user.get(TRANSPORTS, ""))
    wishes = [wish for rule in RULES for wish in rule(situation)]
    named = {wish.name for wish in wishes}
    others = sorted(name for name in user if name.startswith("UCX_") and name not in named)
    settings = [
        *(_setting(wish, user) for wish in wishes),
        *(Setting(name, user[name], Origin.USER, "set by you; kvferry never sets it") for name in others),
    ]
    return Environment(tuple(settings), doubts(situation))


def _setting(wish: _Wish, user: Mapping[str, str]) -> Setting:
    if wish.name not in user:
        return Setting(wish.name, wish.value, Origin.CHOSEN if wish.value else Origin.DEFAULT, wish.reason)
    mine = user[wish.name]
    if mine == wish.value:
        return Setting(wish.name, mine, Origin.USER, f"set by you; kvferry would have chosen the same: {wish.reason}")
    would = f"have chosen {wish.value}" if wish.value else "have left it to UCX"
    return Setting(wish.name, mine, Origin.USER, f"set by you; kvferry would {would}: {wish.reason}")


def _transports(situation: Situation) -> Iterator[_Wish]:
    choices: dict[str, Callable[[Situation], _Wish]] = {"cuda": _cuda, "rocm": _rocm, "xpu": _xpu}
    choose = choices.get(situation.device, _host) if situation.is_direct else _host
    yield choose(situation)


def _host(situation: Situation) -> _Wish:
    reason = "host memory: UCX takes cma between processes of one host, and RDMA or tcp between hosts"
    return _Wish(TRANSPORTS, "", reason)


def _cuda(situation: Situation) -> _Wish:
    reason = (
        "CUDA memory: UCX takes cuda_ipc on one host and RDMA between hosts by itself; cuda_ipc only in threads with a "
        "CUDA context, and between hosts only with UCX_CUDA_IPC_ENABLE_MNNVL=y and memory from CUDA's VMM allocator"
    )
    return _Wish(TRANSPORTS, "", reason)


def _rocm(situation: Situation) -> _Wish:
    reason = "ROCm memory: UCX takes rocm_ipc on one host and RDMA between hosts by itself"
    return _Wish(TRANSPORTS, "", reason)


def _xpu(situation: Situation) -> _Wish:
    build = situation.build
    if build.is_known and "ze_copy" not in build.transports:
        return _Wish(TRANSPORTS, "", "no set reaches XPU memory: this UCX was built without Level Zero")
    has_ipc = not build.is_known or "ze_ipc" in build.transports
    ipc = ("ze_ipc",) if situation.may_be_here and has_ipc else ()
    if _can_use_rdma(situation):
        names = ("ib", "rc", "ze_copy", *ipc)
        reason = "XPU memory and an RDMA port that is up: the card reads device memory; rc carries the messages"
    else:
        names = (*ipc, "ze_copy", "tcp")
        reason = "XPU memory without RDMA: tcp carries the messages, which no ze transport can"
        reason += "; ze_ipc maps the peer's memory" if ipc else "; without ze_ipc the bytes go through host memory"
    return _Wish(TRANSPORTS, ",".join(names), reason)


def _can_use_rdma(situation: Situation) -> bool:
    build = situation.build
    return bool(situation.rdma) and (not build.is_known or not build.transports.isdisjoint(RC))


def _cards(situation: Situation) -> Iterator[_Wish]:
    """Cards only where device memory is registered: host memory is as near to one card as to another."""
    near = nearest(situation.accelerator, situation.rdma) if situation.is_direct else ()
    wanted, reasons = [nic.name for nic in near], []
    if near and len(near) < len(situation.rdma):
        kinds = "/".join(sorted({str(nic.kind) for nic in near} - {NicKind.ETHERNET}))
        several = f"of {len(situation.rdma)} RDMA ports that are up these ({kinds})"
        reasons.append(f"{several} are nearest to {situation.accelerator.name}")
    if situation.place is Place.SAME_HOST and has_tcp(_transport_list(situation)):
        wanted.append(LOOPBACK)
        reasons.append(
            f"all peers are on this host, so UCX's sockets listen on {LOOPBACK}, which no other host can reach"
        )
    if reasons:
        yield _Wish(CARDS, ",".join(wanted), "; ".join(reasons))


def _transport_list(situation: Situation) -> str:
    """The list of transports that UCX will have: the user's, or ours."""
    return situation.user.get(TRANSPORTS) or next(_transports(situation)).value


def _memory_types(situation: Situation) -> Iterator[_Wish]:
    if situation.device == "xpu" and situation.is_direct:
        yield _Wish("UCX_MEMTYPE_CACHE", "n", "otherwise UCX may mistake XPU memory for host memory")


def _reads_over_cuda_ipc(situation: Situation) -> Iterator[_Wish]:
    if situation.device == "cuda" and situation.is_direct and situation.may_be_here:
        reason = "without NVLink UCX reads over tcp instead of cuda_ipc, up to a hundred times slower than it writes"
        yield _Wish("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on", reason)


def _registrations(situation: Situation) -> Iterator[_Wish]:
    reason = "otherwise UCX keeps memory that engines have freed"
    yield _Wish("UCX_RCACHE_MAX_UNRELEASED", MOST_UNRELEASED, reason)


def _words(situation: Situation) -> Iterator[_Wish]:
    yield _Wish("UCX_LOG_FILE", "stderr", "otherwise UCX writes its warnings to standard output")


RULES: Final[tuple[_Rule, ...]] = (_transports, _cards, _memory_types, _reads_over_cuda_ipc, _registrations, _words)
