"""Packages that SGLang imports and, on a CPU, never calls: every name is there, and raises when it is used.

The package index has builds of them for CUDA only.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types


class _Name(type):
    """A class of which nothing is known but its name; what is looked up in it is a text that says so."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__module__}.{cls.__name__}.{name}"

    def __call__(cls, *_: object, **__: object) -> None:
        raise RuntimeError(f"{cls.__module__}.{cls.__name__} is a name only: it is called after all")


class _Names(types.ModuleType):
    """A module in which every name is a class that cannot be made."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {"__module__": self.__name__})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module below a package."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name, path, target=None):
        inside = name.startswith(f"{self._package}.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec):
        return _Names(spec.name)

    def exec_module(self, module):
        """Names need no code."""


def stand_in(package: str) -> None:
    """Have every name of a package, and of whatever lies below it."""
    sys.meta_path.append(_Finder(package))
    sys.modules[package].__class__ = _Names
