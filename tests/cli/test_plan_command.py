"""`kvferry plan` as a user types it."""

import json

import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app

MODEL = ["--layers", "4", "--heads", "6", "--head-dim", "8", "--dtype", "float16"]
BYTES_PER_TOKEN = 4 * 2 * 6 * 8 * 2


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "80"})


def facts(*arguments):
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_plan_as_json_adds_up():
    found = facts(*MODEL, "--prefill", "tp=3,block=16", "--decode", "tp=2,block=64", "--tokens", "100")
    assert found["bytes_per_token"] == BYTES_PER_TOKEN
    assert found["bytes"] == 100 * BYTES_PER_TOKEN == sum(pair["bytes"] for pair in found["pairs"])
    assert found["rows"] == sum(pair["rows"] for pair in found["pairs"]) <= found["rows_before_merge"]
    pairs = {(pair["source_rank"], pair["target_rank"]): pair["heads"] for pair in found["pairs"]}
    assert pairs == {(0, 0): ["[0, 2)"], (1, 0): ["[2, 3)"], (1, 1): ["[3, 4)"], (2, 1): ["[4, 6)"]}
    assert {pair["strategy"] for pair in found["pairs"]} == {"direct"}


def test_adjacent_blocks_merge_and_scattered_ones_do_not():
    shape = ["--prefill", "format=block-major", "--decode", "format=block-major", "--tokens", "160"]
    assert facts(*MODEL, *shape)["rows"] == 1
    assert facts(*MODEL, *shape, "--scattered")["rows"] > 1


def test_pipeline_stages_hold_their_layers():
    found = facts(*MODEL, "--prefill", "pp=2", "--decode", "tp=1", "--tokens", "16")
    assert [(pair["source_rank"], pair["states"]) for pair in found["pairs"]] == [(0, 4), (1, 4)]


def test_the_table_shows_every_number_in_full_on_a_narrow_terminal():
    result = plan(*MODEL, "--prefill", "tp=6", "--decode", "tp=1", "--tokens", "100000")
    assert result.exit_code == 0
    assert "4,800,000" in result.stdout
    assert "…" not in result.stdout


def test_a_models_own_configuration_is_read(tmp_path):
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 8,
        "dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = facts("--model", str(tmp_path), "--prefill", "tp=1", "--decode", "tp=2", "--tokens", "10")
    assert found["bytes_per_token"] == BYTES_PER_TOKEN


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prefill", "tp=5", "--decode", "tp=2"], "heads cannot be divided over the ranks"),
        (["--prefill", "tp=1,block=0", "--decode", "tp=2"], "must be at least 1"),
        (["--prefill", "tp=1,tp=2", "--decode", "tp=2"], "cannot read an engine's shape"),
        (["--prefill", "", "--decode", "tp=2"], "cannot read an engine's shape"),
        (["--prefill", "tp=x", "--decode", "tp=2"], "cannot read an engine's shape"),
        (["--prefill", "tp=1,format=odd", "--decode", "tp=2"], "unknown cache format"),
        (["--prefill", "tp=1", "--decode", "tp=2", "--dtype", "int3"], "unknown dtype"),
        (["--prefill", "tp=1", "--decode", "format=head-major", "--tokens", "99999999"], "too many small rows"),
        (["--model", "/nowhere", "--prefill", "tp=1", "--decode", "tp=2"], "cannot read the model's configuration"),
    ],
)
def test_a_mistake_is_one_clear_message(arguments, says):
    result = plan(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in " ".join(result.stderr.split())


@pytest.mark.parametrize("content", ["[1]", "{}", '{"num_hidden_layers": "a"}', "{", '{"num_hidden_layers": null}'])
def test_a_broken_configuration_is_one_clear_message(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    result = plan("--model", str(tmp_path), "--prefill", "tp=1", "--decode", "tp=2")
    assert result.exit_code == 2
    assert "cannot read the model's configuration" in " ".join(result.stderr.split())


def test_the_version_is_printed():
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("kvferry 0.")
