"""What a request costs on a new connection and on a kept-alive one, to an engine and through the router.

    python benchmarks/connections.py > benchmarks/results/connections.json

One prefill and one decode engine with a tiny model behind `kvferry route`. The two kinds of connection take turns, one
request at a time. *Error* is a body that is refused with 400; *first token* is until the first byte of a stream's body.
Prints JSON; milliseconds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from measuring import machine, say

from kvferry.cli.up.fleet import Fleet, FleetOptions
from kvferry.embedded.model.tiny import ensure_tiny_model

TIMEOUT_S = 60.0
WARM_UP = 3


class Client:
    """One HTTP client; with `keeps` it uses one connection for everything."""

    def __init__(self, url: str, keeps: bool) -> None:
        self._address = urlsplit(url)
        self._keeps = keeps
        self._connection = self._connect()

    def time_ms(self, body: dict[str, Any], status: int) -> float:
        """Until the first byte of the answer's body, a new connection included."""
        began = time.perf_counter()
        if not self._keeps:
            self._connection.close()
            self._connection = self._connect()
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = self._connection.getresponse()
        response.read(1)
        took_ms = (time.perf_counter() - began) * 1000
        rest = response.read()
        if response.status != status:
            raise SystemExit(f"status {response.status}, expected {status}: {rest[:500]!r}")
        return took_ms

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=TIMEOUT_S)


def asked(name: str, number: int) -> tuple[dict[str, Any], int]:
    """A body, different for every number, and the status of its answer."""
    if name == "error":
        return {"model": "tiny", "prompt": "The ferry", "max_tokens": -1}, 400
    return {"model": "tiny", "prompt": f"{number}: the ferry leaves", "max_tokens": 4, "stream": True}, 200


def measure(urls: dict[str, str], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for place, url in urls.items():
        for name in ("error", "first token"):
            rows.append(row(place, name, lambda keeps, url=url: Client(url, keeps), repeats))
            say(json.dumps(rows[-1]))
    return rows


def row(place: str, name: str, client: Callable[[bool], Client], repeats: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"new": [], "kept alive": []}
    clients = {"new": client(False), "kept alive": client(True)}
    for number in range(WARM_UP + repeats):
        for kind, each in clients.items():
            body, status = asked(name, number)
            took_ms = each.time_ms(body, status)
            if number >= WARM_UP:
                times[kind].append(took_ms)
    medians = {kind: round(statistics.median(values), 2) for kind, values in times.items()}
    return {"to": place, "what": name, "ms": medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=51)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = ("--model", str(ensure_tiny_model(folder, say)), "--served-name", "tiny")
        with Fleet(FleetOptions(1, 1, arguments, 16, 16, 0, 0), folder) as fleet:
            fleet.start()
            rows = measure({"engine": fleet.decode_urls[0], "router": fleet.url}, options.repeats)
    print(json.dumps({"machine": machine(), "repeats": options.repeats, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
