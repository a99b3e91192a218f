"""What engines tell of one request besides its answer: vLLM in its metrics, our own engine in `/kvferry/info`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from kvferry.cli.http_get import get
from kvferry.cli.scrape import Reading, reading_of
from kvferry.errors import RequestError
from kvferry.system import os_error_text

TIMEOUT_S = 30.0
RECEIVED = "vllm:external_prefix_cache_hits_total"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
FAILED = "vllm:nixl_num_failed_transfers_total"
PHASES = "vllm:kvferry_phase_seconds_sum"


def read(urls: Iterable[str]) -> Reading:
    """The counters of these engines, added up. Raises RequestError when one does not answer."""
    return reading_of("\n".join(_get(f"{url}/metrics").decode() for url in urls), time.monotonic())


def report_between(before: Reading, after: Reading) -> dict[str, Any]:
    """The report of the one request that was served between two readings, in the words of our own engine's.

    vLLM does not tell by which strategy or why a transport was taken, so these are not in it.
    """

    def total(name: str, **labels: str) -> int:
        return int(after.total(name, **labels) - before.total(name, **labels))

    def seconds_by(label: str) -> dict[str, float]:
        seconds = {
            value: now - before.total(PHASES, **{label: value}) for value, now in after.by(label, PHASES).items()
        }
        return {value: spent for value, spent in seconds.items() if spent}

    return {
        "tokens_received": total(RECEIVED),
        "tokens_computed": total(BY_SOURCE, source="local_compute"),
        "bytes": total("vllm:nixl_bytes_transferred_sum"),
        "descriptors": total("vllm:nixl_num_descriptors_sum"),
        "transport": ", ".join(seconds_by("transport")),
        "phases_s": seconds_by("phase"),
        "recomputed": "vLLM has counted a failed transfer" if total(FAILED) else "",
    }


def why_chosen(urls: Iterable[str], transport: str) -> str:
    """What the first engine measured that has met another over this transport; empty when none has.

    Whoever moves the bytes has measured, which may be either side. Raises RequestError when an engine does not answer.
    """
    peers = (peer for url in urls for peer in json.loads(_get(f"{url}/kvferry/info")).get("peers", ()))
    return next((str(peer["choice"]) for peer in peers if peer["transport"] == transport), "")


def _get(url: str) -> bytes:
    try:
        return get(url, TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise RequestError(f"no answer from {url}", found=os_error_text(error)) from error
