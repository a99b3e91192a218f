"""Tests on real vLLM processes. They need `make test-vllm`'s environment and are skipped in any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_server import is_installed
from lacks import lack
from servers import DEVICE, Pair, PairSpec

FOLDER = Path(__file__).parent
# Starting a pair belongs to the first test that needs it, and shared cores can be slow.
TEST_S = 900


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--connector", default="FerryConnector", help="the KV connector both servers run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: the whole matrix of models and shapes on vLLM, an hour or more")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(FOLDER)]
    for item in ours:
        item.add_marker(pytest.mark.timeout(TEST_S))
        if not is_installed("vllm"):
            item.add_marker(pytest.mark.skip(reason="vllm is not installed: see make test-vllm"))
    # Tests on the same pair run one after the other, so that each pair is started once; so do those of a file that
    # starts something of its own.
    first_use: dict[str, int] = {}
    for item in ours:
        first_use.setdefault(pair_of(item), len(first_use))
    items[:] = [item for item in items if item not in ours] + sorted(ours, key=lambda item: first_use[pair_of(item)])


def pair_of(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return repr(callspec.params["spec"]) if callspec is not None and "spec" in callspec.params else str(item.path)


class Running:
    """The one pair that runs: a machine of two cores has room for no second."""

    def __init__(self, connector: str, logs: pytest.TempPathFactory) -> None:
        self._connector, self._logs = connector, logs
        self._pair: Pair | None = None

    def pair(self, spec: PairSpec) -> Pair:
        if self._pair is None or self._pair.spec != spec or not all(s.healthy() for s in self._pair.servers):
            self.stop()
            pair = Pair.create(spec, self._connector, self._logs.mktemp(str(spec), numbered=True))
            pair.start()
            self._pair = pair
        return self._pair

    def stop(self) -> None:
        if self._pair is not None:
            self._pair.stop()
            self._pair = None


@pytest.fixture(scope="session")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(request.config.getoption("--connector", default="FerryConnector"), tmp_path_factory)
    yield running
    running.stop()


@pytest.fixture
def pair(running: Running, spec: PairSpec) -> Pair:
    """The two servers of the test's `spec`, both ready; the same ones for every test with an equal `spec`."""
    num_ranks = max(spec.prefill.tp, spec.decode.tp)
    if DEVICE != "cpu" and num_ranks > torch.accelerator.device_count():
        pytest.skip(f"{num_ranks} ranks need as many devices of {DEVICE}")
    if lacking := lack(spec):
        pytest.skip(f"this vLLM lacks {lacking}")
    return running.pair(spec)
