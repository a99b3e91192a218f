"""What the examples share: `kvferry` commands that end with the example, and a comparison of answers."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

READY_S = 600.0
ANSWER_S = 300.0
STOP_S = 30.0
MODEL_NAME = "example"
PROMPT = "The ferry leaves the harbour at dawn, and nobody who missed it at night must lose a box on the way. " * 8
# What follows `--` goes to `vllm serve`: a small cache, so that two servers fit on one device, and no compiling.
VLLM_OPTIONS = ("--", "--enforce-eager", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20))


@dataclass(frozen=True, slots=True)
class Answer:
    """Text and tokens of an answer, and what its headers and its report say about the transfer."""

    text: str
    token_ids: tuple[int, ...]
    headers: dict[str, str]
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Process:
    """A running `kvferry` command, and the file that gets its log."""

    child: subprocess.Popen[bytes]
    log: BinaryIO


@contextmanager
def running(*commands: Sequence[str], prefix: Sequence[str] = ()) -> Iterator[list[str]]:
    """Start `kvferry` commands side by side and give their URLs, once all can serve. They end with the block.

    `prefix` is a program that starts them, such as one that enters a namespace.
    """
    processes: list[Process] = []
    try:
        for command in commands:
            processes.append(start(command, prefix))
        deadline = time.monotonic() + READY_S
        yield [url_of(process, deadline) for process in processes]
    finally:
        for process in processes:
            ask_to_end(process)
        for process in processes:
            wait_for_end(process)


def start(command: Sequence[str], prefix: Sequence[str] = ()) -> Process:
    subcommand, *options = command
    # As a child it ends when its standard input closes: also when this process is killed.
    words = [*prefix, sys.executable, "-m", "kvferry", subcommand, "--json", "--as-child", *options]
    # On CPUs, several vLLM servers share the cores; on GPUs nobody reads this.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ}
    log = tempfile.TemporaryFile()  # noqa: SIM115
    pipe = subprocess.PIPE
    return Process(subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=log, env=environment), log)


def url_of(process: Process, deadline: float) -> str:
    """The command's only line says where it serves. Ends the example, with the command's own words, if none comes."""
    output = process.child.stdout
    is_there = output and select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]
    line = output.readline() if output and is_there else b""
    if not line:
        process.log.seek(0)
        words = process.log.read().decode(errors="replace")
        raise SystemExit(f"this did not start: {process.child.args!r}\n{words[-4000:]}")
    url: str = json.loads(line)["url"]
    return url


def ask_to_end(process: Process) -> None:
    if process.child.stdin:
        process.child.stdin.close()


def wait_for_end(process: Process) -> None:
    try:
        process.child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.child.kill()
        process.child.wait(STOP_S)
    if process.child.stdout:
        process.child.stdout.close()
    process.log.close()


def complete(url: str, salt: str) -> Answer:
    """Ask for 16 tokens. vLLM uses its prefix cache again for requests with the same `salt` only."""
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "cache_salt": salt}
    body["return_token_ids"] = True
    headers = {"content-type": "application/json", "x-kvferry-report": "true"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        found = json.load(response)
        told = {name.lower(): value for name, value in response.headers.items()}
    choice = found["choices"][0]
    told = {name: value for name, value in told.items() if name.startswith("x-kvferry-") or name == "server-timing"}
    return Answer(choice["text"], tuple(choice["token_ids"]), told, found.get("kvferry", {}))


def compare(router: str, decode: str) -> int:
    """Print the router's answer beside that of the decode engine alone. The exit code: 0 if the cache came from the
    prefill engine and the tokens are equal."""
    alone = complete(decode, "alone")
    answer = complete(router, "transferred")
    print(f"answer        {answer.text!r}")
    for name, value in sorted(answer.headers.items()):
        print(f"{name:<13} {value}")
    for name in ("tokens_received", "tokens_computed", "bytes", "transport"):
        if name in answer.report:
            print(f"{name:<13} {answer.report[name]}")
    equal = answer.token_ids == alone.token_ids
    print(
        "compared      " + ("equal to" if equal else "DIFFERENT FROM"), "the decode engine's answer without a transfer"
    )
    return 0 if equal and answer.headers.get("x-kvferry-cache") == "received" else 1


def bytes_received(url: str) -> int:
    """What a vLLM server has counted of the caches that came to it."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_S) as response:
        lines = response.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:nixl_bytes_transferred_sum"))
