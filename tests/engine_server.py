"""Real servers of engines on loopback ports: started, awaited, read, and always ended."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Self

__all__ = ["VLLM_ON_CPU", "EnginePair", "EngineServer", "StartError", "hold_ports", "is_installed"]

# A busy machine takes minutes to import an engine.
START_S = 600.0
STOP_S = 20.0
POLL_S = 0.25
FIRST_PORT, LAST_PORT = 20_000, 30_000
MOST_WORDS = 20
# One OpenMP thread that is bound to no core: several servers share two cores without stalling each other.
VLLM_ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def is_installed(engine: str) -> bool:
    """Tests of an engine are in a folder of its name, which is a namespace package where its parent is on the path: it
    has no origin."""
    found = importlib.util.find_spec(engine)
    return found is not None and found.origin is not None


class StartError(Exception):
    """A server ended, or was not ready in time; says so with the end of its log."""


class EngineServer(ABC):
    """One process with an HTTP port. The port is nobody else's until it is stopped; everything it says is in `log`."""

    def __init__(self, name: str, log: Path, ready_path: str = "/health") -> None:
        self.name, self.log = name, log
        self._ready_path = ready_path
        self.process: subprocess.Popen[bytes] | None = None
        self.held = contextlib.ExitStack()
        self.port = hold_ports(self.held)

    @abstractmethod
    def command(self) -> list[str]:
        """What starts it."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Variables of its own, beside those of the tests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin to start; `wait_until_ready` waits. A server that was killed keeps its ports over a new start."""
        environment = {**os.environ, **self.environment()}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, env=environment, process_group=0)

    def wait_until_ready(self) -> None:
        """Raises StartError when it ends or is not ready within START_S."""
        deadline = time.monotonic() + START_S
        while not self.healthy():
            if self.process is None or self.process.poll() is not None:
                raise StartError(f"the {self.name} ended while it started: {self.words()}")
            if time.monotonic() > deadline:
                raise StartError(f"the {self.name} is not ready after {START_S:.0f} s: {self.words()}")
            time.sleep(POLL_S)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{self._ready_path}", timeout=10) as response:
                return response.status == 200
        except OSError:
            return False

    def words(self) -> str:
        """What its log says about errors, first to last, and where the rest is."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.search(r"\w+(Error|Exception)\b|^\s*hint:", line)]
        return "\n".join([*(errors or lines)[-MOST_WORDS:], f"(see {self.log})"])

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """Started and ready, until the end of a `with`."""
        try:
            self.start()
            self.wait_until_ready()
            yield self
        finally:
            self.stop()

    def kill(self) -> None:
        """End the whole process group without a goodbye, as a lost machine would."""
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait(STOP_S)
            self.process = None

    def signal(self, number: signal.Signals) -> None:
        """Send it to the whole process group, if there is one."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def terminate(self) -> None:
        """Ask it to end; `stop` waits for it."""
        if self.process is not None:
            self.process.terminate()

    def stop(self) -> None:
        """End it politely, then by force, for good; nothing of its process group survives."""
        self.held.close()
        if self.process is not None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
            self.kill()


class EnginePair(ABC):
    """A prefill and a decode server of one model, both ready between `start` and `stop`."""

    @property
    @abstractmethod
    def servers(self) -> tuple[EngineServer, EngineServer]:
        """Prefill and decode."""

    def start(self) -> None:
        """Start both at once and wait for both; ends both when one does not come up."""
        try:
            for server in self.servers:
                server.start()
            for server in self.servers:
                server.wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.resume()
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            server.stop()

    def pause(self) -> None:
        """No process of these servers runs until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for server in self.servers:
            server.signal(number)


def hold_ports(held: contextlib.ExitStack, num_ports: int = 1) -> int:
    """The first of `num_ports` neighbouring ports, one per rank, as NIXL's side channel wants. They are this server's
    until `held` is closed: of two servers that were given one port, the first one that is ready would answer for both.

    Not among those that the system gives to whoever asks for any: somebody may have got it already.
    """
    while True:
        first = random.randrange(FIRST_PORT, LAST_PORT)
        with contextlib.ExitStack() as tried:
            if all(_hold(tried, first + i) for i in range(num_ports)):
                held.enter_context(tried.pop_all())
                return first


def _hold(held: contextlib.ExitStack, port: int) -> bool:
    bound = held.enter_context(socket.socket())
    try:
        bound.bind(("127.0.0.1", port))
    except OSError:
        return False
    # Only now: nobody else has the port, and the server may have it beside us.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return True
