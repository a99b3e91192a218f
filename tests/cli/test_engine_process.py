"""How long the server of another engine may take to be ready."""

import asyncio
from types import SimpleNamespace

import pytest

from kvferry.cli.serve import engine_process
from kvferry.cli.serve.engine_process import EngineProcess, _ready
from kvferry.errors import ConfigurationError

ENGINE = EngineProcess("vLLM", [], {}, "http://127.0.0.1:1", "/health", "")


@pytest.mark.parametrize("is_child", [True, False])
def test_a_child_leaves_it_to_its_parent_how_long_an_engine_may_take(monkeypatch, is_child):
    """A parent that knows of a download waits longer than we would."""
    answers = iter([False, False, True])
    monkeypatch.setattr(engine_process, "READY_S", -1.0)
    monkeypatch.setattr(engine_process, "POLL_S", 0.0)
    monkeypatch.setattr(engine_process, "_is_healthy", lambda url: next(answers))

    async def main():
        ending = asyncio.create_task(asyncio.Event().wait())
        try:
            await _ready(ENGINE, SimpleNamespace(returncode=None), ending, is_child=is_child)
        finally:
            ending.cancel()

    if is_child:
        asyncio.run(main())
        assert list(answers) == []
    else:
        with pytest.raises(ConfigurationError, match="did not become ready in time"):
            asyncio.run(main())
