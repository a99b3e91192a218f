"""What holds for all tests: which count lines, how coroutines run, and that no time is short for an example."""

import asyncio
import contextlib
import inspect
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Processes under test buffer their output as they do at people's machines: what a failed write leaves would go unseen.
os.environ.pop("PYTHONUNBUFFERED", None)

# An agent imports it on a thread of its own, which makes loggers while pytest goes through all there are.
with contextlib.suppress(ImportError):
    import numba  # noqa: F401

HERE = Path(__file__).parent
COUNTED = {"plan", "wire", "session", "catalog"}

# How long an example takes says nothing, on a busy machine least of all. The rest stays as it is: with CI set,
# Hypothesis has chosen the same examples every time.
settings.register_profile("unhurried", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


def pytest_addoption(parser):
    parser.addoption("--example-proxy", default="", help="vLLM's toy_proxy_server.py, to be tested with our engines.")
    parser.addoption("--example-python", default=sys.executable, help="A Python that has what it needs: vLLM's.")


def pytest_collection_modifyitems(items):
    """`-m counted` is what the Makefile counts the lines of; the rest runs at its full speed."""
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in COUNTED and item.get_closest_marker("uncounted") is None:
            item.add_marker(pytest.mark.counted)


def pytest_pyfunc_call(pyfuncitem):
    """A test that is a coroutine runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
