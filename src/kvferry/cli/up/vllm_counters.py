"""What vLLM's own metrics say about one request: its answer has no report, so two readings are compared."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvferry.errors import RequestError
from kvferry.system.os_errors import os_error_text

Labels = tuple[tuple[str, str], ...]
Reading = Mapping[tuple[str, Labels], float]
"""Samples by name and labels, added up over engines."""

ANSWER_S = 30.0
RECEIVED = "vllm:external_prefix_cache_hits_total"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
FAILED = "vllm:nixl_num_failed_transfers_total"
PHASES = "vllm:kvferry_phase_seconds_sum"


def read(urls: Iterable[str]) -> Reading:
    """The counters of these engines. Raises RequestError when one does not answer."""
    reading: dict[tuple[str, Labels], float] = {}
    for url in urls:
        for family in text_string_to_metric_families(_metrics(url)):
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                reading[key] = reading.get(key, 0.0) + sample.value
    return reading


def report_between(before: Reading, after: Reading) -> dict[str, Any]:
    """The report of the one request that was served between two readings, in the words of our own engine's.

    vLLM does not tell by which strategy or why a transport was taken, so these are not in it.
    """
    change = {key: value - before.get(key, 0.0) for key, value in after.items() if value != before.get(key, 0.0)}

    def total(name: str, **labels: str) -> int:
        return int(sum(v for (n, ls), v in change.items() if n == name and labels.items() <= dict(ls).items()))

    phases = [(dict(labels), seconds) for (name, labels), seconds in change.items() if name == PHASES]
    return {
        "tokens_received": total(RECEIVED),
        "tokens_computed": total(BY_SOURCE, source="local_compute"),
        "bytes": total("vllm:nixl_bytes_transferred_sum"),
        "descriptors": total("vllm:nixl_num_descriptors_sum"),
        "transport": ", ".join(sorted({labels["transport"] for labels, _ in phases})),
        "phases_s": {labels["phase"]: seconds for labels, seconds in phases},
        "recomputed": "vLLM has counted a failed transfer" if total(FAILED) else "",
    }


def _metrics(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_S) as answer:
            text: str = answer.read().decode()
            return text
    except OSError as error:
        raise RequestError(f"no metrics from {url}", found=os_error_text(error)) from error
