"""Clients of a fleet whose engines are replaced while it serves: each answer is compared with that of one engine."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from collections import Counter

from chaos_support import Process
from conftest import DEADLINE_S, HEADERS, eventually

PROMPTS = [
    f"The {number}th ferry of the day leaves the harbour at dawn, and the fog is thick. " * 3 for number in range(6)
]
NUM_CLIENTS = 3


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
