"""How long the server of another engine may take to be ready."""

import asyncio
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvferry.cli.serve import engine_process
from kvferry.cli.serve.command import ServeOptions
from kvferry.cli.serve.engine_process import EngineProcess, _ready, serve_engine
from kvferry.errors import ConfigurationError

ENGINE = EngineProcess("vLLM", [], {}, "http://127.0.0.1:1", "/health", "")
PAUSED = replace(ENGINE, command=[sys.executable, "-c", "import signal; signal.pause()"])


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


@pytest.mark.parametrize("is_child", [True, False])
def test_an_engine_of_a_parent_is_waited_for_as_a_child(monkeypatch, is_child):
    waited = []

    async def ready(engine, process, ending, *, is_child):
        waited.append(is_child)
        # What is waited for meanwhile has begun.
        await asyncio.wait({ending}, timeout=0.01)
        raise ConfigurationError("not ready")

    monkeypatch.setattr(engine_process, "_ready", ready)
    monkeypatch.setattr(engine_process.http, "stdin_closed", asyncio.Event().wait)
    with pytest.raises(ConfigurationError, match="not ready"):
        serve_engine(ServeOptions(as_child=is_child), PAUSED)
    assert waited == [is_child]


def test_an_engine_that_is_told_to_end_before_it_is_ready_is_not_announced(monkeypatch):
    async def parent_is_gone():
        """At once."""

    async def ready(engine, process, ending, *, is_child):
        await ending

    monkeypatch.setattr(engine_process, "_ready", ready)
    monkeypatch.setattr(engine_process.http, "stdin_closed", parent_is_gone)
    monkeypatch.setattr(engine_process.console, "announce", lambda *_, **__: pytest.fail("announced"))
    assert serve_engine(ServeOptions(as_child=True), PAUSED) == 0
