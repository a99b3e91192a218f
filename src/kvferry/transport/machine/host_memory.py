"""How much memory there is: of this host, or of the control groups that this process is in, as the kernel says it.

A container, a service of systemd and a job of Slurm are control groups. A group's limit holds for all groups in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from kvferry.transport.machine.hardware import ROOT, content


@dataclass(frozen=True, slots=True)
class HostMemory:
    """In bytes. Both are 0 where the system does not say. `available` is what can be taken without swapping."""

    total: int = 0
    available: int = 0


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """A tree of control groups that may limit memory. `controller` is its name in /proc/self/cgroup. The others are the
    names of its files, and of two sizes in a group's memory.stat: files in memory, and what of them is shared memory.
    """

    mount: str
    controller: str
    limit: str
    used: str
    files: str
    shared: str


_VERSION_1: Final = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
_VERSION_2: Final = ("", "memory.max", "memory.current", "file", "shmem")
# Beside version 1, version 2 is in a folder of its own; a host limits memory in one of both.
_HIERARCHIES: Final = (
    _Hierarchy("sys/fs/cgroup", *_VERSION_2),
    _Hierarchy("sys/fs/cgroup/unified", *_VERSION_2),
    _Hierarchy("sys/fs/cgroup/memory", *_VERSION_1),
)


def host_memory(root: Path = ROOT) -> HostMemory:
    """`root` is for tests."""
    sizes = {name: number << 10 for name, number in _numbers(root / "proc/meminfo")}
    host = HostMemory(sizes.get("MemTotal:", 0), sizes.get("MemAvailable:", 0))
    # Where there is no limit, version 1 says a huge number.
    bounds = [host, *(bound for bound in _bounds(root) if 0 < bound.total < host.total)]
    return HostMemory(min(bound.total for bound in bounds), min(bound.available for bound in bounds))


def _bounds(root: Path) -> Iterator[HostMemory]:
    """What each group of this process may hold, and what of that is left."""
    for hierarchy in _HIERARCHIES:
        for group in _groups(root / hierarchy.mount, _path_in(root, hierarchy.controller)):
            limit, used = content(group / hierarchy.limit), content(group / hierarchy.used)
            if limit.isdecimal() and used.isdecimal():
                yield _bound(int(limit), int(used), dict(_numbers(group / "memory.stat")), hierarchy)


def _bound(limit: int, used: int, held: dict[str, int], hierarchy: _Hierarchy) -> HostMemory:
    # Version 1 knows here the limits of groups that a container cannot see.
    limit = min(limit, held.get("hierarchical_memory_limit", limit))
    # Files that were read, and what the kernel knows of files, count as used until somebody needs the memory. Shared
    # memory counts as a file and stays. Old kernels do not tell it from files.
    files = held.get(hierarchy.files, 0) - held.get(hierarchy.shared, held.get(hierarchy.files, 0))
    kept = max(0, used - max(0, files) - held.get("slab_reclaimable", 0))
    return HostMemory(limit, max(0, limit - kept))


def _path_in(root: Path, controller: str) -> str:
    """This process's group in the hierarchy of a controller; the uppermost one where the system does not say."""
    for line in content(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controller in controllers.split(","):
            return path
    return "/"


def _groups(mount: Path, path: str) -> list[Path]:
    """A group, and all that it is in. A container may see its own group as the uppermost one, and nothing at the path
    that its host has for it."""
    names = PurePosixPath(path).parts[1:]
    if ".." in names or not os.path.isdir(mount.joinpath(*names)):
        names = ()
    return [mount.joinpath(*names[:number]) for number in range(len(names) + 1)]


def _numbers(path: Path) -> list[tuple[str, int]]:
    """The lines of a kernel's file that begin with a name and a number."""
    lines = [line.split() for line in content(path).splitlines()]
    return [(words[0], int(words[1])) for words in lines if len(words) > 1 and words[1].isdecimal()]
