"""The source of a vLLM that need not be installed, nor fit this machine: a folder or a wheel, read and never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """`place` is a wheel, or the folder that the package `vllm` is in."""

    place: Path

    def __str__(self) -> str:
        return self.place.stem if self.place.suffix == ".whl" else self.place.name

    def module(self, name: str) -> ast.Module | None:
        """A module by its dotted name; None where there is no such file."""
        path = name.replace(".", "/")
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            if (text := self._text(candidate)) is not None:
                return ast.parse(text)
        return None

    def class_of(self, module: str, name: str) -> ast.ClassDef | None:
        """A class that a module defines."""
        tree = self.module(module)
        found = [node for node in tree.body if isinstance(node, ast.ClassDef)] if tree is not None else []
        return next((node for node in found if node.name == name), None)

    def has(self, module: str, name: str) -> bool:
        """Whether `from module import name` would find something."""
        tree = self.module(module)
        if tree is None:
            return False
        return name in set(_names(tree)) or self.module(f"{module}.{name}") is not None

    def members(self, module: str, name: str) -> set[str]:
        """What a class has, and those of its bases that are in the same module: methods, fields, and what its methods
        set in `self`."""
        node = self.class_of(module, name)
        if node is None:
            return set()
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        return set(_members(node)).union(*(self.members(module, base) for base in bases))

    def _text(self, path: str) -> str | None:
        if self.place.suffix == ".whl":
            with ZipFile(self.place) as wheel:
                return wheel.read(path).decode() if path in wheel.namelist() else None
        file = self.place / path
        return file.read_text(encoding="utf-8") if file.is_file() else None


def methods(node: ast.ClassDef | None) -> dict[str, Function]:
    """The methods of a class by their names."""
    found = node.body if node is not None else []
    return {one.name: one for one in found if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}


def parameters(function: Function) -> list[str]:
    """The names of a function's parameters, but for the first one of a method."""
    return [one.arg for one in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]][1:]


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What is imported from vLLM whatever happens: module and name, which is empty for the module itself. What is tried
    need not be there."""
    for node in _without_tries(tree):
        if isinstance(node, ast.Import):
            yield from ((one.name, "") for one in node.names if _is_vllm(one.name))
        elif isinstance(node, ast.ImportFrom) and _is_vllm(node.module or ""):
            yield from ((node.module or "", one.name) for one in node.names)


def _without_tries(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.Try):
            yield node
            yield from _without_tries(node)


def _is_vllm(module: str) -> bool:
    return module.partition(".")[0] == "vllm"


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((one.asname or one.name) for one in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _members(node: ast.ClassDef) -> Iterator[str]:
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            yield one.target.id
        elif isinstance(one, ast.Assign):
            yield from (target.id for target in one.targets if isinstance(target, ast.Name))
    for function in methods(node).values():
        yield function.name
        for one in ast.walk(function):
            if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
                yield one.attr
