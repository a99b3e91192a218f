"""`kvferry up`: what is started for which engine, and what is said and returned where nobody can answer alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvferry.cli import main
from kvferry.cli.options import TransferOptions
from kvferry.cli.up import fleet as module
from kvferry.cli.up import job
from kvferry.cli.up.command import UpOptions
from kvferry.cli.up.fleet import Fleet, FleetOptions
from kvferry.testing.output_check import Answer

REPORT = {"tokens_received": 40, "tokens_computed": 0}
ANSWER = Answer("so it goes", (5, 6), 40, REPORT, {"x-kvferry-path": "disaggregated"})


def started(**changes) -> list[tuple[str, ...]]:
    """The command lines of the engines; none is started."""
    commands = []

    def start_child(name, arguments, log, port, variables):
        commands.append(arguments)
        if name.startswith("decode"):
            raise InterruptedError

    options = FleetOptions(1, 1, ("--model", "m"), 16, 64, 0, 0, **changes)
    with pytest.raises(InterruptedError):
        Fleet(options, Path("logs"), start_child).start()
    return commands


def test_each_server_of_sglang_has_its_role_and_its_page_size():
    prefill, decode = started(has_roles=True)
    names = "serve", "--engine-id", "prefill-0", "--role", "prefill", "--block-tokens", "16", "--model", "m"
    assert (prefill, decode[3:7]) == (names, ("--role", "decode", "--block-tokens", "64"))
    assert all("--role" not in command for command in started())


@pytest.mark.parametrize(("engine", "has_roles"), [("sglang", True), ("vllm", False), ("transformers", False)])
def test_only_sglang_serves_in_roles_and_other_engines_know_the_size_of_their_caches(engine, has_roles):
    fleet = job._fleet_options(UpOptions(engine=engine, arguments=("--tp", "2")), "folder", "tiny")
    is_ours = engine == "transformers"
    assert (fleet.has_roles, fleet.cache_tokens) == (has_roles, 16384 if is_ours else 0)
    assert fleet.passed == ("--tp", "2")
    assert ("float32" in fleet.engine_arguments) is not is_ours
    assert "float32" not in job._fleet_options(UpOptions(engine=engine), "folder", "another").engine_arguments


def words_of(**changes) -> str:
    """What all engines of a fleet are told."""
    return " ".join(job._fleet_options(UpOptions(**changes), "folder", "tiny").engine_arguments)


def test_engines_are_told_of_their_device_and_how_caches_move_only_where_that_is_chosen():
    chosen = TransferOptions(transport="tcp", staging_memory="device")
    words = words_of(device="cuda:1", transfer=chosen)
    assert all(option in words for option in ("--device cuda:1", "--transport tcp", "--staging-memory device"))
    # Others have options of their own for these.
    assert not any(option in words_of(engine="vllm") for option in ("--device", "--transport", "--buffer-device"))


def test_a_model_that_may_have_to_come_from_afar_has_an_hour_and_others_what_their_engine_takes(tmp_path):
    engines = ("transformers", "vllm", "sglang")
    there = [job._fleet_options(UpOptions(engine=engine), "folder", "tiny").ready_s for engine in engines]
    local = [job._fleet_options(UpOptions(str(tmp_path), engine), "folder", "m").ready_s for engine in engines]
    assert there == local
    assert there == [module.READY_S, job.OTHER_READY_S, job.OTHER_READY_S]
    assert module.READY_S < job.OTHER_READY_S < 3600.0
    assert {job._fleet_options(UpOptions("org/m", engine), "org/m", "m").ready_s for engine in engines} == {3600.0}


@pytest.fixture
def asked(monkeypatch):
    """Runs the command, and returns its exit code, its words, and what would be done."""
    options = []
    monkeypatch.setattr("kvferry.cli.engine_choice.check_installed", lambda engine: None)
    monkeypatch.setattr(job, "up", lambda asked: options.append(asked) or 0)

    def ask(*words):
        result = CliRunner().invoke(main.app, ["up", *words])
        return result.exit_code, " ".join(result.stderr.split()), options

    return ask


@pytest.mark.parametrize(("engine", "sizes"), [("vllm", (0, 0)), ("sglang", (16, 16)), ("transformers", (16, 16))])
def test_only_vllm_is_left_to_choose_the_size_of_its_blocks(asked, engine, sizes):
    code, _, (options,) = asked("--engine", engine)
    assert (code, options.prefill_block_tokens, options.decode_block_tokens) == (0, *sizes)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_device_of_another_engine_is_for_its_own_options_to_say(asked, engine):
    code, words, options = asked("--engine", engine, "--device", "cuda")
    assert (code, options) == (2, [])
    assert "found: --device" in words


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


@pytest.mark.parametrize("alone", [None, ()])
def test_no_answer_at_all_is_a_failure_with_nothing_to_compare_it_with(alone):
    assert job._facts(replace(ANSWER, token_ids=()), alone)["equal"] is False


@pytest.mark.parametrize(
    ("tokens", "alone", "code"),
    [((5, 6), (5, 6), 0), ((5, 6), (5, 7), 1), ((), (), 1), ((5, 6), None, 0), ((), None, 1)],
)
def test_only_an_answer_that_may_be_right_is_a_success(monkeypatch, capsys, tokens, alone, code):
    questions = []
    monkeypatch.setattr(
        job,
        "ask",
        lambda url, question, show, api_keys: questions.append(question) or replace(ANSWER, token_ids=tokens),
    )
    monkeypatch.setattr(job, "_without_transfer", lambda options, fleet, question: questions.append(question) or alone)
    fleet = Fleet(FleetOptions(1, 1, (), 16, 16, 0, 0), Path("logs"))
    fleet.start = lambda: None
    assert job._run(UpOptions(engine="sglang", once="The ferry", as_json=True), fleet) == code
    assert json.loads(capsys.readouterr().out)["token_ids"] == list(tokens)
    # Neither may be answered from what the other has left in a prefix cache.
    assert len({question.salt for question in questions}) == 2


@pytest.mark.parametrize(("temperature", "model"), [(0.5, "tiny"), (0.0, "another")])
def test_only_the_likeliest_tokens_of_the_tiny_model_are_compared(temperature, model):
    fleet = Fleet(FleetOptions(1, 1, (), 16, 16, 0, 0), Path("logs"))
    fleet.model = model
    question = job.Question(model, "The ferry", 4, temperature=temperature)
    assert job._without_transfer(UpOptions(engine="sglang"), fleet, question) is None
