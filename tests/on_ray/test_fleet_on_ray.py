"""A fleet on a cluster of three nodes: what it answers, how it grows and shrinks, and what dies, under load."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import psutil
import pytest
from fleet_on_ray import FleetOnRay
from ray_cluster import eventually, post, processes

from kvferry.errors import ConfigurationError
from kvferry.testing.output_check import Question, ask

NUM_CLIENTS = 8
LONG = range(6)
SHORT = (6,)
# Eight clients with long prompts keep two prefill engines busy, however slow decode is; the short one does not.
PROMPT_TOKENS = 400
SHORT_TOKENS = 20
NUM_TOKENS = 80
TEST_S = 120

Answers = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def fleet(fleet_on_ray: FleetOnRay) -> FleetOnRay:
    """One that serves."""
    from ray import serve

    from kvferry.ray import app

    serve.run(app(fleet_on_ray.arguments()), name="fleet", route_prefix="/")
    yield fleet_on_ray
    serve.delete("fleet")


def prompts() -> list[list[int]]:
    """Long ones, and a short one at the end."""
    lengths = [*(PROMPT_TOKENS + number for number in LONG), SHORT_TOKENS]
    return [[random.Random(100 * p + i).randrange(300, 1000) for i in range(size)] for p, size in enumerate(lengths)]


def question(prompt: list[int]) -> Question:
    return Question("tiny", prompt, NUM_TOKENS)


def url_of(fleet: FleetOnRay, role: str) -> str:
    return next(one["url"] for one in fleet.members() if one["role"] == role)


def silent(text: str) -> None:
    """Nobody watches a test type."""


@pytest.fixture(scope="module")
def answers(fleet: FleetOnRay) -> list[tuple[int, ...]]:
    """The right tokens for each prompt: of one engine alone."""
    fleet.await_engines(1, 1)
    return [ask(url_of(fleet, "decode"), question(prompt), silent).token_ids for prompt in prompts()]


class Load:
    """Clients that ask, one question after the other, until the end; `wrong` are the answers that were not right."""

    def __init__(self, clients: Sequence[Sequence[int]], ask_one: Callable[[int], object], answers: Answers) -> None:
        """`clients` are the numbers of the prompts that each of them asks."""
        self._ask_one, self._answers, self._numbers = ask_one, answers, clients
        self._is_over = threading.Event()
        self.num_right = 0
        self.wrong: list[object] = []

    def __enter__(self) -> Load:
        self._threads = ThreadPoolExecutor(len(self._numbers))
        self._clients = [self._threads.submit(self._run, cycle(numbers)) for numbers in self._numbers]
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._threads.shutdown()
        for client in self._clients:
            client.result()

    def _run(self, numbers: Iterator[int]) -> None:
        while not self._is_over.is_set():
            number = next(numbers)
            found = self._ask_one(number)
            if found == self._answers[number]:
                self.num_right += 1
            else:
                self.wrong.append(found)


def whole_answer(fleet: FleetOnRay) -> Callable[[int], object]:
    def ask_one(number: int) -> object:
        body = {"model": "tiny", "prompt": prompts()[number], "max_tokens": NUM_TOKENS, "return_token_ids": True}
        status, answer = post(f"{fleet.url}/v1/completions", body)
        return tuple(answer["choices"][0]["token_ids"]) if status == 200 else (status, answer)

    return ask_one


def stream(fleet: FleetOnRay) -> Callable[[int], object]:
    return lambda number: ask(fleet.url, question(prompts()[number]), silent).token_ids


def test_answers_are_those_of_one_engine(fleet, answers):
    for prompt, expected in zip(prompts(), answers, strict=True):
        answer = ask(fleet.url, question(prompt), silent)
        assert (answer.token_ids, answer.path) == (expected, "disaggregated")
        assert answer.report["tokens_received"] == len(prompt) - 1
    # Each engine has the address of its node.
    hosts = {one["url"].split("//")[1].split(":")[0] for one in fleet.members()}
    assert hosts <= set(fleet.nodes)
    assert {one["origin"] for one in fleet.members()} == {"Ray"}


def test_a_client_that_leaves_is_noticed_through_serve(fleet, answers):
    import http.client

    connection = http.client.HTTPConnection(fleet.url.removeprefix("http://"), timeout=60)
    body = b'{"model": "tiny", "prompt": "The ferry", "max_tokens": 8000, "stream": true}'
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    assert sum(one["in_flight_requests"] for one in fleet.members()) == 1
    response.close()
    connection.close()
    eventually(lambda: not any(one["in_flight_requests"] for one in fleet.members()), lambda: "nobody computes for it")


def test_an_engine_whose_process_dies_is_started_again(fleet, answers):
    fleet.await_engines(1, 1)
    before = url_of(fleet, "prefill")
    os.kill(process_at(before), signal.SIGKILL)
    with Load([LONG, LONG], whole_answer(fleet), answers) as load:
        eventually(lambda: before not in [one["url"] for one in fleet.members()], lambda: "the router has forgotten it")
        fleet.await_engines(1, 1)
    assert load.wrong == []
    assert load.num_right > 0


def test_a_router_that_dies_is_started_again_and_finds_the_engines(fleet, answers):
    fleet.await_engines(1, 1)
    engines = {one["url"] for one in fleet.members()}
    (router,) = processes("ray::ServeReplica:fleet:router")
    router.kill()
    router.wait(TEST_S)
    fleet.await_engines(1, 1)
    # Not all of them need be the same: what an earlier test has made grow may still shrink.
    assert {one["url"] for one in fleet.members()} & engines
    assert stream(fleet)(0) == answers[0]


def process_at(url: str) -> int:
    """The process that listens at this address."""
    port = int(url.rpartition(":")[2])
    listening = [one for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.laddr.port == port]
    return listening[0].pid


def test_it_grows_survives_a_lost_node_and_shrinks_and_no_request_is_lost(fleet, answers):
    with Load([LONG] * NUM_CLIENTS, whole_answer(fleet), answers) as load:
        fleet.await_engines(2, 2)
        lost = url_of(fleet, "decode").split("//")[1].split(":")[0]
        fleet.kill_node(lost)
        fleet.await_engines(1, 1)
        before = load.num_right
        eventually(lambda: load.num_right > before + NUM_CLIENTS, lambda: "the others go on")
        added = fleet.add_engine_node()
        fleet.await_engines(2, 2)
        assert {one["role"] for one in fleet.members() if f"//{added}:" in one["url"]} == {"prefill", "decode"}
    assert load.wrong == []
    # Streams that are open when an engine is to end go on to their end.
    with Load([SHORT], stream(fleet), answers) as little:
        fleet.await_engines(1, 1)
        before = little.num_right
        eventually(lambda: little.num_right > before + 1, lambda: "and they answer")
    assert little.wrong == []
    print(f"{load.num_right + little.num_right} answers, all right")


def test_what_serve_adds_to_a_request(fleet):
    """Figures for docs/ray.md, with `-s`: the same engines behind Serve, and behind a router without it."""
    fleet.await_engines(1, 1)
    engines = [word for one in fleet.members() for word in (f"--{one['role']}", one["url"])]
    command = [sys.executable, "-m", "kvferry"]
    router = subprocess.Popen([*command, "route", "--port", "0", "--json", *engines], stdout=subprocess.PIPE)
    try:
        beside = json.loads(router.stdout.readline())["url"]
        load = ("--concurrency", "1", "--requests", "50", "--prompt-tokens", "64", "--output-tokens", "16", "--json")
        for url in (fleet.url, beside, fleet.url, beside):
            words = [*command, "bench", "serve", "--url", url, *load]
            done = subprocess.run(words, capture_output=True, text=True, timeout=TEST_S, check=True)
            figures = json.loads(done.stdout)
            assert figures["completed"] == 50
            kept = {
                name: round(value, 1) for name, value in figures.items() if name in ("median_ttft_ms", "median_e2el_ms")
            }
            print("behind Serve:" if url == fleet.url else "without it:", kept)
    finally:
        router.terminate()
        router.communicate(timeout=TEST_S)


@pytest.mark.parametrize(
    ("changes", "found", "expected"),
    [
        ({"prefill": {"resources": {"GPU": 8}}}, "prefill: 1", "a node with GPU: 8"),
        ({"decode": {"resources": {"decode": 1}, "min_replicas": 9, "max_replicas": 9}}, "decode: 2", "decode: 9"),
    ],
)
def test_what_no_node_can_hold_is_refused_before_anything_starts(fleet_on_ray, changes, found, expected):
    from ray import serve

    from kvferry.ray import app

    before = set(serve.status().applications)
    with pytest.raises(ConfigurationError) as refused:
        serve.run(app(fleet_on_ray.arguments(**changes)), name="another", route_prefix="/another")
    assert found in refused.value.found
    assert expected in refused.value.expected
    assert set(serve.status().applications) == before
