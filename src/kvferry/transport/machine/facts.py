"""Facts about a machine and a process, on which settings depend, as records: tests can describe any machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile

UNLIMITED = -1
UNKNOWN_NODE = -1
LOOPBACK = "lo"
"""The network interface that only this host reaches, as Linux calls it."""


class Place(StrEnum):
    """Where peers are, as far as that is known before the first connection."""

    SAME_HOST = "same host"
    OTHER_HOST = "other host"
    UNKNOWN = "unknown"


class NicKind(StrEnum):
    """`infiniband` and `roce` copy without the processor; `ethernet` is a plain network interface."""

    INFINIBAND = "infiniband"
    ROCE = "roce"
    ETHERNET = "ethernet"


@dataclass(frozen=True, slots=True)
class Nic:
    """One port of a network card. `name` is what UCX calls it: `mlx5_0:1`, or `eth0`.

    `bus` is the path to the card from the root of its bus, one PCI address per bridge; empty for what is virtual.
    `numa_node` is -1 where the system does not say.
    """

    name: str
    kind: NicKind
    is_up: bool
    state: str
    numa_node: int = UNKNOWN_NODE
    bus: tuple[str, ...] = ()
    gigabits_per_s: float = 0.0

    @property
    def is_rdma(self) -> bool:
        """Whether it copies without the processor."""
        return self.kind is not NicKind.ETHERNET


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device that computes: `kind` as in `device`, and its place on the bus, as in `Nic`."""

    name: str
    kind: str
    numa_node: int = UNKNOWN_NODE
    bus: tuple[str, ...] = ()

    def nearest(self, nics: Sequence[Nic]) -> tuple[Nic, ...]:
        """The ports that share the most PCI bridges with this device, else its NUMA node; all where nothing tells."""
        closeness = [self._closeness(nic) for nic in nics]
        return tuple(nic for nic, close in zip(nics, closeness, strict=True) if close == max(closeness))

    def _closeness(self, nic: Nic) -> tuple[int, bool]:
        """The number of common bridges from the root of the bus on, then whether both belong to one NUMA node."""
        num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.bus, nic.bus, strict=False)))
        return num_shared, UNKNOWN_NODE != self.numa_node == nic.numa_node


@dataclass(frozen=True, slots=True)
class UcxBuild:
    """One copy of UCX. `transports` are those that its modules hold; `directory` is where its libraries lie.

    `owner` is the package that brought it. No copy at all has an empty directory.
    """

    owner: str = ""
    directory: str = ""
    transports: frozenset[str] = frozenset()

    @property
    def is_known(self) -> bool:
        """Whether its modules could be looked at."""
        return bool(self.directory)


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits, rights and namespaces of this process.

    `container` names the kind of container, empty outside one. `ptrace_scope` is the value of
    `kernel.yama.ptrace_scope`, 0 where there is none; `may_trace` says whether the process may trace any other.
    `locked_bytes` is how much memory it may lock, `shm_bytes` the size of /dev/shm. The namespaces are the kernel's
    numbers, as text.
    """

    container: str = ""
    ptrace_scope: int = 0
    may_trace: bool = False
    locked_bytes: int = UNLIMITED
    shm_bytes: int = 0
    pid_namespace: str = ""
    ipc_namespace: str = ""

    @property
    def may_attach(self) -> bool:
        """Whether the kernel lets this process read the memory of others of the same user."""
        return self.may_trace or self.ptrace_scope == 0


@dataclass(frozen=True, slots=True)
class SystemFacts:
    """All facts about the machine and this process.

    `device` is where the engine computes and `buffer_device` what its registered memory belongs to: `cpu`, or the
    device itself. `user` has the variables that were set before kvferry set any.
    """

    device: str
    buffer_device: str
    place: Place = Place.UNKNOWN
    nics: tuple[Nic, ...] = ()
    accelerator: Accelerator = field(default_factory=lambda: Accelerator("", ""))
    build: UcxBuild = field(default_factory=UcxBuild)
    limits: ProcessLimits = field(default_factory=ProcessLimits)
    user: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_direct(self) -> bool:
        """Whether the registered memory is the device's own."""
        return self.buffer_device != "cpu"

    @property
    def rdma(self) -> tuple[Nic, ...]:
        """Ports that are up and copy without the processor."""
        return tuple(nic for nic in self.nics if nic.is_rdma and nic.is_up)

    @property
    def may_be_local(self) -> bool:
        """Whether a peer may be on this host."""
        return self.place is not Place.OTHER_HOST

    @property
    def may_be_remote(self) -> bool:
        """Whether a peer may be on another host."""
        return self.place is not Place.SAME_HOST
