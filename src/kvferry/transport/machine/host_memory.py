"""How much memory there is: of this host, or of the container that this process is in, as the kernel says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvferry.transport.machine.hardware import ROOT, content


@dataclass(frozen=True, slots=True)
class HostMemory:
    """In bytes. Both are 0 where the system does not say. `available` is what can be taken without swapping."""

    total: int = 0
    available: int = 0


def host_memory(root: Path = ROOT) -> HostMemory:
    """`root` is for tests."""
    sizes = {name: number << 10 for name, number in _numbers(root / "proc/meminfo")}
    total, available = sizes.get("MemTotal:", 0), sizes.get("MemAvailable:", 0)
    group = root / "sys/fs/cgroup"
    limit, used = (content(group / name) for name in ("memory.max", "memory.current"))
    if not (limit.isdecimal() and used.isdecimal() and 0 < int(limit) < total):
        return HostMemory(total, available)
    # Files that were read count as used until somebody needs the memory; shared memory counts as a file and stays.
    held = dict(_numbers(group / "memory.stat"))
    files = max(0, held.get("file", 0) - held.get("shmem", 0))
    return HostMemory(int(limit), min(available, max(0, int(limit) - int(used) + files)))


def _numbers(path: Path) -> list[tuple[str, int]]:
    """The lines of a kernel's file that begin with a name and a number."""
    lines = [line.split() for line in content(path).splitlines()]
    return [(words[0], int(words[1])) for words in lines if len(words) > 1 and words[1].isdecimal()]
