"""Loaded by Python at start when this folder is on PYTHONPATH: takes two habits from vLLM's stock NIXL connector.

On few cores they hide what a transfer costs: NIXL's progress thread polls without a pause, and the connector binds the
thread that computes to one core. Everything else stays as shipped.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

PAUSE_US = 100
API = "nixl_cu13._api"


class _Loader(importlib.abc.Loader):
    """Runs the module as it is, then gives its agents a progress thread that pauses."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        bindings = module.nixlBind
        make = bindings.nixlAgent

        def patient(name: str, config: Any) -> Any:
            config.pthrDelay = PAUSE_US
            return make(name, config)

        bindings.nixlAgent = patient


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != API:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
os.sched_setaffinity = lambda *_: None
