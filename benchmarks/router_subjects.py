"""The routers that are measured, each in a process of its own on a core of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Subject", "cpu_s", "engine", "rss_bytes", "started", "subjects"]

READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Subject:
    """A router: its name and the command line in which PORT, PREFILL and DECODE stand for the three ports."""

    name: str
    words: tuple[str, ...]
    note: str

    def command(self, ports: tuple[int, int, int]) -> list[str]:
        values = dict(zip(("PORT", "PREFILL", "DECODE"), map(str, ports), strict=True))
        found = []
        for word in self.words:
            for name, value in values.items():
                word = word.replace(name, value)
            found.append(word)
        return found


def subjects(example: str, example_python: str, vllm_router: str) -> list[Subject]:
    """Ours, and the others as far as they are there."""
    engines = ("--prefill", "http://127.0.0.1:PREFILL", "--decode", "http://127.0.0.1:DECODE")
    ours = (sys.executable, "-m", "kvferry.cli.main", "route", "--port", "PORT", *engines)
    found = [Subject("kvferry route", ours, "this package")]
    if example:
        words = ("--port", "PORT", "--prefiller-ports", "PREFILL", "--decoder-ports", "DECODE")
        hosts = ("--prefiller-hosts", "127.0.0.1", "--decoder-hosts", "127.0.0.1")
        note = "vLLM's tests/v1/kv_connector/nixl_integration/toy_proxy_server.py, unchanged"
        found.append(Subject("vLLM example proxy", (example_python, example, *words, *hosts), note))
    if vllm_router:
        flags = ("--vllm-pd-disaggregation", "--host", "127.0.0.1", "--port", "PORT", "--policy", "round_robin")
        # Its counters want a port too; the next one after a free one is as good as any.
        found.append(Subject("vllm-router", (vllm_router, *flags, *engines), "the Rust router of PyPI, round robin"))
    return found


@contextlib.contextmanager
def engine(num_tokens: int, gap_ms: float, core: int) -> Iterator[int]:
    """A fake engine on a core; its port."""
    script = Path(__file__).with_name("router_engine.py")
    command = [sys.executable, str(script), str(num_tokens), str(gap_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    try:
        if process.stdout is None:
            raise RuntimeError("no output")
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def started(subject: Subject, prefill: int, decode: int, core: int) -> Iterator[tuple[int, int]]:
    """A running router: its port and its process id. What it says is in a file in /tmp."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open(f"/tmp/router-benchmark-{subject.name.split()[0]}.log", "wb") as log:
        process = subprocess.Popen(
            subject.command((port, prefill, decode)),
            stdout=log,
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        try:
            _await(port, process)
            yield port, process.pid
        finally:
            process.kill()
            process.wait()


def rss_bytes(pid: int) -> int:
    """What a process and nobody else holds in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} does not listen; its words are in /tmp/router-benchmark-*.log")
