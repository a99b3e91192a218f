"""A run in figures: of all its requests, of the times around each incident, and of what is the scarcest. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvferry.simulate.incidents import Incident, Rollout
from kvferry.simulate.outcome import Figures, Outcome, figures_of
from kvferry.simulate.simulation import Result, Sample

# A time is as good as before if its share of good requests is lower by at most this.
TOLERANCE = 0.05
# So many parts of a run are looked at, to see when it is as good as before.
NUM_WINDOWS = 60


@dataclass(frozen=True, slots=True)
class Resource:
    """What may be scarce, and which part of it is used: 1 is all of it. `words` say of what that is a part."""

    name: str
    share: float
    words: str


@dataclass(frozen=True, slots=True)
class Course:
    """The figures before an incident, until it is over and everything is as before, and after that. Several
    `incidents` that happen at one time are one here. `recovery_s` is how long it took from the beginning: 0 where
    nothing was ever worse, infinite where the last requests were still worse off, None where no request that counts had
    ended before it, or none came after it began: there is nothing to compare with."""

    incidents: tuple[Incident, ...]
    ends_s: float
    before: Figures
    during: Figures
    after: Figures
    recovery_s: float | None

    @property
    def begins_s(self) -> float:
        return self.incidents[0].begins_s

    @property
    def words(self) -> str:
        return "; ".join(incident.words for incident in self.incidents)


@dataclass(frozen=True, slots=True)
class Report:
    """`windows` are equal parts of the run. `resources` are the scarcest first; shares are means over the time that
    counts."""

    result: Result
    figures: Figures
    windows: tuple[Figures, ...]
    resources: tuple[Resource, ...]
    courses: tuple[Course, ...]


def report_of(result: Result) -> Report:
    """The report of a run. Its figures are those of requests that arrived after the warm-up."""
    setting = result.setting
    begins_s, ends_s = setting.times.warm_up_s, setting.duration_s
    figures = figures_of(result.outcomes, setting.slo, begins_s, ends_s)
    together = _together(result)
    # Incidents are looked at from the end of those before until the next ones begin.
    nexts = [*(incidents[0].begins_s for incidents in together), ends_s][1:]
    courses: list[Course] = []
    for incidents, next_s in zip(together, nexts, strict=True):
        first_s = courses[-1].during.ends_s if courses else begins_s
        # What comes in the warm-up does not count, whatever happens there.
        edges = first_s, max(incidents[0].begins_s, begins_s), max(next_s, begins_s)
        courses.append(_course(result, incidents, edges))
    windows = _windows(result.outcomes, result, 0.0, ends_s)
    return Report(result, figures, tuple(windows), _resources(result, figures), tuple(courses))


def _together(result: Result) -> list[tuple[Incident, ...]]:
    """The incidents in order. Those that begin together, or before the end of another one, are one: nobody can tell
    what follows from which. One for good ends where the next one begins."""
    found: list[tuple[Incident, ...]] = []
    latest_s = -math.inf
    for incident in sorted(result.setting.incidents, key=lambda incident: incident.begins_s):
        if found and (incident.begins_s < latest_s or incident.begins_s == found[-1][0].begins_s):
            found[-1] = (*found[-1], incident)
        else:
            found.append((incident,))
        ends_s = _ends_s(result, incident)
        latest_s = max(latest_s, ends_s if math.isfinite(ends_s) else incident.begins_s)
    return found


def _ends_s(result: Result, incident: Incident) -> float:
    return result.ended.get(incident, incident.ends_s)


def _resources(result: Result, figures: Figures) -> tuple[Resource, ...]:
    setting = result.setting
    samples = [sample for sample in result.samples if sample.at_s > setting.times.warm_up_s]
    links = ("the busiest of the engines' links", "the busiest of the racks' uplinks")
    found = [
        Resource("decode places", _mean(samples, "used_decode"), "answers and their caches, of what an engine takes"),
        Resource("engine link", result.busiest_link, f"{links[0]}: time in which it carries something"),
        Resource("rack uplink", result.busiest_uplink, f"{links[1]}: time in which it carries something"),
    ]
    if setting.fleet.num_prefill:
        words = "time in which an engine computes, on average"
        found.append(Resource("prefill engines", _mean(samples, "busy_prefill"), words))
    if math.isfinite(setting.slo.itl_s) and figures.answered_itl_s is not None:
        share = figures.answered_itl_s / setting.slo.itl_s
        found.append(Resource("decode steps", share, "mean time between tokens, of its limit"))
    return tuple(sorted(found, key=lambda each: -each.share))


def _mean(samples: Sequence[Sample], name: str) -> float:
    return sum(getattr(sample, name) for sample in samples) / len(samples) if samples else 0.0


def _course(result: Result, incidents: tuple[Incident, ...], around: tuple[float, float, float]) -> Course:
    """The course of incidents between those before and the next ones. Requests that were open when they began met
    them."""
    slo, outcomes = result.setting.slo, result.outcomes
    first_s, begins_s, last_s = around
    before = figures_of([each for each in outcomes if each.ended_s < begins_s], slo, first_s, begins_s)
    recovery_s = _recovery_s(before, _windows(outcomes, result, begins_s, last_s))
    ends_s = max(_ends_s(result, incident) for incident in incidents)
    over_s = _over_s(incidents, ends_s, recovery_s, around)
    met = [each for each in outcomes if each.ended_s >= begins_s]
    during = replace(figures_of(met, slo, first_s, over_s), begins_s=begins_s)
    after = figures_of(outcomes, slo, over_s, last_s)
    # They are fewer, or more, than came in that time: a rate of them would be none.
    before, during = (_at_rate(figures, outcomes) for figures in (before, during))
    return Course(incidents, ends_s, before, during, after, recovery_s)


def _at_rate(figures: Figures, outcomes: Sequence[Outcome]) -> Figures:
    """The figures with the number of all requests that arrived in their time."""
    num_arrived = sum(figures.begins_s <= each.arrived_s < figures.ends_s for each in outcomes)
    return replace(figures, num_arrived=num_arrived)


def _recovery_s(before: Figures, windows: Sequence[Figures]) -> float | None:
    """How long it took until all windows were as good as before; None where no request came before, or none after."""
    # A window in which no request came says nothing: that the last one is empty is no recovery.
    telling = [window for window in windows if window.num_requests]
    if not before.num_requests or not telling:
        return None
    worse = [window for window in telling if window.good_share < before.good_share - TOLERANCE]
    if worse and worse[-1] is telling[-1]:
        return math.inf
    return worse[-1].ends_s - windows[0].begins_s if worse else 0.0


def _over_s(
    incidents: Sequence[Incident], ends_s: float, recovery_s: float | None, around: tuple[float, float, float]
) -> float:
    """When incidents are over and all is as before. One for good is over when requests do not suffer any more; where
    they never did, or nobody can tell, it lasts."""
    _, begins_s, last_s = around
    if math.isfinite(ends_s) or any(isinstance(incident, Rollout) for incident in incidents):
        return min(max(begins_s + (recovery_s or 0.0), ends_s), last_s)
    return min(begins_s + recovery_s, last_s) if recovery_s else last_s


def _windows(outcomes: Sequence[Outcome], result: Result, begins_s: float, ends_s: float) -> list[Figures]:
    """The figures of equal parts of this time."""
    each_s = result.setting.duration_s / NUM_WINDOWS
    number = max(round((ends_s - begins_s) / each_s), 1)
    edges = [begins_s + (ends_s - begins_s) * edge / number for edge in range(number + 1)]
    return [figures_of(outcomes, result.setting.slo, *times) for times in pairwise(edges)]
