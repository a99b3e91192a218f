"""A plug-in of SGLang that `sglang_nixl.py` loads into its servers: it writes down when, and how much.

Each process appends to a file of its own below MEASURING_FOLDER, an event a line, with times of the system's monotonic
clock, which all processes share. Whatever the backend, two of them are SGLang's own times of a request, read where it
has just taken them:

* `computed`: `prefill_finished_time` of the prefill's scheduler, the step that computed the last tokens is over;
* `ready`: `wait_queue_entry_time` of the decode's scheduler, the cache is there on every rank, and the request may
  join the next step.

NIXL's agent is made to run on CPUs: SGLang says that its pools are memory of GPUs, whatever they are.
"""

import functools
import importlib
import json
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

_PREFILL = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk"
_DECODE = "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req"
_NIXL = "nixl_cu13"
# Methods of NIXL's agent that are told where memory is.
_PLACED = ("register_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist")
_lock = threading.Lock()
# By the number of a prepared list.
_row_bytes: dict[int, int] = {}


def register() -> None:
    """The entry point: runs in every process of SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_PREFILL, _sent, HookType.AFTER)
    HookRegistry.register(_DECODE, _committed, HookType.AFTER)
    if os.environ["MEASURING_BACKEND"] == "nixl":
        _measure_nixl()
    else:
        from kvferry.connectors.sglang.rank import Rank

        Rank.hear = _hears(Rank.hear)


def _write(what: str, **facts: object) -> None:
    line = json.dumps({"what": what, **facts})
    with _lock, open(f"{os.environ['MEASURING_FOLDER']}/{os.getpid()}.jsonl", "a") as events:
        events.write(line + "\n")


def _sent(_: object, scheduler: Any, req: Any, last_chunk: bool = False, end_idx: int | None = None) -> None:
    if last_chunk:
        _write("computed", room=req.bootstrap_room, at=req.time_stats.prefill_finished_time)


def _committed(_: object, queue: Any, decode_req: Any, *args: object) -> None:
    if decode_req.kv_receiver is None:
        _write("ready", room=decode_req.req.bootstrap_room, at=decode_req.req.time_stats.wait_queue_entry_time)


def _hears(original: Callable[..., Any]) -> Callable[..., Any]:
    """What kvferry's agent reports of a fetch."""

    def hear(rank: Any, notice: Any) -> None:
        original(rank, notice)
        report = getattr(notice, "report", None)
        if report is not None:
            _write(
                "moved",
                at=time.perf_counter(),
                descriptors=report.num_rows,
                bytes=report.num_bytes,
                over=f"{report.transport}, {report.strategy}",
                phases_ms={name: round(took_s * 1000, 3) for name, took_s in report.phases_s.items()},
            )

    return hear


def _measure_nixl() -> None:
    _name_nixl()
    agent = importlib.import_module(f"{_NIXL}._api").nixl_agent
    for name in _PLACED:
        setattr(agent, name, _on_host(getattr(agent, name)))
    agent.prep_xfer_dlist = _prepares(agent.prep_xfer_dlist)
    agent.make_prepped_xfer = _counts(agent.make_prepped_xfer, _of_prepared)
    agent.initialize_xfer = _counts(agent.initialize_xfer, _of_list)


def _name_nixl() -> None:
    """The package `nixl` only chooses among the builds for CUDA 12 and 13: where it is not installed, this is it."""
    try:
        importlib.import_module("nixl")
    except ImportError:
        chosen = sys.modules["nixl"] = types.ModuleType("nixl")
        chosen.__path__ = []
        for name in ("_api", "_bindings"):
            sys.modules[f"nixl.{name}"] = importlib.import_module(f"{_NIXL}.{name}")
            setattr(chosen, name, sys.modules[f"nixl.{name}"])


def _on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def placed(agent: Any, *args: Any, **more: Any) -> Any:
        args = tuple("DRAM" if isinstance(each, str) and each == "VRAM" else each for each in args)
        more = {name: "DRAM" if isinstance(value, str) and value == "VRAM" else value for name, value in more.items()}
        return original(agent, *args, **more)

    return placed


def _prepares(original: Callable[..., Any]) -> Callable[..., Any]:
    """Remember how long the rows of a prepared list are: in each of SGLang's lists they are all alike."""

    @functools.wraps(original)
    def prepare(agent: Any, name: str, rows: Any, *args: Any, **more: Any) -> Any:
        handle = original(agent, name, rows, *args, **more)
        lengths = {int(length) for length in rows[:, 1]} if hasattr(rows, "shape") else set()
        _row_bytes[handle._handle] = lengths.pop() if len(lengths) == 1 else 0
        return handle

    return prepare


def _of_prepared(local: Any, indices: Any, *_: object) -> tuple[int, int]:
    return len(indices), len(indices) * _row_bytes[local._handle]


def _of_list(rows: Any, *_: object) -> tuple[int, int]:
    count = rows.descCount()
    return count, sum(rows[number][1] for number in range(count))


def _counts(original: Callable[..., Any], size_of: Callable[..., tuple[int, int]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(agent: Any, operation: str, *args: Any, **more: Any) -> Any:
        began = time.perf_counter()
        handle = original(agent, operation, *args, **more)
        at = time.perf_counter()
        descriptors, num_bytes = size_of(*args)
        made_ms = round((at - began) * 1000, 3)
        _write("moved", at=at, descriptors=descriptors, bytes=num_bytes, over="NIXL", phases_ms={"made": made_ms})
        return handle

    return make
