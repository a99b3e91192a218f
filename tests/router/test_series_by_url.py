"""Whose metrics have a name: so many instances and a quarter as many pairs, and only as long as they are there."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Gauge

from kvferry.router.policy.records import Instance, Role
from kvferry.router.telemetry.series_by_url import OTHER, SeriesByUrl

PREFILL, DECODE = Instance("http://p", Role.PREFILL), Instance("http://d", Role.DECODE)


@pytest.fixture
def gauge() -> Gauge:
    return Gauge("moved", "Caches.", ["prefill", "decode"], registry=CollectorRegistry())


def test_a_pair_that_has_left_makes_room_for_another():
    series = SeriesByUrl(4)
    other = Instance("http://d2", Role.DECODE)
    for instance in (PREFILL, DECODE, other):
        assert series.join(instance)
    assert series.names(PREFILL.url, DECODE.url) == (PREFILL.url, DECODE.url)
    assert series.names(PREFILL.url, other.url) == (OTHER, OTHER)
    series.leave(DECODE)
    assert series.names(PREFILL.url, other.url) == (PREFILL.url, other.url)


def test_the_series_of_a_pair_go_once(gauge):
    series = SeriesByUrl(4)
    for instance in (PREFILL, DECODE):
        series.join(instance)
    series.note(gauge, (PREFILL.url, DECODE.url))
    assert series.leave(PREFILL) == [(gauge, (PREFILL.url, DECODE.url))]
    assert series.leave(DECODE) == []


def test_one_without_a_name_takes_nobodys_along(gauge):
    """The same address may have both roles, and room for one of them only."""
    series = SeriesByUrl(1)
    again = Instance(PREFILL.url, Role.DECODE)
    assert series.join(PREFILL)
    assert not series.join(again)
    series.note(gauge, (PREFILL.url, ""))
    assert series.leave(again) == []
    assert series.name(PREFILL.url) == PREFILL.url
    assert series.leave(PREFILL) == [(gauge, (PREFILL.url, ""))]
    assert series.name(PREFILL.url) == OTHER
