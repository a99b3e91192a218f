"""What this process may do: its limits, its capabilities, its namespaces, and the container around it."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

from kvferry.transport.machine.facts import UNLIMITED, ProcessLimits
from kvferry.transport.machine.hardware import ROOT, content

CAP_IPC_LOCK: Final = 1 << 14
CAP_SYS_PTRACE: Final = 1 << 19
MARKS: Final = {".dockerenv": "docker", "run/.containerenv": "podman"}
SERVICE: Final = "var/run/secrets/kubernetes.io"


def process_limits(root: Path = ROOT) -> ProcessLimits:
    """This process's. `root` is for tests."""
    capabilities = _capabilities(root)
    scope = content(root / "proc/sys/kernel/yama/ptrace_scope")
    return ProcessLimits(
        container=_container(root),
        ptrace_scope=int(scope) if scope.isdecimal() else 0,
        may_trace=bool(capabilities & CAP_SYS_PTRACE),
        locked_bytes=UNLIMITED if capabilities & CAP_IPC_LOCK else _locked_bytes(),
        shm_bytes=_size_bytes(root / "dev/shm"),
        pid_namespace=_namespace(root, "pid"),
        ipc_namespace=_namespace(root, "ipc"),
    )


def _capabilities(root: Path) -> int:
    for line in content(root / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return int(value.strip(), 16)
    return 0


def _locked_bytes() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _size_bytes(folder: Path) -> int:
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_frsize * status.f_blocks


def _namespace(root: Path, name: str) -> str:
    try:
        return os.readlink(root / "proc/self/ns" / name).partition("[")[2].rstrip("]")
    except OSError:
        return ""


def _container(root: Path) -> str:
    if (root / SERVICE).exists():
        return "kubernetes"
    return next((name for mark, name in MARKS.items() if (root / mark).exists()), "")
