"""The lowest version of every library that pyproject.toml allows, for pip. Less what others choose: torch, of which a
machine has its own build, and what has an environment or a target of its own."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = ("agent", "native", "nixl", "router", "otel", "engine", "simulate")
LEFT_OUT = {"torch"}

project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
wanted = [*project["dependencies"], *(each for extra in EXTRAS for each in project["optional-dependencies"][extra])]
found = dict(re.match(r"([\w-]+)(?:>=([\d.]+))?", each).groups() for each in wanted)
sys.stdout.writelines(f"{name}=={lowest}\n" for name, lowest in found.items() if lowest and name not in LEFT_OUT)
