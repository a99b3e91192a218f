"""The real `kvferry serve --engine …` with a stand-in for the other project's server, which answers any GET."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from import_path import import_path

DEADLINE_S = 60.0
SERVER = """
import http.server, json, os, pathlib, signal, socket, subprocess, sys
folder = pathlib.Path(os.environ["STAND_IN_FOLDER"])
if "--fail" in sys.argv:
    sys.exit("RuntimeError: no such model")
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / "seen.json").write_text(json.dumps([sys.argv[1:], os.getpid(), helper.pid]))
host, port = (sys.argv[sys.argv.index(option) + 1] for option in ("--host", "--port"))
port = int(port)
with socket.socket() as anybody:
    try:
        anybody.bind(("127.0.0.1", port))
    except OSError:
        (folder / "held").touch()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/die":
            os._exit(3)
def finish_requests(*_):
    if "--stubborn" in sys.argv:
        print("still answering", flush=True)
        return
    subprocess.run([sys.executable, "-c", ""])
    (folder / "drained").touch()
    os._exit(0)
if "--shutdown-timeout" in sys.argv:
    signal.signal(signal.SIGTERM, finish_requests)
class Server(http.server.HTTPServer):
    address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
Server((host, port), Handler).serve_forever()
"""

Start = Callable[..., subprocess.Popen[bytes]]


def write_package(folder: Path, modules: dict[str, str]) -> None:
    """A package by the names of its modules and their texts; the packages around them are empty."""
    for name, text in modules.items():
        path = folder.joinpath(*name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)
        for parent in path.relative_to(folder).parents:
            if parent.name:
                (folder / parent / "__init__.py").touch()


@contextmanager
def starting(folder: Path, engine: str, modules: dict[str, str]) -> Iterator[Start]:
    """Gives a function that starts the command for an engine of these modules; in the end all its processes end."""
    write_package(folder, modules)
    started = []

    def start(*arguments: str, program: tuple[str, ...] = ("-m", "kvferry.cli.main")) -> subprocess.Popen[bytes]:
        command = [sys.executable, *program, "serve", "--engine", engine, "--port", "0", "--json"]
        pipe = subprocess.PIPE
        environment = {**os.environ, "PYTHONPATH": import_path(folder), "STAND_IN_FOLDER": str(folder)}
        process = subprocess.Popen(
            [*command, "--model", str(folder), *arguments], stdin=pipe, stdout=pipe, stderr=pipe, env=environment
        )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            with process:
                process.kill()


def seen(folder: Path) -> tuple[list[str], list[int]]:
    """The options that the stand-in was started with, its process id and that of its helper."""
    arguments, *pids = json.loads((folder / "seen.json").read_text())
    return arguments, pids


def after(command: list[str], option: str) -> str:
    """The value of an option on a command line."""
    return command[command.index(option) + 1]
