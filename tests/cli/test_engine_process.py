"""How long the server of another engine may take to be ready."""

import asyncio
import math
import signal
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


@pytest.mark.parametrize("within_s", [math.inf, -1.0])
def test_an_engine_may_take_so_long_and_no_longer(monkeypatch, within_s):
    answers = iter([False, False, True])
    monkeypatch.setattr(engine_process, "POLL_S", 0.0)
    monkeypatch.setattr(engine_process, "_is_healthy", lambda url: next(answers))

    async def main():
        ending = asyncio.create_task(asyncio.Event().wait())
        try:
            await _ready(ENGINE, SimpleNamespace(returncode=None), ending, within_s)
        finally:
            ending.cancel()

    if within_s > 0:
        asyncio.run(main())
        assert list(answers) == []
    else:
        with pytest.raises(ConfigurationError, match="more: --start-timeout"):
            asyncio.run(main())


@pytest.mark.parametrize("is_child", [True, False])
def test_a_child_leaves_it_to_its_parent_how_long_an_engine_may_take(monkeypatch, is_child):
    """A parent that knows of a download waits longer than we would."""
    waited = []

    async def ready(engine, process, ending, within_s):
        waited.append(within_s)
        # What is waited for meanwhile has begun.
        await asyncio.wait({ending}, timeout=0.01)
        raise ConfigurationError("not ready")

    monkeypatch.setattr(engine_process, "_ready", ready)
    monkeypatch.setattr(engine_process.http, "stdin_closed", asyncio.Event().wait)
    with pytest.raises(ConfigurationError, match="not ready"):
        serve_engine(ServeOptions(as_child=is_child, start_timeout=7.0), PAUSED)
    assert waited == [math.inf if is_child else 7.0]


def test_an_engine_that_is_told_to_end_before_it_is_ready_is_not_announced(monkeypatch):
    async def parent_is_gone():
        """At once."""

    async def ready(engine, process, ending, within_s):
        await ending

    monkeypatch.setattr(engine_process, "_ready", ready)
    monkeypatch.setattr(engine_process.http, "stdin_closed", parent_is_gone)
    monkeypatch.setattr(engine_process.console, "announce", lambda *_, **__: pytest.fail("announced"))
    assert serve_engine(ServeOptions(as_child=True), PAUSED) == 0


@pytest.mark.parametrize("is_told", [True, False])
def test_an_engine_finishes_what_is_open_for_a_signal_and_not_for_a_parent_that_has_died(monkeypatch, is_told):
    """Whoever starts it again wants the same device."""
    limits = []

    async def parent_is_gone():
        """At once, unless a signal is to come first."""
        await asyncio.sleep(600.0 if is_told else 0.0)

    async def ready(engine, process, ending, within_s):
        if is_told:
            signal.raise_signal(signal.SIGTERM)
        await ending

    async def stop(process, drain_s, is_urgent):
        limits.append(drain_s)
        process.kill()
        await process.wait()

    monkeypatch.setattr(engine_process, "_ready", ready)
    monkeypatch.setattr(engine_process, "_stop", stop)
    monkeypatch.setattr(engine_process.http, "stdin_closed", parent_is_gone)
    serve_engine(ServeOptions(as_child=True, drain_timeout=60.0), PAUSED)
    assert limits == [60.0 if is_told else 0.0]
