"""Which transports are tried, which is taken, and what is said when none can be."""

from __future__ import annotations

import pytest

from kvferry.errors import ConfigurationError, TransportError
from kvferry.plan.programs.copies import Direction
from kvferry.transport.selection.candidates import Choice, candidates, check_own, choose, is_worth_testing
from kvferry.transport.selection.measurement import Measurement, Rates

TRANSPORTS = ("memory", "shm", "cma", "nixl", "tcp")
ALL = dict.fromkeys(TRANSPORTS, "")


def test_auto_tries_what_both_sides_have_best_first() -> None:
    assert candidates("auto", ALL, ALL) == TRANSPORTS
    assert candidates("auto", {**ALL, "shm": "another host"}, {**ALL, "memory": "no"}) == ("cma", "nixl", "tcp")
    assert candidates("auto", {"tcp": "", "quic": ""}, ALL) == ("tcp",)


def test_a_request_is_kept() -> None:
    for name in TRANSPORTS:
        assert candidates(name, ALL, ALL) == (name,)


@pytest.mark.parametrize(
    ("requested", "offered", "available", "parts"),
    [
        ("rdma", ALL, ALL, ["unknown transport 'rdma'", "memory, shm, cma, nixl, tcp", "both sides have"]),
        ("nixl", ALL, {**ALL, "nixl": "not installed"}, ["nixl: not installed (here)", "memory, shm, cma, tcp"]),
        ("shm", {"tcp": ""}, ALL, ["shm: not known (at the peer)", "both sides have tcp"]),
        ("auto", {}, {"tcp": "broken"}, ["no transport works", "tcp: broken (here), not known (at the peer)"]),
    ],
)
def test_what_cannot_work_is_explained(
    requested: str, offered: dict[str, str], available: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        candidates(requested, offered, available)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_the_fastest_that_passed_is_taken() -> None:
    found = [
        Measurement("shm", 9.82, 4.0, 1e-5, ""),
        Measurement("tcp", 1.94, 1.5, 1e-4, ""),
        Measurement("nixl", 41.0, 2.0, 1e-5, "3 of 9 bytes are wrong"),
    ]
    reason = (
        "shm 9.8 GB/s, 4.0 in rows of 4 KiB; tcp 1.9 GB/s, 1.5 in rows of 4 KiB; nixl failed (3 of 9 bytes are wrong)"
    )
    assert choose(found) == Choice("shm", reason)
    assert choose(found[1:]).name == "tcp"


@pytest.mark.parametrize("carriers", [("tcp/eth0",), ("tcp/eth0", "tcp/lo")])
def test_what_may_end_the_source_is_taken_only_where_nothing_else_works(carriers: tuple[str, ...]) -> None:
    """UCX answers reads itself where it has sockets only, and ends the process that cannot be answered for."""
    found = [Measurement("nixl", 9.0, 9.0, 1e-5, "", carriers=carriers), Measurement("tcp", 1.0, 1.0, 1e-5, "")]
    choice = choose(found)
    assert choice.name == "tcp"
    assert choice.reason.endswith("nixl not taken: over UCX's sockets a reader that dies can end its source")
    assert choose(found[:1]).name == "nixl"
    assert "not taken" not in choose(found[:1]).reason


@pytest.mark.parametrize("carriers", [(), ("rc_mlx5/mlx5_0:1",), ("rc_mlx5/mlx5_0:1", "tcp/eth0"), ("cma/memory",)])
def test_what_may_not_end_the_source_is_taken_when_it_is_fastest(carriers: tuple[str, ...]) -> None:
    found = [Measurement("nixl", 9.0, 9.0, 1e-5, "", carriers=carriers), Measurement("tcp", 1.0, 1.0, 1e-5, "")]
    assert choose(found).name == "nixl"


def test_a_transport_that_is_slow_in_short_rows_is_not_the_fastest() -> None:
    found = [Measurement("nixl", 6.3, 1.2, 1e-5, ""), Measurement("shm", 6.2, 4.1, 1e-5, "")]
    assert choose(found).name == "shm"


def test_nothing_that_passed_is_an_error() -> None:
    with pytest.raises(TransportError, match=r"found: nixl failed \(broken\)"):
        choose([Measurement("nixl", 0.0, 0.0, 0.0, "broken")])
    with pytest.raises(TransportError, match="nothing was tested"):
        choose([])


def test_what_takes_more_steps_is_not_tested_where_one_copy_does():
    passed = Measurement("cma", 7.0, 4.0, 1e-4, "", copies_once=True)
    failed = Measurement("shm", 0.0, 0.0, 0.0, "not attached", copies_once=True)
    assert [copies_once for copies_once in (True, False) if is_worth_testing(copies_once, [failed, passed])] == [True]
    others = [failed, Measurement("nixl", 9.0, 9.0, 1e-4, "")]
    assert all(is_worth_testing(copies_once, others) for copies_once in (True, False))
    choice = choose([failed, passed], ["nixl", "tcp"])
    assert choice.name == "cma"
    assert choice.reason.endswith("in rows of 4 KiB; nixl, tcp not tested: the same host needs only one copy")


def test_what_can_only_read_does_not_keep_others_from_being_tested_for_writes():
    """As where the system forbids process_vm_writev alone."""
    barred = Rates(0.0, 0.0, 0.0, "Operation not permitted")
    found = [Measurement("cma", 7.0, 4.0, 1e-4, "", barred, copies_once=True)]
    assert not is_worth_testing(False, found)
    assert is_worth_testing(False, found, Direction.WRITE)
    found.append(Measurement("tcp", 2.0, 1.0, 1e-4, "", Rates(2.0, 1.0, 1e-4)))
    assert [choose(found, direction=direction).name for direction in Direction] == ["cma", "tcp"]


def test_writes_are_told_and_decide_where_bytes_are_pushed():
    found = [
        Measurement("shm", 9.0, 4.0, 1e-5, "", Rates(1.0, 0.5, 1e-5), ("shm",)),
        Measurement("nixl", 6.0, 3.0, 1e-5, "", Rates(8.0, 4.0, 1e-5), ("cma/memory", "tcp/eth0")),
        Measurement("tcp", 7.0, 3.0, 1e-5, "", Rates(0.0, 0.0, 1e-5, "no answer within 1 s")),
    ]
    assert choose(found).name == "shm"
    choice = choose(found, direction=Direction.WRITE)
    assert choice.name == "nixl"
    assert choice.reason.split("; ") == [
        "shm 9.0 GB/s, 4.0 in rows of 4 KiB, writing 1.0 and 0.5",
        "nixl over cma/memory and tcp/eth0 6.0 GB/s, 3.0 in rows of 4 KiB, writing 8.0 and 4.0",
        "tcp 7.0 GB/s, 3.0 in rows of 4 KiB, writing failed (no answer within 1 s)",
    ]
    with pytest.raises(TransportError, match="no transport passed"):
        choose(found[2:], direction=Direction.WRITE)


def test_where_writing_could_not_be_tested_reading_tells():
    found = [Measurement("shm", 9.0, 4.0, 1e-5, ""), Measurement("tcp", 1.0, 1.0, 1e-5, "")]
    assert choose(found, direction=Direction.WRITE).name == "shm"
    assert found[0].likely_rates(Direction.WRITE).gigabytes_per_s == 9.0
    assert found[0].rates(Direction.WRITE).error


REACHES_HOST = "this transport reaches host memory only; hint: use nixl, or --buffer-device cpu"


@pytest.mark.parametrize(
    ("requested", "available", "words"),
    [
        ("tcp", {"tcp": REACHES_HOST}, f"transport 'tcp' does not work here; found: tcp: {REACHES_HOST}"),
        (
            "auto",
            {"nixl": "not installed", "shm": REACHES_HOST, "tcp": REACHES_HOST},
            f"no transport works here; found: nixl: not installed; shm, tcp: {REACHES_HOST}",
        ),
        ("auto", {}, "no transport works here"),
    ],
)
def test_of_what_this_process_lacks_itself_each_reason_is_told_once_and_nothing_else(
    requested: str, available: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_own(requested, available)
    assert str(caught.value) == words


def test_one_transport_that_works_here_is_enough_unless_another_is_requested() -> None:
    available = {"shm": REACHES_HOST, "nixl": ""}
    check_own("auto", available)
    check_own("nixl", available)
    with pytest.raises(ConfigurationError, match="'shm' does not work here"):
        check_own("shm", available)
    with pytest.raises(ConfigurationError, match="unknown transport 'rdma'"):
        check_own("rdma", available)
