"""The stand-in beside real servers: a process that is started, awaited, and always ended."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from engine_server import EnginePair, EngineServer
from import_path import import_path

from llm_d.proxy import PREFILL_HEADER

TESTS = Path(__file__).parents[1]
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class RunningSidecar(EngineServer):
    """In front of the decode server of `pair`; clients that send `headers` name the prefill server."""

    def __init__(
        self, pair: EnginePair, log: Path, connector: str, variables: Mapping[str, str] = NO_VARIABLES
    ) -> None:
        super().__init__("sidecar", log)
        prefill, self._decode = pair.servers
        self._connector, self._variables = connector, variables
        self.headers = {PREFILL_HEADER: f"127.0.0.1:{prefill.port}"}

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": import_path(TESTS), **self._variables}

    def command(self) -> list[str]:
        place = ("--port", str(self.port), "--decoder", self._decode.url)
        return [sys.executable, "-m", "llm_d", *place, "--kv-connector", self._connector]
