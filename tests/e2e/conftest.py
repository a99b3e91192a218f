import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvferry.cli.child_processes import Child
from kvferry.cli.up.fleet import Fleet, FleetOptions
from kvferry.embedded.model.tiny import ensure_tiny_model
from kvferry.testing.output_check import Answer, Question, ask

DEADLINE_S = 60.0
READY_S = 240.0
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
HEADERS = {"content-type": "application/json", "x-kvferry-report": "true"}
BYTES_PER_TOKEN = 4 * 2 * 4 * 64 * 4  # layers, K and V, KV heads, head dim, float32


def pytest_collection_modifyitems(items):
    for item in items:
        if "e2e" in Path(item.fspath).parts:
            item.add_marker(pytest.mark.e2e)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failure shows what every process of ours was doing: one that has come too late is not seen a second time."""
    report = yield
    if report.when == "call" and report.failed:
        children = psutil.Process().children(recursive=True)
        report.sections += [(f"process {child.pid}", stacks(child)) for child in children if writes_stacks(child)]
    return report


def writes_stacks(process: psutil.Process) -> bool:
    """Whether it writes them to a log when it is told to, and can."""
    try:
        caught = int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[1], 16)
        is_logging = Path(f"/proc/{process.pid}/fd/2").readlink().is_file()
        return is_logging and bool(caught >> (signal.SIGUSR1 - 1) & 1) and process.status() != psutil.STATUS_STOPPED
    except (OSError, psutil.Error):
        return False


def stacks(process: psutil.Process) -> str:
    """The end of its log, with what all its threads are doing."""
    log = Path(f"/proc/{process.pid}/fd/2").readlink()
    told = log.stat().st_size
    process.send_signal(signal.SIGUSR1)
    eventually(lambda: log.stat().st_size > told or not process.is_running(), f"{process.pid} says what it does")
    return log.read_text()[-16_000:]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return ensure_tiny_model(tmp_path_factory.mktemp("model"), print)


@pytest.fixture(scope="module")
def start_fleet(tiny_model, tmp_path_factory) -> Iterator[Callable[..., Fleet]]:
    """Real engine and router processes, ended after the module."""
    started = []

    def start(num_prefill=1, num_decode=1, transport="auto", decode_block_tokens=16, more=()) -> Fleet:
        arguments = ("--model", str(tiny_model), "--served-name", "tiny", "--transport", transport, *more)
        options = FleetOptions(num_prefill, num_decode, arguments, 16, decode_block_tokens, 8192, port=0)
        fleet = kind_of_fleet()(options, tmp_path_factory.mktemp("logs"))
        started.append(fleet)
        fleet.start()
        return fleet

    yield start
    for fleet in started:
        fleet.__exit__(None, None, None)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., tuple[Child, dict]]]:
    """Starts a command, with the log `{name}.log`; returns its process and what it says once it serves."""
    children = []

    def begin(name: str, *arguments: str) -> tuple[Child, dict]:
        child = Child(name, arguments, tmp_path / f"{name}.log")
        children.append(child)
        return child, child.wait_until_ready(time.monotonic() + READY_S)

    yield begin
    for child in children:
        child.terminate()
    for child in children:
        child.stop()


def kind_of_fleet() -> type[Fleet]:
    """Hosts need root and a network namespace of this process: only `make e2e-hosts` has them."""
    if os.environ.get("KVFERRY_FLEET") != "hosts":
        return Fleet
    from fleet_on_hosts import FleetOnHosts

    return FleetOnHosts


def silent(text: str) -> None:
    """Nobody watches a test type."""


def both(fleet: Fleet, prompt: str | list[int], max_tokens: int = 12) -> tuple[Answer, Answer]:
    """The router's answer, and the answer of the decode engine alone."""
    question = Question("tiny", prompt, max_tokens)
    return ask(fleet.url, question, silent), ask(fleet.decode_urls[0], question, silent)


def post(url: str, body: object) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), HEADERS)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        return json.load(response)


def prefilled(url: str, prompt: list[int], **more: object) -> dict:
    """What the prefill request alone, as a proxy sends it to an engine, answers for the decode request."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE, **more}
    return post(f"{url}/v1/completions", body)["kv_transfer_params"]


def get(url: str) -> tuple[int, dict]:
    """Status and JSON."""
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)


def ready(fleet: Fleet) -> dict:
    """What the router says of its engines."""
    return get(f"{fleet.url}/ready")[1]


def members(url: str) -> list[dict]:
    """What a router knows of its instances."""
    return get(f"{url}/kvferry/members")[1]["members"]


def metric(url: str, name: str) -> float:
    """The value of one sample of an engine's or the router's `/metrics`, 0 when it is not there yet."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE_S) as response:
        for line in response.read().decode().splitlines():
            if line.rpartition(" ")[0] == name:
                return float(line.rpartition(" ")[2])
    return 0.0


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition of another process; fails at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)
