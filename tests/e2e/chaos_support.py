"""Engines and routers as processes that tests may stop, kill and restart, and a client that can leave at any time."""

import contextlib
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from conftest import DEADLINE_S, HEADERS, READY_S, eventually, get, metric
from hosts import Host

GRANTED = 'kvferry_engine_blocks{state="granted"}'
Do = Callable[[Callable[[], Any]], Any]
GATED = Path(__file__).with_name("chaos_serve.py")


def _here(work: Callable[[], Any]) -> Any:
    return work()


class Process:
    """One `kvferry` process, on a host of its own where one is given. `restart` brings it back at its address; `gate`
    (a file) holds back what its script says, by default its reads."""

    def __init__(self, log: Path, *words: str, script: Path = GATED, host: Host | None = None) -> None:
        self.log = log
        self.address = host.address if host else "127.0.0.1"
        self._do: Do = host.do if host else _here
        self._script = script
        self.gate = log.with_suffix(".gate")
        self._words = words
        self.port = 0
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> "Process":
        """Begin to start; `wait` until it serves."""
        words = (
            sys.executable,
            str(self._script),
            str(self.gate),
            self._words[0],
            "--json",
            "--as-child",
            *self._words[1:],
        )
        with self.log.open("ab") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            self._popen = self._do(lambda: subprocess.Popen((*words, "--port", str(self.port)), **pipes))
        return self

    def wait(self) -> "Process":
        assert select.select([self._popen.stdout], [], [], READY_S)[0], f"not ready: {self.log.read_text()[-2000:]}"
        line = self._popen.stdout.readline()
        assert line, f"has ended: {self.log.read_text()[-2000:]}"
        self.port = urlsplit(json.loads(line)["url"]).port
        return self

    @property
    def url(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{address}:{self.port}"

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> float:
        """Without a chance to clean up; returns when that was."""
        killed = time.monotonic()
        self._popen.kill()
        self.ended()
        return killed

    def ended(self) -> int:
        """The exit code, once there is one."""
        code = self._popen.wait(DEADLINE_S)
        for pipe in (self._popen.stdin, self._popen.stdout):
            pipe.close()
        return code

    def restart(self) -> "Process":
        return self.start().wait()

    def close(self) -> None:
        self.gate.unlink(missing_ok=True)
        if self._popen is not None:
            self._popen.kill()
            self.ended()

    @contextlib.contextmanager
    def stopped(self):
        """It exists but does nothing."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    @contextlib.contextmanager
    def held(self):
        """Its reads begin but do not move, or whatever else its script holds back."""
        self.gate.touch()
        try:
            yield
        finally:
            self.gate.unlink(missing_ok=True)

    def metric(self, name: str) -> float:
        return self._do(lambda: metric(self.url, name))

    @property
    def num_reads(self) -> float:
        return self.metric("kvferry_agent_open_reads")

    @property
    def num_granted(self) -> float:
        return self.metric(GRANTED)

    def until_reading(self, number: int = 1) -> None:
        eventually(lambda: self.num_reads >= number, f"{number} reads are under way")

    @property
    def num_slots(self) -> float:
        return self.metric("kvferry_agent_open_slots")

    def until_free(self) -> None:
        eventually(lambda: self.num_granted == 0, f"the blocks of {self.url} are free")

    def ready(self) -> tuple[int, dict]:
        return self._do(lambda: get(f"{self.url}/ready"))


@contextlib.contextmanager
def running(*processes: Process):
    """They start at the same time and serve; all are ended in the end."""
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.wait()
        yield
    finally:
        for process in processes:
            process.close()


class Asking:
    """One completion, asked in a thread, from a host if it says so; `leave` closes the connection whatever is still to
    come."""

    def __init__(self, url: str, body: dict, host: Host | None = None) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=DEADLINE_S)
        self._body = json.dumps({"model": "tiny", "return_token_ids": True} | body).encode()
        self.status, self.headers, self.text = 0, {}, b""
        self.began, self.took_s = threading.Event(), 0.0
        self._started = time.monotonic()
        # No thread can be started on a host, but a socket stays where it was made.
        (host.do if host else _here)(self._connection.connect)
        self._socket = self._connection.sock
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def answer(self) -> dict:
        """The whole answer; fails when there is none in time."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "no answer in time"
        return json.loads(self.text)

    def lines(self) -> list[bytes]:
        """The events of a stream that has ended."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "no end in time"
        return [line[len(b"data: ") :] for line in self.text.splitlines() if line.startswith(b"data: ")]

    def token_ids(self) -> list[int]:
        """Of a finished stream."""
        *lines, last = self.lines()
        assert last == b"[DONE]", last
        return [token for line in lines for choice in json.loads(line)["choices"] for token in choice["token_ids"]]

    def leave(self) -> float:
        """Go away; returns when that was."""
        left = time.monotonic()
        self._socket.shutdown(2)
        self._thread.join(DEADLINE_S)
        return left

    def _run(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._connection.request("POST", "/v1/completions", self._body, HEADERS)
            response = self._connection.getresponse()
            self.status, self.headers = response.status, response.headers
            while piece := response.read1():
                self.text += piece
                self.began.set()
        self.took_s = time.monotonic() - self._started
        self._connection.close()


def since(moment: float) -> str:
    return f"{time.monotonic() - moment:.2f} s"


def samples(url: str, family: str) -> list[float]:
    """The values of all samples of a metric, whatever their labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE_S) as response:
        lines = response.read().decode().splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(family + "{")]


def usage_of(pid: int) -> dict[str, int]:
    process = psutil.Process(pid)
    memory = process.memory_info()
    return {
        "fds": process.num_fds(),
        "threads": process.num_threads(),
        "memory_bytes": memory.rss - memory.shared,
    }
