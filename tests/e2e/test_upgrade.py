"""A fleet is replaced by one of another wire version, engine by engine, while clients go on asking: nobody notices.

No release is old enough yet to be the other one, so that it is a copy of this one with another wire version.
"""

from __future__ import annotations

import json
import shutil
import signal
import threading
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from chaos_support import Process, running
from conftest import DEADLINE_S, HEADERS, eventually, get, members, metric, post, prefilled

import kvferry
from kvferry.wire.messages import WIRE_VERSION

OTHER_VERSION = "0.2.0"
START = """
import sys
sys.argv.pop(1)
sys.path.insert(0, {folder!r})
from kvferry.cli.main import main
main()
"""
PROMPTS = [
    f"The {number}th ferry of the day leaves the harbour at dawn, and the fog is thick. " * 3 for number in range(6)
]
NUM_CLIENTS = 3
RECEIVED = "kvferry_engine_tokens_received_total"


@pytest.fixture(scope="module")
def later(tmp_path_factory) -> Path:
    """A script that is `kvferry` of the next wire version."""
    folder = tmp_path_factory.mktemp("later")
    here = Path(kvferry.__file__).parent
    shutil.copytree(here, folder / "kvferry", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in (
        ("wire/messages.py", f"\nWIRE_VERSION = {WIRE_VERSION}\n", f"\nWIRE_VERSION = {WIRE_VERSION + 1}\n"),
        ("version.py", f'"{kvferry.__version__}"', f'"{OTHER_VERSION}"'),
    ):
        path = folder / "kvferry" / name
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
    script = folder / "later.py"
    script.write_text(START.format(folder=str(folder)))
    return script


class Clients:
    """They ask the router one prompt after the other until they are told to stop."""

    def __init__(self, url: str, expected: list[list[int]]) -> None:
        self._url, self._expected = url, expected
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(NUM_CLIENTS)]
        self.ways: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []
        for thread in self._threads:
            thread.start()

    @property
    def num_answers(self) -> int:
        return sum(self.ways.values())

    def until_more(self, number: int = 12) -> None:
        wanted = self.num_answers + number
        eventually(lambda: self.num_answers >= wanted or bool(self.wrong), f"{number} more answers")

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _run(self, first: int) -> None:
        number = first
        while not (self._stopping.is_set() or self.wrong):
            number = (number + 1) % len(PROMPTS)
            try:
                self._ask(number)
            except (OSError, ValueError, KeyError) as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    def _ask(self, number: int) -> None:
        body = json.dumps(asked(PROMPTS[number]))
        request = urllib.request.Request(f"{self._url}/v1/completions", body.encode(), HEADERS)
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            tokens, told = tokens_of(json.load(response)), response.headers
        self.ways[told.get("x-kvferry-path", ""), told.get("x-kvferry-cache", "")] += 1
        if tokens != self._expected[number]:
            self.wrong.append(f"{tokens} for prompt {number}")


def asked(prompt: str) -> dict:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}


def tokens_of(answer: dict) -> list[int]:
    (choice,) = answer["choices"]
    return choice["token_ids"]


def replace(process: Process) -> None:
    process.signal(signal.SIGTERM)
    assert process.ended() == 0


def test_no_request_fails_while_a_fleet_becomes_another_version(tiny_model, later, tmp_path):
    router = Process(tmp_path / "router.log", "route", "--accept-registrations")
    with running(router):
        where = ("--model", str(tiny_model), "--served-name", "tiny", "--transport", "shm", "--register", router.url)

        def engine(name: str, role: str, **script: Path) -> Process:
            return Process(tmp_path / f"{name}.log", "serve", "--engine-id", name, "--role", role, *where, **script)

        old = engine("p-old", "prefill"), engine("d-old", "decode")
        new = engine("p-new", "prefill", script=later), engine("d-new", "decode", script=later)
        with running(*old):
            expected = [
                post(f"{old[1].url}/v1/completions", asked(each))["choices"][0]["token_ids"] for each in PROMPTS
            ]
            eventually(lambda: get(f"{router.url}/ready")[1].get("num_usable_pairs") == 1, "the old pair is there")
            clients = Clients(router.url, expected)
            try:
                with running(*new):
                    eventually(lambda: get(f"{router.url}/ready")[1].get("num_usable_pairs") == 2, "so is the new one")
                    versions = Counter(member["version"] for member in members(router.url))
                    assert versions == {kvferry.__version__: 2, OTHER_VERSION: 2}
                    assert len(get(f"{router.url}/kvferry/members")[1]["incompatible_pairs"]) == 2
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


def test_engines_of_two_versions_refuse_each_other_and_say_so(tiny_model, later, tmp_path):
    """Whoever pairs them all the same, without our router."""
    common = ("serve", "--model", str(tiny_model), "--served-name", "tiny", "--transport", "shm", "--engine-id")
    old, new = (
        Process(tmp_path / "old.log", *common, "old"),
        Process(tmp_path / "new.log", *common, "new", script=later),
    )
    with running(old, new):
        for prefill, decode in ((old, new), (new, old)):
            params = prefilled(prefill.url, PROMPTS[0])
            body = asked(PROMPTS[0])
            whole = tokens_of(post(f"{decode.url}/v1/completions", body))
            found = post(f"{decode.url}/v1/completions", body | {"kv_transfer_params": params})
            assert (tokens_of(found), found["kvferry"]["recomputed"]) == (whole, "wire_version")
    assert "wire_version" in (tmp_path / "new.log").read_text()
