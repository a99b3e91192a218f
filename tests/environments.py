"""Clean environments with the wheel and what a set of extras brings, without the package index.

Of each library that the wheel asks for, the files that are installed beside the tests are linked into the environment:
it has that library as it is, and no other.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

# The name of a build depends on the device: whichever is here stands for it.
OPTIONAL = {"triton", "nixl-cu13"}


def wheel_of(tree: Path, folder: Path) -> Path:
    """The wheel of a tree of sources, built in `folder`."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*pip, str(folder), str(tree)], check=True, timeout=240)
    (found,) = folder.glob("*.whl")
    return found


class Environment:
    """A virtual environment; `run` runs its `kvferry`."""

    def __init__(self, folder: Path, wheel: Path, extras: str) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.python = folder / "bin" / "python"
        self.kvferry = folder / "bin" / "kvferry"
        (self._site,) = (folder / "lib").glob("python*/site-packages")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.python),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
        ]
        subprocess.run([*pip, str(wheel)], check=True, timeout=120)
        self._linked: set[str] = set()
        (info,) = self._site.glob("kvferry-*.dist-info")
        self._need(Distribution.at(info), set(extras.split(",")))

    def run(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """On a screen of 80 columns, with nothing of ours in its environment."""
        environment = {"PATH": "/usr/bin:/bin", "COLUMNS": "80", "HOME": str(self._site), "LANG": "C.UTF-8"} | settings
        command = [str(self.kvferry), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)

    def _need(self, package: Distribution, extras: set[str]) -> None:
        for text in package.requires or ():
            wanted = Requirement(text)
            marker = wanted.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
                self._link(wanted, package, extras)

    def _link(self, wanted: Requirement, package: Distribution, extras: set[str]) -> None:
        if wanted.name == "kvferry":
            if not wanted.extras <= extras:
                self._need(package, set(wanted.extras))
            return
        try:
            found = distribution(wanted.name)
        except PackageNotFoundError:
            if wanted.name not in OPTIONAL:
                raise
            return
        key = f"{wanted.name}[{','.join(sorted(wanted.extras))}]"
        if key in self._linked:
            return
        self._linked.add(key)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            target = self._site / top
            if not target.exists():
                target.symlink_to(Path(str(found.locate_file(top))))
        self._need(found, set(wanted.extras))
