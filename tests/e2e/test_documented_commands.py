"""What the first pages tell people to type is typed: engines and router start, and the request gets its cache."""

import json
import os
import subprocess
import sys
import urllib.request

import pytest
from docs_pages import calls_of

STOP_S = 60


@pytest.fixture
def run():
    """Starts a `kvferry` command of a document on a free port."""
    processes = []

    def start(words):
        port = words.index("--port") + 1 if "--port" in words else 0
        words = [*words[:port], "0", *words[port + 1 :]] if port else [*words, "--port", "0"]
        command = [sys.executable, "-m", "kvferry", *words, "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        processes.append(process)
        return process

    yield start
    for process in reversed(processes):
        process.terminate()
    for process in reversed(processes):
        process.wait(STOP_S)
        process.stdout.close()


def url_of(process):
    """Where it is ready, as it says itself."""
    return json.loads(process.stdout.readline())["url"]


def typed(page, program):
    """The calls of a program on one page."""
    return [words for place, words in calls_of(program) if place.startswith(f"docs/{page}:")]


def documented_port(words):
    return words[words.index("--port") + 1] if "--port" in words else "8000"


def with_urls(words, urls):
    """The words with addresses that processes really have in place of those of the document."""
    for documented, url in urls.items():
        words = [word.replace(f"http://127.0.0.1:{documented}", url) for word in words]
    return words


def sent(words):
    """What `curl` would send, sent: the headers and the body of the answer."""
    (url,) = [word for word in words if word.startswith("http")]
    headers = dict(words[at + 1].split(": ") for at, word in enumerate(words) if word == "-H")
    body = words[words.index("-d") + 1].encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return answer.headers, json.load(answer)


@pytest.mark.parametrize("page", ["start.md", pytest.param("transformers.md", marks=pytest.mark.slow)])
def test_engines_router_and_request_of_a_page(run, page, tiny_model):
    commands = [words for words in typed(page, "kvferry") if words[0] in ("serve", "route") and "vllm" not in words]
    *engines, router = [
        [str(tiny_model) if word == "path/or/name" else word for word in words] for words in commands[:3]
    ]
    started = [(documented_port(words), run(words)) for words in engines]
    urls = {port: url_of(process) for port, process in started}
    urls[documented_port(router)] = url_of(run(with_urls(router, urls)))
    headers, answer = sent(with_urls(typed(page, "curl")[0], urls))
    assert headers["x-kvferry-path"] == "disaggregated"
    assert headers["x-kvferry-cache"] == "received"
    assert answer["choices"][0]["text"]
