"""A fleet of the previous release is replaced by this one, engine by engine, while clients go on: nobody notices.

A release is a commit whose subject is `Release` and its number. The previous one is built from it and installed into an
environment of its own, with the libraries that are here.
"""

from __future__ import annotations

import subprocess
import tarfile
from collections import Counter
from io import BytesIO
from pathlib import Path

import pytest
from chaos_support import Process, running
from conftest import eventually, get, members, metric, post, prefilled
from environments import Environment, wheel_of
from fleet_clients import PROMPTS, Clients, asked, replace, tokens_of

import kvferry

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RELEASE = "Release "
# In the place of what the words of `Process` begin with.
START = """
import os
import sys
os.execv({kvferry!r}, [{kvferry!r}, *sys.argv[2:]])
"""
RECEIVED = "kvferry_engine_tokens_received_total"


def git(*words: str) -> bytes:
    found = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, timeout=60, check=False)
    return found.stdout if found.returncode == 0 else b""


def previous_release() -> tuple[str, str]:
    """Its number and its commit."""
    for line in git("log", "--extended-regexp", f"--grep=^{RELEASE}[0-9.]+$", "--format=%H %s").decode().splitlines():
        commit, subject = line.split(" ", 1)
        if (number := subject.removeprefix(RELEASE)) != kvferry.__version__:
            return number, commit
    pytest.skip("the previous release is not in the history: this is no clone, or a shallow one")


@pytest.fixture(scope="module")
def previous() -> str:
    return previous_release()[0]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory) -> Path:
    """A script that is `kvferry` of the previous release."""
    folder = tmp_path_factory.mktemp("earlier")
    archive = git("archive", previous_release()[1])
    with tarfile.open(fileobj=BytesIO(archive)) as tree:
        tree.extractall(folder / "tree", filter="data")
    wheel = wheel_of(folder / "tree", folder)
    script = folder / "earlier.py"
    script.write_text(START.format(kvferry=str(Environment(folder / "environment", wheel, "engine").kvferry)))
    return script


def versions(url: str) -> Counter[str]:
    return Counter(member["version"] for member in members(url))


def same_wire(one: Process, other: Process) -> bool:
    ours, theirs = (get(f"{each.url}/kvferry/info")[1]["wire_version"] for each in (one, other))
    return bool(ours == theirs)


def test_the_last_number_of_a_release_never_changes_the_wire_version(previous):
    """The promise of docs/operations.md."""
    then = git("show", f"{previous_release()[1]}:src/kvferry/wire/messages.py").decode()
    if f"\nWIRE_VERSION = {kvferry.WIRE_VERSION}\n" not in then:
        assert previous.rpartition(".")[0] != kvferry.__version__.rpartition(".")[0]


def test_no_request_fails_while_a_fleet_becomes_this_version(tiny_model, earlier, previous, tmp_path):
    router = Process(tmp_path / "router.log", "route", "--accept-registrations")
    with running(router):
        where = ("--model", str(tiny_model), "--served-name", "tiny", "--transport", "shm", "--register", router.url)

        def engine(name: str, role: str, **script: Path) -> Process:
            return Process(tmp_path / f"{name}.log", "serve", "--engine-id", name, "--role", role, *where, **script)

        old = engine("p-old", "prefill", script=earlier), engine("d-old", "decode", script=earlier)
        new = engine("p-new", "prefill"), engine("d-new", "decode")
        with running(*old):
            expected = [
                post(f"{old[1].url}/v1/completions", asked(each))["choices"][0]["token_ids"] for each in PROMPTS
            ]
            eventually(lambda: get(f"{router.url}/ready")[1].get("num_usable_pairs") == 1, "the old pair is there")
            clients = Clients(router.url, expected)
            try:
                with running(*new):
                    both = {previous: 2, kvferry.__version__: 2}
                    eventually(lambda: versions(router.url) == both, "so is the new one")
                    refused = get(f"{router.url}/kvferry/members")[1]["incompatible_pairs"]
                    assert len(refused) == (0 if same_wire(old[0], new[0]) else 2)
                    eventually(lambda: metric(new[1].url, RECEIVED) > 0 or bool(clients.wrong), "the new pair serves")
                    for process in old:
                        replace(process)
                        clients.until_more()
                    clients.stop()
            finally:
                clients.stop()
        assert clients.wrong == []
        # The old decode engine is not asked when its partner has left: the new one has one.
        assert set(clients.ways) <= {("disaggregated", "received"), ("decode-only", "local")}, clients.ways
        assert clients.ways["disaggregated", "received"] > 24


def test_engines_of_two_wire_versions_refuse_each_other_and_say_so(tiny_model, earlier, tmp_path):
    """Whoever pairs them all the same, without our router; those of one wire version exchange caches both ways."""
    common = ("serve", "--model", str(tiny_model), "--served-name", "tiny", "--transport", "shm", "--engine-id")
    old, new = (
        Process(tmp_path / "old.log", *common, "old", script=earlier),
        Process(tmp_path / "new.log", *common, "new"),
    )
    with running(old, new):
        recomputed = "" if same_wire(old, new) else "wire_version"
        for prefill, decode in ((old, new), (new, old)):
            params = prefilled(prefill.url, PROMPTS[0])
            body = asked(PROMPTS[0])
            whole = tokens_of(post(f"{decode.url}/v1/completions", body))
            found = post(f"{decode.url}/v1/completions", body | {"kv_transfer_params": params})
            assert (tokens_of(found), found["kvferry"].get("recomputed", "")) == (whole, recomputed)
    assert recomputed in (tmp_path / "new.log").read_text()
