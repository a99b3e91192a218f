"""Tests on tpu-inference, with JAX's CPU platform. They need `make test-vllm-tpu`'s environment and are skipped in any
other."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_server import is_installed

FOLDER = Path(__file__).parent
# Starting a pair belongs to the first test that needs it, and shared cores can be slow.
TEST_S = 900

if is_installed("tpu_inference"):
    # The servers' tests of vLLM have what asks servers, and compares their answers. Where these are collected as well,
    # they have done the same.
    sys.path.append(str(FOLDER.parent / "vllm"))
    pytest.register_assert_rewrite("answers")
    # Before JAX is imported, which happens when the tests here are collected.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, at import
        importlib.import_module("kvferry.connectors.vllm_tpu")
        importlib.import_module("tpu_inference.runner.kv_cache")
    from tpu_servers import Running


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: what takes long with tpu-inference")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.timeout(TEST_S))


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory)
    yield running
    running.stop()
