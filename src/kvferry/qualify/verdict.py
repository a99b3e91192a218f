"""What all outcomes mean, in plain words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from kvferry.qualify.expected import BY_KIND
from kvferry.qualify.outcome import Outcome, Result

FORMAT: Final = 2
"""The version of the JSON. It changes when a field does."""
DESCRIPTIONS: Final = ("machine", "UCX settings")
IN_HOST: Final = ("transports in host memory",)
"""Checks that touch no device, whatever its kind."""
ACCELERATORS: Final = {"cuda": "CUDA", "rocm": "ROCm", "xpu": "Intel XPU", "tpu": "TPU"}


class Report(msgspec.Struct, frozen=True):
    """All that is told of one machine. `device` is the kind that was checked."""

    format: int
    kvferry: str
    device: str
    verdict: str
    result: Result
    outcomes: tuple[Outcome, ...]
    seconds: float


def report_of(version: str, device: str, outcomes: Sequence[Outcome], seconds: float) -> Report:
    """Return the report of one machine, with the verdict."""
    verdict = " ".join(_sentences(device, outcomes))
    return Report(FORMAT, version, device, verdict, worst(device, outcomes), tuple(outcomes), round(seconds, 1))


def worst(device: str, outcomes: Sequence[Outcome]) -> Result:
    """The worst result: failed before slow before passed, or skipped if nothing was checked of the kind of device."""
    found = {outcome.result for outcome in _evidence(device, outcomes)}
    return next((result for result in (Result.FAILED, Result.SLOW, Result.PASSED) if result in found), Result.SKIPPED)


def _evidence(device: str, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes that count. A description of the machine says nothing for it, only against it; nor does a check of
    its host memory say anything for an accelerator."""
    silent = (*DESCRIPTIONS, *IN_HOST) if device in ACCELERATORS else DESCRIPTIONS
    return [each for each in outcomes if each.check not in silent or each.result is Result.FAILED]


def _left_out(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What was not checked, though it could be on such a device."""
    for each in outcomes:
        if each.result is Result.SKIPPED and each.applies:
            yield each.check
        yield from each.left_out


def _sentences(device: str, outcomes: Sequence[Outcome]) -> Iterator[str]:
    found = _evidence(device, outcomes)
    by_result = {result: [each.check for each in found if each.result is result] for result in Result}
    left_out = list(_left_out(outcomes))
    name = ACCELERATORS.get(device, "")
    where = f"this machine's {name} devices" if name else "this machine's host memory"
    right = f"{'What was checked of ' if left_out else ''}kvferry is right with {where}"
    if failures := by_result[Result.FAILED]:
        as_set_up = "as they are set up" if name else "as it is set up"
        yield f"Do not use kvferry with {where} {as_set_up}: {_listed(failures)} failed."
    elif slow := by_result[Result.SLOW]:
        yield f"{right}, but slower than it should be: {_listed(slow)}."
    elif by_result[Result.PASSED]:
        is_expected = device in BY_KIND and any(figure.least for each in found for figure in each.figures)
        yield f"{right}, and as fast as is expected." if is_expected else f"{right}."
    elif any(each.check in IN_HOST and each.result is Result.PASSED for each in outcomes):
        yield f"Nothing was checked on {where}. What was checked of kvferry is right with the memory of their host."
    else:
        yield "Nothing was checked."
    if not name:
        yield "No accelerator was checked: this says nothing of devices."
    if left_out:
        yield f"Not checked: {_listed(left_out)}; the reasons are below."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
