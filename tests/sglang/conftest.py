"""Tests on real SGLang processes. They need `make test-sglang`'s environment and are skipped in any other."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from engine_server import is_installed
from other_engines import Other, OtherSpec
from sglang_servers import STAND_INS, Pair, PairSpec

FOLDER = Path(__file__).parent
# Starting a pair belongs to the first test that needs it, and shared cores can be slow.
TEST_S = 900

# SGLang in this process, for its pools: on the CPU, with names in place of packages that only CUDA has.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
sys.path.append(str(STAND_INS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.timeout(TEST_S))
            if not is_installed("sglang"):
                item.add_marker(pytest.mark.skip(reason="sglang is not installed: see make test-sglang"))


class Running:
    """The one pair that runs, and at most one other engine: a machine of two cores has room for no more."""

    def __init__(self, logs: pytest.TempPathFactory) -> None:
        self._logs = logs
        self._pair: Pair | None = None
        self._other: Other | None = None

    def pair(self, spec: PairSpec) -> Pair:
        if self._pair is None or self._pair.spec != spec or not all(s.healthy() for s in self._pair.servers):
            self._stop_pair()
            pair = Pair(spec, self._logs.mktemp(str(spec), numbered=True))
            pair.start()
            self._pair = pair
        return self._pair

    def other(self, spec: OtherSpec) -> Other:
        if self._other is None or self._other.spec != spec or not self._other.healthy():
            self._stop_other()
            self._other = Other(spec, self._logs.mktemp(str(spec), numbered=True) / "server.log")
            self._other.start()
            self._other.wait_until_ready()
        return self._other

    def stop(self) -> None:
        self._stop_other()
        self._stop_pair()

    def _stop_pair(self) -> None:
        if self._pair is not None:
            self._pair.stop()
            self._pair = None

    def _stop_other(self) -> None:
        if self._other is not None:
            self._other.stop()
            self._other = None


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def sglang_pools() -> ModuleType:
    # The libraries' own deprecations are none of ours, and warnings are errors here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.mem_cache import memory_pool

    return memory_pool


@pytest.fixture
def pair(running: Running, spec: PairSpec) -> Pair:
    """The two servers of the test's `spec`, both ready; the same ones for every test with an equal `spec`."""
    return running.pair(spec)


@pytest.fixture
def other(running: Running, other_spec: OtherSpec) -> Other:
    """A server of the test's `other_spec`, ready."""
    if other_spec.problem:
        pytest.skip(other_spec.problem)
    return running.other(other_spec)
