"""`kvferry up --engine sglang`: what is started, and what is said where nobody can answer alone."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.cli.up import fleet as module
from kvferry.cli.up import job
from kvferry.cli.up.command import UpOptions
from kvferry.cli.up.fleet import Fleet, FleetOptions
from kvferry.cli.up.output_check import Answer

ANSWER = Answer("so it goes", (5, 6), 40, {"tokens_received": 40, "tokens_computed": 0}, "disaggregated")


def started(monkeypatch, **changes) -> list[tuple[str, ...]]:
    """The command lines of the engines; none is started."""
    commands = []

    class Child:
        def __init__(self, name, arguments, log, port):
            commands.append(arguments)
            if name.startswith("decode"):
                raise InterruptedError

    monkeypatch.setattr(module, "Child", Child)
    options = FleetOptions(1, 1, ("--model", "m"), 16, 64, 0, 0, **changes)
    with pytest.raises(InterruptedError):
        Fleet(options, Path("logs")).start()
    return commands


def test_each_server_of_sglang_has_its_role_and_its_page_size(monkeypatch):
    prefill, decode = started(monkeypatch, has_roles=True)
    names = "serve", "--engine-id", "prefill-0", "--role", "prefill", "--block-tokens", "16", "--model", "m"
    assert (prefill, decode[3:7]) == (names, ("--role", "decode", "--block-tokens", "64"))
    assert all("--role" not in command for command in started(monkeypatch))


@pytest.mark.parametrize(("engine", "has_roles"), [("sglang", True), ("vllm", False), ("transformers", False)])
def test_only_sglang_serves_in_roles_and_other_engines_know_the_size_of_their_caches(engine, has_roles):
    fleet = job._fleet_options(UpOptions(engine=engine, arguments=("--tp", "2")), "folder", "tiny")
    is_ours = engine == "transformers"
    assert (fleet.has_roles, fleet.cache_tokens) == (has_roles, 16384 if is_ours else 0)
    assert fleet.engine_arguments[-3:] == ("--", "--tp", "2")
    assert ("float32" in fleet.engine_arguments) is not is_ours


@pytest.mark.parametrize(
    ("alone", "equal", "verdict"),
    [
        ((5, 6), True, "equal, token for token"),
        ((5, 7), False, "DIFFERENT FROM THE ANSWER WITHOUT A TRANSFER"),
        (None, None, "not compared: no engine here answers alone"),
    ],
)
def test_an_answer_that_nobody_could_compare_is_not_called_equal(alone, equal, verdict):
    facts = job._facts(ANSWER, alone)
    console = Console(width=100)
    with console.capture() as output:
        console.print(job._table(facts))
    assert (facts["equal"], facts["expected_token_ids"]) == (equal, list(alone or ()))
    assert verdict in output.get()
    assert "40 received, 0 computed here" in output.get()
    assert "bytes moved" not in output.get()


def test_no_answer_at_all_is_a_failure_with_nothing_to_compare_it_with():
    assert job._facts(replace(ANSWER, token_ids=()), None)["equal"] is False


@pytest.mark.parametrize(("temperature", "model"), [(0.5, "tiny"), (0.0, "another")])
def test_only_the_likeliest_tokens_of_the_tiny_model_are_compared(temperature, model):
    fleet = Fleet(FleetOptions(1, 1, (), 16, 16, 0, 0), Path("logs"))
    fleet.model = model
    question = job.Question(model, "The ferry", 4, temperature=temperature)
    assert job._without_transfer(UpOptions(engine="sglang"), fleet, question) is None
