"""How many engines of a fleet should compute prompts. Pure but for the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvferry.errors import ConfigurationError
from kvferry.simulate.load import Arrival
from kvferry.simulate.settings import Fleet, Setting
from kvferry.simulate.simulation import simulate
from kvferry.simulate.summary import Report, report_of

# So many numbers are tried at first, over the whole range; then between the neighbours of the best one, and so on.
NUM_TRIED = 7
# Goodputs this close to the best one are as good: there the fleet with the most left of its scarcest resource is best.
AS_GOOD = 0.005


def find_ratio(
    setting: Setting, arrivals: Sequence[Arrival], tell: Callable[[Report], None]
) -> tuple[Report, tuple[Report, ...]]:
    """The best split of the fleet's engines, and all that were tried, by ascending numbers of prefill engines.
    Incidents are left out. `tell` hears of each. Raises ConfigurationError for a fleet that cannot be split."""
    total = setting.fleet.num_engines
    if total < 2:
        raise ConfigurationError("a fleet of one engine has no ratio", found=str(total), expected="2 or more engines")
    tried: dict[int, Report] = {}
    low, high = 1, total - 1
    while True:
        for number in _spread(low, high):
            if number not in tried:
                fleet = Fleet(number, total - number, setting.fleet.per_rack)
                tried[number] = report_of(simulate(replace(setting, fleet=fleet, incidents=()), arrivals))
                tell(tried[number])
        numbers = sorted(tried)
        best = numbers.index(_best(tried))
        low, high = numbers[max(best - 1, 0)], numbers[min(best + 1, len(numbers) - 1)]
        if all(number in tried for number in _spread(low, high)):
            return tried[numbers[best]], tuple(tried[number] for number in numbers)


def _spread(low: int, high: int) -> list[int]:
    """Some numbers from one to the other, both included."""
    steps = min(NUM_TRIED, high - low + 1) - 1
    return sorted({low + round((high - low) * step / steps) for step in range(steps + 1)}) if steps else [low]


def as_good(reports: Iterable[Report]) -> list[Report]:
    """The reports whose goodput is that of the best one, or next to it: all where none has any."""
    found = list(reports)
    most = max(report.figures.goodput for report in found)
    return [report for report in found if report.figures.goodput >= most * (1 - AS_GOOD)]


def _best(tried: dict[int, Report]) -> int:
    best = min(as_good(tried.values()), key=lambda report: report.resources[0].share)
    return best.result.setting.fleet.num_prefill
