"""A slow way that nobody asked for is noticed, and so is a direction that is far slower than the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.plan.programs.copies import Direction
from kvferry.transport.machine.facts import Place
from kvferry.transport.selection.diagnosis import LocalContext, diagnose, is_far_slower
from kvferry.transport.selection.measurement import UNMEASURED, Measurement, Rates

HERE, RDMA = LocalContext("a", False), LocalContext("a", True)
READ, WRITE = Direction.READ, Direction.WRITE


def measured(name: str, *carriers: str, writing: Rates = UNMEASURED) -> Measurement:
    return Measurement(name, 8.0, 4.0, 1e-5, "", writing, carriers)


@pytest.mark.parametrize(
    ("ours", "theirs", "place"),
    [("a", "a", Place.SAME_HOST), ("a", "b", Place.OTHER_HOST), ("", "b", Place.UNKNOWN), ("a", "", Place.UNKNOWN)],
)
def test_where_a_peer_is(ours: str, theirs: str, place: Place) -> None:
    assert LocalContext(ours).place_of(theirs) is place


@pytest.mark.parametrize(
    ("found", "place", "context", "part"),
    [
        (measured("nixl", "tcp/lo"), Place.SAME_HOST, HERE, "a transport within the host"),
        (measured("nixl", "tcp/lo", "tcp/eth0"), Place.SAME_HOST, RDMA, "tcp/lo and tcp/eth0"),
        (measured("tcp", "tcp"), Place.SAME_HOST, HERE, "tcp over tcp"),
        (measured("nixl", "tcp/eth0"), Place.OTHER_HOST, RDMA, "RDMA"),
        (measured("tcp", "tcp"), Place.OTHER_HOST, RDMA, "RDMA"),
        (measured("nixl", "tcp/eth0"), Place.UNKNOWN, RDMA, "RDMA"),
    ],
)
def test_a_silent_fallback_is_told(found: Measurement, place: Place, context: LocalContext, part: str) -> None:
    (finding,) = diagnose(found, READ, place, context)
    assert part in str(finding)
    assert finding.severity == "warning"
    assert finding.hint


@pytest.mark.parametrize(
    ("found", "place", "context"),
    [
        (measured("shm", "shm"), Place.SAME_HOST, HERE),
        (measured("nixl", "cma/memory"), Place.SAME_HOST, HERE),
        (measured("nixl", "cuda_ipc/cuda"), Place.SAME_HOST, RDMA),
        (measured("nixl", "rc_mlx5/mlx5_0:1"), Place.SAME_HOST, RDMA),
        (measured("nixl", "rc_mlx5/mlx5_0:1", "tcp/eth0"), Place.OTHER_HOST, RDMA),
        (measured("nixl", "srd/rdmap0s6:1"), Place.OTHER_HOST, RDMA),
        (measured("nixl", "tcp/eth0"), Place.OTHER_HOST, HERE),
        (measured("tcp", "tcp"), Place.OTHER_HOST, HERE),
        (measured("nixl", "tcp/eth0"), Place.UNKNOWN, HERE),
        (measured("nixl"), Place.SAME_HOST, RDMA),
        (measured("tcp", "tcp"), Place.SAME_HOST, LocalContext("a", True, "tcp")),
    ],
)
def test_what_is_as_it_should_be_is_not(found: Measurement, place: Place, context: LocalContext) -> None:
    assert diagnose(found, READ, place, context) == ()


@pytest.mark.parametrize(
    ("slow", "fast", "may_switch_direction", "hint"),
    [
        (READ, WRITE, False, "--transfer-direction push, or auto"),
        (READ, WRITE, True, "asked to write instead"),
        (WRITE, READ, False, "--transfer-direction pull, or auto"),
        (WRITE, READ, True, "--transfer-direction pull, or auto"),
    ],
)
def test_a_direction_that_is_far_slower_is_told_where_it_is_used(
    slow: Direction, fast: Direction, may_switch_direction: bool, hint: str
) -> None:
    rates = {slow: Rates(0.5, 0.4, 1e-4), fast: Rates(49.0, 40.0, 1e-5)}
    reading = rates[READ]
    found = Measurement("shm", reading.gigabytes_per_s, reading.row_gigabytes_per_s, 1e-4, "", rates[WRITE], ("shm",))
    (finding,) = diagnose(found, slow, Place.SAME_HOST, replace(HERE, may_switch_direction=may_switch_direction))
    assert "99 times slower" in finding.what
    assert finding.severity == "warning"
    assert hint in finding.hint
    assert is_far_slower(found, slow)
    assert not is_far_slower(found, fast)
    assert found.is_asymmetric
    assert diagnose(found, fast, Place.SAME_HOST, HERE) == ()


def test_directions_that_were_not_measured_cannot_be_compared() -> None:
    assert diagnose(measured("shm", "shm"), READ, Place.SAME_HOST, HERE) == ()
    failed = Rates(0.0, 0.0, float("inf"), "no answer")
    assert diagnose(measured("shm", "shm", writing=failed), READ, Place.SAME_HOST, HERE) == ()
