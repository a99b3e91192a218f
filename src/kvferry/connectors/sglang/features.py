"""What differs between the versions of SGLang that are supported. Each is asked for what it has; no numbers of versions
are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from inspect import Parameter, isfunction, signature
from typing import Any

from kvferry.errors import ConfigurationError

TESTED = "0.5.21 to 0.5.23"
_CONN = "sglang.srt.disaggregation.base.conn"
_DECODE = "sglang.srt.disaggregation.decode"
_SMALLEST = "sglang.srt.disaggregation.fake.conn"


def check_calls(classes: Iterable[type]) -> None:
    """Raises AttributeError for an SGLang that does not call a backend with what we need, and TypeError for one that
    calls ours in a way that they do not know, which would end a scheduler at its first request."""
    # Earlier versions do not say how many tokens they send.
    _check_parameter("num_kv_tokens", import_module(_CONN).BaseKVSender.send)
    # Earlier versions free the pages of a request that fails on one rank while others may still be written to.
    import_module(_SMALLEST).FakeKVReceiver.ensure_abort_notified  # noqa: B018
    for ours in classes:
        _check_methods(ours)


def idleness_of(scheduler: Any) -> Callable[[], bool]:
    """How to ask whether SGLang computes nothing, whatever is transferred. One that cannot be asked always does."""
    ask = getattr(scheduler, "is_fully_idle", None)
    if ask is None or "for_health_check" not in signature(ask).parameters:
        return lambda: False
    return partial(ask, for_health_check=True)


def forward_stream_of(scheduler: Any) -> Any:
    """The stream of the device that SGLang computes on; None where that is the current one. It is known only once a
    scheduler serves. Raises ConfigurationError for a scheduler that overlaps its steps and does not say where."""
    found = getattr(scheduler, "forward_stream", None)
    if found is None and getattr(scheduler, "enable_overlap", True):
        raise ConfigurationError(
            "it cannot be told when SGLang is done with the pages that it gives to a request",
            found="a scheduler that overlaps its steps and has no forward_stream",
            expected=f"SGLang {TESTED}",
            hint="--disable-overlap-schedule, or an SGLang that this kvferry supports",
        )
    return found


def writing_stream_of(scheduler: Any) -> Any:
    """The stream of the device that may still write to pages when SGLang hands them over; None where that is the
    current one. A scheduler that overlaps its steps hands over the pages of a step that it has the results of, and that
    stream has begun the next one."""
    return None if getattr(scheduler, "enable_overlap", False) else forward_stream_of(scheduler)


def ranks_to_agree(transfer_queue: Any) -> Any:
    """The group of ranks that free the pages of a failed request together, where that is left to a backend; None where
    SGLang sees to it, or there is one rank.

    Ranks with other free pages than their peers begin other requests, and wait for each other in vain.
    """
    if hasattr(import_module(_DECODE), "all_reduce_flags"):
        return None
    group = transfer_queue.gloo_group
    return group if group.size() > 1 else None


def on_all_ranks(is_so: bool, group: Any) -> bool:
    """Whether it is so on every rank. All of them have to ask, in the same order."""
    # `kvferry serve` reads this module too, in a process that needs no torch.
    import torch
    import torch.distributed as dist

    flag, options = torch.tensor([is_so], dtype=torch.int32), dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    group.allreduce([flag], options).wait()
    return bool(flag.item())


def _check_parameter(name: str, method: Callable[..., Any]) -> None:
    if name not in signature(method).parameters:
        raise AttributeError(f"{method.__qualname__} has no parameter {name}")


def _check_methods(ours: type) -> None:
    base = ours.__mro__[1]
    if missing := getattr(ours, "__abstractmethods__", None):
        raise TypeError(f"{base.__name__} has methods that are not known: {', '.join(sorted(missing))}")
    for name, theirs in vars(base).items():
        if not isfunction(theirs):
            continue
        parameters = signature(getattr(ours, name)).parameters
        takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
        unknown = signature(theirs).parameters.keys() - parameters.keys()
        if unknown and not takes_all:
            raise TypeError(f"{theirs.__qualname__} has parameters that are not known: {', '.join(sorted(unknown))}")
