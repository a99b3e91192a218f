import json
from collections import Counter
from dataclasses import replace

import pytest
from simulator import many
from simulator.__main__ import main
from simulator.defects.defect import DEFECTS
from simulator.faults import Faults
from simulator.many import first_violation, play_all
from simulator.report.summary import Summary
from simulator.run import simulate, simulate_with

from kvferry.plan.digests.subject import DigestPolicy

NUM_RUNS = 600
MAX_DEFECT_RUNS = 1500
# The search for these begins a little before the run that finds them, which takes up to three minutes to get to
# otherwise (`make simulate DEFECTS=1` begins at the first). Where a change moves that run, the search goes on.
BEGIN_AT = {
    "near-slots": 6000,
    "ignore-expiry": 970,
    "no-epoch": 330,
    "hasty-states": 270,
    "keep-request": 90,
    "late-pack": 140,
    "late-share": 940,
    "tokens-only": 300,
}


def test_nothing_is_wrong_whatever_goes_wrong():
    summary = Summary()
    for outcome in play_all(range(NUM_RUNS)):
        summary.add(outcome)
    assert summary.violations == {}
    assert summary.outcomes["fetched"] > NUM_RUNS
    assert len(summary.injected) > 15


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.slow
def test_a_planted_defect_is_found(name):
    begin = BEGIN_AT.get(name, 0)
    assert first_violation(DEFECTS[name], range(begin, begin + MAX_DEFECT_RUNS))


def test_the_search_for_a_planted_defect_ends_with_the_first_run_that_finds_it(monkeypatch):
    played = []

    def play(seed, defect):
        played.append(seed)
        return simulate(0) if seed < 3 else replace(simulate(0), violation="found")

    monkeypatch.setattr(many, "simulate", play)
    assert [outcome.violation for outcome in first_violation(DEFECTS["uncounted"], range(9))] == ["found"]
    assert played == [0, 1, 2, 3]


def test_a_byte_that_is_spoiled_on_the_way_is_found_by_a_full_digest():
    spoiled = Faults(corrupt=1.0)
    outcomes = Counter[str]()
    for seed in range(40):
        outcome = simulate_with(seed, spoiled, DigestPolicy.FULL)
        assert outcome.violation == ""
        outcomes += outcome.outcomes
    assert outcomes["failed: digest"] > 100
    assert set(outcomes) <= {"failed: digest", "fetched", "no prefill"}


def test_nothing_fails_where_nothing_goes_wrong():
    for seed in range(40):
        for digest in DigestPolicy:
            outcome = simulate_with(seed, Faults(), digest)
            assert outcome.violation == ""
            assert set(outcome.outcomes) <= {"fetched", "no prefill", "no room to decode", "failed: expired"}


def test_a_seed_gives_the_same_run_with_and_without_its_log():
    for seed in range(20):
        logged, silent = simulate(seed, is_logged=True), simulate(seed)
        assert (logged.outcomes, logged.injected, logged.virtual_s) == (
            silent.outcomes,
            silent.injected,
            silent.virtual_s,
        )
        assert simulate(seed, is_logged=True).log == logged.log


def test_the_command_prints_a_table_and_fails_on_a_violation(capsys):
    assert main(["--runs", "3", "--processes", "1"]) == 0
    assert "no violation" in capsys.readouterr().out
    assert main(["--runs", "9", "--processes", "1", "--defect", "uncounted", "--json"]) == 1
    seed, *_ = json.loads(capsys.readouterr().out)["violations"]
    assert main(["--runs", "1", "--seed", seed, "--log", "--defect", "uncounted"]) == 1
    assert "VIOLATION" in capsys.readouterr().out
