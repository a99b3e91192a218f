"""The copies of UCX on this machine: those of NIXL packages, those of the system, and the one that is loaded.

The transports of a build are in its modules: files next to the library, one per family of transports. A module of Level
Zero may hold only one of its two transports, so the names are searched inside the file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvferry.transport.machine.facts import UcxBuild
from kvferry.transport.machine.hardware import ROOT

MAPS: Final = ROOT / "proc/self/maps"
BUILT_IN: Final = frozenset({"self", "tcp", "posix", "sysv"})
MODULES: Final = {
    "cma": ("cma",),
    "cuda": ("cuda_copy", "cuda_ipc"),
    "cuda_gdrcopy": ("gdr_copy",),
    "ib": ("rc_verbs", "ud_verbs"),
    "ib_mlx5": ("rc_mlx5", "ud_mlx5", "dc_mlx5"),
    "ib_efa": ("srd",),
    "rocm": ("rocm_copy", "rocm_ipc"),
    "ze": ("ze_copy", "ze_ipc"),
}
SYSTEM: Final = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib",
    "opt/ucx/lib",
)


def installed_builds(path: Sequence[str] = (), root: Path = ROOT) -> tuple[UcxBuild, ...]:
    """Every copy that could be loaded: NIXL packages' on Python's path, then the system's. `root` is for tests."""
    folders = [Path(entry) for entry in path or sys.path]
    found = [libraries for folder in folders for libraries in sorted(folder.glob("nixl*.libs"))]
    found += [root / folder for folder in SYSTEM]
    builds = {folder.resolve(): build_at(folder) for folder in found if _has_ucx(folder)}
    return tuple(builds.values())


def build_at(folder: Path) -> UcxBuild:
    """The copy whose libraries lie in this folder."""
    owner = folder.name.removesuffix(".libs") if folder.name.endswith(".libs") else "the system"
    transports = (name for module, known in MODULES.items() for name in _transports_in(folder / "ucx", module, known))
    return UcxBuild(owner, str(folder), BUILT_IN.union(transports))


def build_to_load(builds: Sequence[UcxBuild], packages: Sequence[str]) -> UcxBuild:
    """The copy that the first of these NIXL packages brings, or else the system's; an unknown one if there is none."""
    owners = [*packages, "the system"]
    wanted = [build for owner in owners for build in builds if build.owner == owner]
    return wanted[0] if wanted else UcxBuild()


def loaded_directories(maps: Path = MAPS) -> tuple[Path, ...]:
    """Where the copies lie that this process has loaded, each once."""
    return tuple(dict.fromkeys(file.parent for file in loaded_files("libucp", maps)))


def loaded_files(library: str, maps: Path = MAPS) -> tuple[Path, ...]:
    """The files of a library, such as `libucp`, that this process has loaded, each once."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    words = (line.split(maxsplit=5) for line in lines)
    files = (Path(parts[5]) for parts in words if len(parts) == 6)
    return tuple(dict.fromkeys(file for file in files if file.name.startswith((f"{library}.", f"{library}-"))))


def _has_ucx(folder: Path) -> bool:
    return any(folder.glob("libucp[.-]*so*")) if folder.is_dir() else False


def _transports_in(folder: Path, module: str, names: tuple[str, ...]) -> list[str]:
    """The transports inside a module, wherever the module is there."""
    for file in sorted(folder.glob(f"libuct_{module}.so*")):
        try:
            content = file.read_bytes()
        except OSError:
            continue
        return [name for name in names if name.encode() in content]
    return []
