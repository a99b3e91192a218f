"""What happens to a fleet, in words: a rack dies, a link is slow, a rollout, a hot prefix. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

from kvferry.errors import ConfigurationError

NUMBER = r"(\d+(?:\.\d+)?)"
FORMS = (
    "rack 3 dies at 60",
    "rack 3 dies from 60 to 120",
    "link of rack 2 at 10% from 60 to 120",
    "rollout from 60",
    "rollout from 60 by 4",
    "hot prefix 40% from 60",
    "hot prefix 40% of 2048 tokens from 60 to 120",
)
HOT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Incident:
    """What happens from `begins_s` to `ends_s`, in seconds from the start; inf: for good. `words` are the user's."""

    words: str
    begins_s: float
    ends_s: float


@dataclass(frozen=True, slots=True)
class RackDies(Incident):
    """A rack's hosts say nothing any more. At the end they are back, and engines start on them."""

    rack: int


@dataclass(frozen=True, slots=True)
class SlowLink(Incident):
    """A rack's uplink has `share` of its rate, in both directions."""

    rack: int
    share: float


@dataclass(frozen=True, slots=True)
class Rollout(Incident):
    """Every engine is drained and replaced, `at_once` at a time. It ends when the last one is there."""

    at_once: int


@dataclass(frozen=True, slots=True)
class HotPrefix(Incident):
    """`share` of the prompts begin with the same `num_tokens` tokens. Several at one time have different ones."""

    share: float
    num_tokens: int


Kind = TypeVar("Kind", bound=Incident)


def incident_named(text: str) -> Incident:
    """The incident of a text in one of the `FORMS`. Raises ConfigurationError."""
    words = " ".join(text.split())
    for pattern, make in _PATTERNS.items():
        if found := re.fullmatch(pattern, words, re.ASCII):
            incident = make(words, found)
            if not incident.begins_s < incident.ends_s:
                raise ConfigurationError("an incident must end after it begins", found=words, expected="from 60 to 120")
            return incident
    raise ConfigurationError("unknown incident", found=text, expected="; ".join(FORMS))


def check(incidents: Sequence[Incident], num_racks: int, duration_s: float) -> None:
    """Raises ConfigurationError for a rack or an uplink that is not there, for what happens after the end, and for
    incidents at one time of which one would undo the other."""
    for incident in incidents:
        if isinstance(incident, RackDies | SlowLink) and incident.rack >= num_racks:
            expected = f"a rack from 0 to {num_racks - 1}"
            raise ConfigurationError("the fleet does not have this rack", found=incident.words, expected=expected)
        if isinstance(incident, SlowLink) and num_racks == 1:
            what, expected = "a fleet of one rack uses no uplink", "a fleet of two racks or more"
            raise ConfigurationError(what, found=incident.words, expected=expected, hint="such as --per-rack 8")
        if incident.begins_s >= duration_s:
            expected = f"a time before {duration_s:g} s, when the last request comes"
            raise ConfigurationError("an incident comes too late", found=incident.words, expected=expected)
    _check_apart(of_kind(incidents, RackDies))
    _check_apart(of_kind(incidents, SlowLink))
    _check_shares(of_kind(incidents, HotPrefix))


def _check_apart(incidents: Sequence[RackDies | SlowLink]) -> None:
    """Raises ConfigurationError where the end of one would be in the middle of another one."""
    for one, other in combinations(incidents, 2):
        if one.rack == other.rack and one.begins_s < other.ends_s and other.begins_s < one.ends_s:
            raise ConfigurationError(
                "a rack has two incidents of one kind at a time",
                found=f"{one.words}; {other.words}",
                expected="the end of one before the beginning of the other",
            )


def _check_shares(incidents: Sequence[HotPrefix]) -> None:
    """Raises ConfigurationError where more than all prompts would have a hot beginning."""
    for latest in incidents:
        at_once = [each for each in incidents if each.begins_s <= latest.begins_s < each.ends_s]
        if sum(each.share for each in at_once) > 1 + 1e-9:
            raise ConfigurationError(
                "a prompt cannot have two beginnings",
                found="; ".join(each.words for each in at_once),
                expected="at most 100% in all at one time",
            )


def of_kind(incidents: Iterable[Incident], kind: type[Kind]) -> tuple[Kind, ...]:
    return tuple(each for each in incidents if isinstance(each, kind))


def _times(begins: str, ends: str | None) -> tuple[float, float]:
    return float(begins), float(ends) if ends else math.inf


def _share(words: str, percent: str) -> float:
    share = float(percent) / 100
    if not 0 < share <= 1:
        raise ConfigurationError("a share must be above 0% and at most 100%", found=words, expected="such as 40%")
    return share


def _rollout(words: str, found: re.Match[str]) -> Incident:
    at_once = int(found[2] or 1)
    if not at_once:
        raise ConfigurationError("a rollout replaces engines", found=words, expected="by 1 or more at a time")
    return Rollout(words, *_times(found[1], None), at_once)


_PATTERNS: dict[str, Callable[[str, re.Match[str]], Incident]] = {
    rf"rack (\d{{1,6}}) dies at {NUMBER}": lambda words, f: RackDies(words, *_times(f[2], None), int(f[1])),
    rf"rack (\d{{1,6}}) dies from {NUMBER} to {NUMBER}": lambda words, f: RackDies(
        words, *_times(f[2], f[3]), int(f[1])
    ),
    rf"link of rack (\d{{1,6}}) at {NUMBER}% from {NUMBER}(?: to {NUMBER})?": lambda words, f: SlowLink(
        words, *_times(f[3], f[4]), int(f[1]), _share(words, f[2])
    ),
    rf"rollout from {NUMBER}(?: by (\d{{1,6}}))?": _rollout,
    rf"hot prefix {NUMBER}%(?: of (\d{{1,7}}) tokens)? from {NUMBER}(?: to {NUMBER})?": lambda words, f: HotPrefix(
        words, *_times(f[3], f[4]), _share(words, f[1]), int(f[2] or HOT_TOKENS)
    ),
}
