"""UCX's settings reach the process before UCX does, and what comes too late is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvferry.errors import ConfigurationError
from kvferry.transport.machine.facts import Place
from kvferry.transport.registry import open_transports
from kvferry.transport.ucx.environment import prepare, silence_libraries
from kvferry.transport.ucx.settings import Origin

LATE = """
import json, sys
from kvferry.transport.nixl.transport import NixlTransport
from kvferry.transport.ucx.environment import prepare
if sys.argv[1] == "loaded":
    NixlTransport().close()
prepared = prepare()
print(json.dumps([[finding.severity, finding.hint] for finding in prepared.late]))
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("UCX_", "KVFERRY_"))]:
        monkeypatch.delenv(name)
    # What is set on the way is taken back at the end.
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_what_was_chosen_is_set_and_stays_ours() -> None:
    for _ in range(2):
        prepared = prepare()
        assert os.environ["UCX_RCACHE_MAX_UNRELEASED"] == "1024"
        origins = {each.name: each.origin for each in prepared.environment.settings}
        assert origins["UCX_RCACHE_MAX_UNRELEASED"] is Origin.CHOSEN


CHILD = """
import json, os
from kvferry.transport.ucx.environment import prepare, user_variables
users = user_variables()
prepare()
print(json.dumps([users, os.environ.get("UCX_NET_DEVICES", "")]))
"""


def test_what_a_process_inherits_from_an_engine_is_no_wish_of_the_users() -> None:
    """An engine whose peers are all here has child processes that start one with peers on other hosts."""
    silence_libraries()
    os.environ["UCX_TLS"] = "all"
    prepare(place=Place.SAME_HOST)
    assert os.environ["UCX_NET_DEVICES"] == "lo"
    command = [sys.executable, "-c", CHILD]
    child = subprocess.run(command, capture_output=True, check=True, timeout=60, env=os.environ)
    assert json.loads(child.stdout) == [{"UCX_TLS": "all"}, ""]


def test_the_users_values_are_left_alone() -> None:
    os.environ["UCX_RCACHE_MAX_UNRELEASED"] = "inf"
    prepared = prepare()
    assert os.environ["UCX_RCACHE_MAX_UNRELEASED"] == "inf"
    assert {each.name: each.origin for each in prepared.environment.settings}[
        "UCX_RCACHE_MAX_UNRELEASED"
    ] is Origin.USER


def test_a_hopeless_set_makes_nixl_unavailable_and_nothing_else() -> None:
    os.environ["UCX_TLS"] = "ze_copy,cma"
    opened = open_transports("auto")
    assert "active messages" in opened.unavailable["nixl"]
    assert {transport.name for transport in opened.transports} >= {"shm", "tcp"}
    for transport in opened.transports:
        transport.close()
    with pytest.raises(ConfigurationError, match="active messages"):
        open_transports("nixl")


@pytest.mark.parametrize("state", ["fresh", "loaded"])
def test_whoever_is_too_late_is_told(state: str) -> None:
    pytest.importorskip("nixl_cu13")
    command = [sys.executable, "-c", LATE, state]
    late = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60, env=os.environ).stdout)
    assert [each[0] for each in late] == (["warning"] if state == "loaded" else [])
    assert all("UCX_RCACHE_MAX_UNRELEASED=1024" in each[1] for each in late)
