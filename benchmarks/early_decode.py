"""The time to a first token when decode waits for the end of prefill, and when it begins beside it.

    python benchmarks/early_decode.py > benchmarks/results/early_decode.json

Two embedded engines behind two routers, one with `--early-decode-from`. Real tokens of a small model are computed and
its cache (16 KiB per token) really moves; a step of prefill lasts as long as `--step` says, so that two cores do both.
The two routers take turns with prompts of the same length, one request at a time. *Handover* is what the first token
takes longer than the prefill request alone. Prints JSON; medians in milliseconds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from goodput_model import Shape, make_model
from measuring import machine, say

from kvferry.cli.child_processes import Child
from kvferry.cli.up.fleet import READY_S, Fleet, FleetOptions

WAYS = {
    "pull": ("--transfer-direction", "pull", "--strategy", "direct"),
    "push": ("--transfer-direction", "push", "--strategy", "direct"),
    "pack": ("--strategy", "pack"),
}
SHAPE = Shape(num_layers=2, num_heads=8, head_size=128)
MAX_TOKENS = 8192
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Site:
    """A prefill engine, and two routers before it and its decode engine."""

    prefill_url: str
    late_url: str
    early_url: str


@contextmanager
def site(way: str, options: argparse.Namespace, folder: Path) -> Iterator[Site]:
    logs = folder / way
    logs.mkdir()
    words = ("--model", str(folder / "model"), "--transport", options.transport, "--simulated-step", options.step)
    fleet = FleetOptions(1, 1, (*words, *WAYS[way]), 16, 16, 2 * MAX_TOKENS, 0)
    with Fleet(fleet, logs) as started:
        started.start()
        engines = ("--prefill", started.prefill_urls[0], "--decode", started.decode_urls[0])
        arguments = ("route", "--port", "0", *engines, "--early-decode-from", "1")
        router = Child("early", arguments, logs / "early.log")
        try:
            early_url = str(router.wait_until_ready(time.monotonic() + READY_S)["url"])
            yield Site(started.prefill_urls[0], started.url, early_url)
        finally:
            router.stop()


def seconds(url: str, body: dict[str, Any]) -> float:
    """Until the first byte of a stream's body, or the end of a whole answer; the rest is read."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    began = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        first = response.read(1) if body["stream"] else response.read()
        took_s = time.perf_counter() - began
        rest = response.read()
    finally:
        connection.close()
    if response.status != 200 or b"error" in rest:
        raise SystemExit(f"{url} answered {response.status}: {(first + rest)[:500]!r}")
    return took_s


def measured(site: Site, num_tokens: int, repeats: int, draw: random.Random) -> dict[str, float]:
    found: dict[str, list[float]] = {"prefill": [], "late": [], "early": []}
    for number in range(repeats + 1):
        prompt = [draw.randrange(100, 200) for _ in range(num_tokens)]
        # A prefill request that nobody follows would keep its blocks for as long as its lease lasts.
        alone = {"prompt": prompt, "max_tokens": 1, "stream": False}
        whole = {"prompt": prompt, "max_tokens": 4, "stream": True}
        times = {
            "prefill": seconds(site.prefill_url, alone),
            "late": seconds(site.late_url, whole),
            "early": seconds(site.early_url, whole),
        }
        for name, took_s in times.items() if number else ():
            found[name].append(took_s * 1000)
    return {name: round(statistics.median(values), 2) for name, values in found.items()}


def row(way: str, num_tokens: int, times: dict[str, float]) -> dict[str, Any]:
    handover = {name: round(times[name] - times["prefill"], 2) for name in ("late", "early")}
    say(f"{way} {num_tokens:6} tokens: prefill {times['prefill']:.0f} ms, handover {handover}")
    return {"way": way, "tokens": num_tokens, "ms": times, "handover_ms": handover}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=lambda text: [int(word) for word in text.split(",")], default=[256, 1024, 2048]
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="how the cache moves")
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--step", default="token=0.5ms,step=10ms")
    options = parser.parse_args()
    draw = random.Random(1)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", SHAPE)
        for way in options.ways:
            with site(way, options, folder) as engines:
                rows += [row(way, n, measured(engines, n, options.repeats, draw)) for n in options.tokens]
    settings = {"transport": options.transport, "step": options.step, "repeats": options.repeats}
    print(json.dumps({"machine": machine(), **settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
