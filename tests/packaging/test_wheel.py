"""The wheel, as users get it: what it says of itself, and every command with every set of extras."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import zipfile
from email import message_from_string
from pathlib import Path
from urllib.request import urlopen

import pytest
from environments import Environment, wheel_of

ROOT = Path(__file__).parents[2]
COMMANDS = ("up", "serve", "route", "top", "plan", "doctor", "bench", "bench serve")
PLAN = ("plan", "--model", "llama-3.3-70b", "--prefill", "tp=4", "--decode", "tp=2")
NOWHERE = "http://127.0.0.1:1"

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment per set of extras."""
    made = {}

    def installed(extras):
        if extras not in made:
            made[extras] = Environment(tmp_path_factory.mktemp("environment"), wheel, extras)
        return made[extras]

    return installed


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return message_from_string(archive.read(name).decode())


def test_the_index_has_something_to_show(metadata):
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The kvferry authors"
    assert len(metadata.get_all("Classifier")) > 8
    assert "vLLM" in metadata["Keywords"]
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_no_link_or_picture_on_the_index_leads_nowhere(metadata):
    text = str(metadata.get_payload())
    assert "How fast" in text
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", text) == []


def test_the_wheel_has_every_file_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("kvferry/")}
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    assert packed >= {line.removeprefix("src/") for line in tracked.stdout.splitlines()}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_extra(installed, command):
    done = installed("").run(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_without_extras_the_version_the_plan_and_its_page(installed, tmp_path):
    base = installed("")
    assert re.fullmatch(r"kvferry \S+\n", base.run("--version").stdout)
    again = subprocess.run([base.python, "-m", "kvferry", "--version"], capture_output=True, text=True, check=True)
    assert again.stdout == base.run("--version").stdout
    page = tmp_path / "plan.html"
    done = base.run(*PLAN, "--html", str(page))
    assert (done.returncode, page.exists()) == (0, True), done.stderr
    assert "2.50 GiB" in done.stdout


def test_without_extras_doctor_says_what_is_missing(installed):
    done = installed("").run("doctor")
    assert done.returncode in (0, 1), done.stderr
    assert "engines cannot use them: kvferry[agent] is not installed" in done.stdout.splitlines()[0]
    assert "pip install 'kvferry[engine]'" in done.stdout


@pytest.mark.parametrize(
    ("extras", "arguments", "missing"),
    [
        ("", ("serve",), "engine"),
        ("", ("up",), "engine"),
        ("", ("route", "--decode", NOWHERE), "router"),
        ("", ("top",), "router"),
        ("", ("bench", "serve"), "router"),
        ("", ("simulate", "fleet"), "simulate"),
        ("", ("doctor", "--peer", "127.0.0.1:1"), "agent"),
        ("router", ("serve",), "engine"),
        ("router", ("up",), "engine"),
        ("router", ("route", "--otel", "--decode", NOWHERE), "otel"),
        ("router", ("route", "--kubernetes-selector", "app=kvferry"), "kubernetes"),
        ("router", ("simulate", "fleet"), "simulate"),
        ("agent,router", ("serve",), "engine"),
        ("agent,router", ("up", "--engine", "vllm"), "agent,router,nixl"),
    ],
)
def test_a_command_whose_extra_is_missing_names_it_in_one_line(installed, extras, arguments, missing):
    done = installed(extras).run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "pip install" in line)
    assert line.endswith(f"pip install 'kvferry[{missing}]'")
    if "vllm" not in arguments:
        assert done.stderr.splitlines() == [line]


@pytest.mark.parametrize("arguments", [("top",), ("bench", "serve", "--requests", "1")], ids=" ".join)
def test_with_the_routers_extra_these_start_and_find_no_router(installed, arguments):
    url = (NOWHERE,) if arguments == ("top",) else ("--url", NOWHERE)
    done = installed("router").run(*arguments, *url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert NOWHERE.removeprefix("http://") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("extras", "options"), [("router", ()), ("otel", ("--otel",))])
def test_with_its_extra_a_router_routes(installed, extras, options):
    command = [installed(extras).kvferry, "route", "--json", "--port", "0", "--decode", NOWHERE, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as router:
        try:
            url = json.loads(router.stdout.readline())["url"]
            with urlopen(f"{url}/health", timeout=60) as answer:
                assert answer.status == 200
            router.send_signal(signal.SIGINT)
            assert router.wait(60) == 0
        finally:
            router.kill()


def test_with_the_agents_extra_a_peer_is_asked(installed):
    done = installed("agent").run("doctor", "--peer", "127.0.0.1:1")
    assert done.returncode == 2
    assert "no engine answers at tcp://127.0.0.1:1" in done.stdout


@pytest.mark.slow
def test_with_the_engines_extra_the_whole_job_is_done(installed, tmp_path):
    cache = os.environ.get("KVFERRY_CACHE", str(tmp_path))
    done = installed("engine").run("up", "--once", "The ferry leaves", "--json", KVFERRY_CACHE=cache)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["equal"]
    assert facts["tokens_received"] > 0
