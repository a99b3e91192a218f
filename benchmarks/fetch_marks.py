"""When an agent's thread did what, for `fetch_steps.py`: a clock around the sessions and the loop of this process.

All processes of a host have the same clock. `Echo` and `RoundTrips` are what two messages and their answers take when
nothing is done with them.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import zmq

from kvferry.agent.loop.event_loop import EventLoop
from kvferry.session import commands as c
from kvferry.session import events as e
from kvferry.session.source.session import SourceSession
from kvferry.session.target.session import TargetSession

__all__ = ["Echo", "Mark", "RoundTrips", "record"]

MESSAGE = bytes(300)
"""About as long as a claim."""

Mark = tuple[str, float]
"""What was done (`hears Grant`, `says Claim`, `begins Post`, `ends Post`), and the monotonic clock's seconds."""


def record() -> list[Mark]:
    """From now on every mark of this process goes into the list."""
    marks: list[Mark] = []

    def marked(name: str) -> None:
        marks.append((name, time.monotonic()))

    for session in (SourceSession, TargetSession):
        session.handle = _hearing(session.handle, marked)  # type: ignore[method-assign]
    EventLoop._execute_one = _executing(EventLoop._execute_one, marked)  # type: ignore[method-assign]
    return marks


def _hearing(handle: Any, marked: Any) -> Any:
    def hear(session: Any, event: Any, now: float) -> Any:
        if not isinstance(event, e.Tick):
            heard = event.message if isinstance(event, e.FrameArrived | e.AnswerArrived) else event
            marked(f"hears {type(heard).__name__}")
        return handle(session, event, now)

    return hear


def _executing(execute: Any, marked: Any) -> Any:
    def carry_out(loop: Any, command: Any) -> None:
        said = command.message if isinstance(command, c.Send | c.Reply) else command
        marked(f"begins {type(said).__name__}")
        execute(loop, command)
        marked(f"ends {type(said).__name__}")

    return carry_out


class Echo:
    """Answers each message with itself, on a thread of its own, as long as the process lives."""

    def __init__(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            self._socket.send_multipart(self._socket.recv_multipart())


class RoundTrips:
    """Asks an `Echo` twice."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def seconds(self) -> float:
        began = time.monotonic()
        for _ in range(2):
            self._socket.send(MESSAGE)
            self._socket.recv()
        return time.monotonic() - began

    def close(self) -> None:
        self._socket.close(0)
