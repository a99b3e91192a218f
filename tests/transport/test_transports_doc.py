"""docs/transports.md says what is so: the tests that it names exist, and its table is that of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_environment import ZE, ZE_COPY, xpu

from kvferry.transport.machine.facts import Place
from kvferry.transport.ucx.settings import choose_environment

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/transports.md").read_text()


def test_every_test_that_it_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", DOCUMENT))
    written = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 8
    assert named <= set(re.findall(r"def (test_\w+)", written))


@pytest.mark.parametrize(
    ("system", "transports"),
    [(xpu(ZE, Place.SAME_HOST), "ze_ipc,ze_copy,tcp"), (xpu(ZE_COPY, Place.SAME_HOST), "ze_copy,tcp")],
)
def test_its_sets_are_those_that_are_chosen(system, transports: str) -> None:
    assert f"`{transports}`" in DOCUMENT
    assert choose_environment(system).chosen["UCX_TLS"] == transports


def test_every_variable_that_is_set_is_in_it() -> None:
    rules = (ROOT / "src/kvferry/transport/ucx/settings.py").read_text()
    for name in set(re.findall(r'"(UCX_\w+)"', rules)):
        assert f"`{name}`" in DOCUMENT
