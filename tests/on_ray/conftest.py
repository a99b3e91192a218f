"""Tests on a real Ray cluster of several nodes, each with an address of its own: `make test-ray`, skipped elsewhere."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_server import is_installed
from fleet_on_ray import FleetOnRay

from kvferry.embedded.model.tiny import ensure_tiny_model

FOLDER = Path(__file__).parent
TEST_S = 600


def why_not() -> str:
    """Why these tests cannot run here; empty when they can."""
    if not is_installed("ray"):
        return "ray is not installed: see make test-ray"
    # Ray listens on all addresses, whatever it is told, and here nodes get addresses of their own.
    is_alone = os.environ.get("KVFERRY_RAY") == "alone"
    return "" if is_alone else "Ray listens beyond loopback: make test-ray gives it a network of its own (needs root)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if item.path.is_relative_to(FOLDER):
            # Libraries of Ray's warn of what they do among themselves.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.timeout(TEST_S))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def fleet_on_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetOnRay]:
    """A cluster of three nodes without a fleet; the driver of this process is connected to it."""
    model = ensure_tiny_model(tmp_path_factory.mktemp("ray"), print)
    with tempfile.TemporaryDirectory(prefix="ray") as folder, FleetOnRay(Path(folder), model) as fleet:
        fleet.add_engine_node()
        fleet.add_engine_node()
        yield fleet
