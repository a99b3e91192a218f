"""`python tests/docs_structure.py` writes docs/design/structure.md: the packages and what their docstrings say."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/kvferry"
PAGE = ROOT / "docs/design/structure.md"
TABLE = "| package | what it is for |\n|---|---|\n"


def page() -> str:
    """The page as it should be: what people have written, and the table of packages at its end."""
    written = PAGE.read_text().partition(TABLE)[0]
    return written + TABLE + "".join(f"| `{name}` | {_purpose(SOURCE / name)} |\n" for name in _packages())


def _packages() -> list[str]:
    found = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*/__init__.py")} - {"."}
    order = _layers()
    rank = {name: number for number, name in enumerate(order)}
    return sorted(found, key=lambda name: (rank.get(name.split("/")[0], len(order)), name))


def _layers() -> list[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract for contract in contracts if contract["type"] == "layers")["layers"]
    return re.findall(r"\w+", " ".join(layers))


def _purpose(package: Path) -> str:
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    first, _, rest = text.partition("\n\n")
    interface = rest.partition("\n\n")[0] if rest.startswith("Enters:") else ""
    return " ".join(f"{first} {interface}".split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
