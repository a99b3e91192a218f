"""`kvferry plan` as a user types it."""

import json

import pytest
from typer.testing import CliRunner

from kvferry import catalog
from kvferry.cli.main import app
from kvferry.cli.plan.page.blocks import strips
from kvferry.cli.plan.shape import link_of

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
    pairs = {(pair["source_rank"], pair["target_rank"]): pair["boxes"] for pair in found["pairs"]}
    assert pairs == {(0, 0): ["head [0, 2)"], (1, 0): ["head [2, 3)"], (1, 1): ["head [3, 4)"], (2, 1): ["head [4, 6)"]}
    for pair in found["pairs"]:
        assert set(pair["prices"]) == {"direct", "scatter", "pack"}
        assert pair["predicted_s"] == pair["prices"][pair["strategy"]] == min(pair["prices"].values())
        assert pair["reason"].startswith(pair["strategy"])


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


def test_the_table_of_a_usual_plan_fits_a_terminal():
    shape = ["--model", "llama-3.3-70b", "--prefill", "tp=4,block=16", "--decode", "tp=2,block=64"]
    lines = plan(*shape).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    row = next(number for number, line in enumerate(lines) if line.startswith(" 0-3 → 0-1"))
    assert lines[row].split("│")[2:4] == [" 4 pairs      ", "  640 MiB "]
    assert [line.split("│")[5:] for line in lines[row : row + 3]] == [
        [" scatter  ", " 14.2 ms "],
        [" (pack)   ", " 14.5 ms "],
        [" (direct) ", "  2.63 s "],
    ]


def test_a_table_that_is_too_wide_shows_the_layers_above_the_heads():
    shape = ["--model", "nemotron-h-8b", "--prefill", "tp=2,pool=shared", "--decode", "tp=4,block=32,outer=width"]
    lines = plan(*shape).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert ["0-1 → 0-3", "layers 28 of 0-50"] in [[cell.strip() for cell in line.split("│")[:2]] for line in lines]


def test_pairs_that_differ_keep_rows_of_their_own():
    lines = plan(*MODEL, "--prefill", "tp=3", "--decode", "tp=2", "--tokens", "100").stdout.splitlines()
    rows = [line.split("│")[0].strip() for line in lines[3:] if " → " in line.split("│")[0]]
    assert rows == ["0, 2 → 0-1", "1 → 0-1"]


def test_a_model_is_known_by_its_name_on_the_hub():
    shapes = ["--prefill", "tp=1", "--decode", "tp=1", "--tokens", "64"]
    named = facts("--model", "meta-llama/Llama-3.3-70B-Instruct", *shapes)
    assert named["bytes"] == facts("--model", "llama-3.3-70b", *shapes)["bytes"]
    assert facts("--model", "tiny", *shapes)["bytes_per_token"] == 4 * 2 * 4 * 64 * 4
    unknown = plan("--model", "meta-llama/Llama-3.3-71B", *shapes)
    assert unknown.exit_code == 2
    assert "hf download meta-llama/Llama-3.3-71B config.json" in unknown.stderr


def test_replicas_are_engines_of_their_own():
    one = facts(*MODEL, "--prefill", "tp=2", "--decode", "tp=1", "--tokens", "64")
    assert facts(*MODEL, "--prefill", "tp=2,dp=4", "--decode", "tp=1", "--tokens", "64")["pairs"] == one["pairs"]
    words = " ".join(plan(*MODEL, "--prefill", "tp=2,dp=4", "--decode", "tp=1").stdout.split())
    assert "prefill dp=4: 4 replicas; each is an engine of its own" in words


def test_draft_layers_are_shown():
    shapes = ["--model", "deepseek-v3", "--prefill", "tp=1", "--decode", "tp=1", "--tokens", "64"]
    assert "draft layers: 1" in plan(*shapes, "--draft").stdout
    assert "draft" not in plan(*shapes).stdout


def test_help_fits_a_terminal_and_cuts_no_word():
    result = plan("--help")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout


def test_the_plan_says_how_to_make_it_again():
    typed = [*MODEL, "--prefill", "tp=2", "--decode", "tp=1,block=32", "--scattered", "--tokens", "40"]
    assert facts(*typed)["command"] == " ".join(["kvferry", "plan", *typed])


def test_rows_that_are_joined_are_counted_before_and_after():
    shape = ["--prefill", "format=block-major", "--decode", "format=block-major", "--tokens", "160"]
    lines = [line.split("│") for line in plan(*MODEL, *shape).stdout.splitlines() if "│" in line]
    assert [cells[4].strip() for cells in lines[:2]] == ["80", "→ 1"]


def test_a_models_own_configuration_is_read(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 96,
        "intermediate_size": 64,
        "vocab_size": 100,
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
        (["--prefill", "tp=5", "--decode", "tp=2"], "head of state model.layers.0.k cannot be divided over the ranks"),
        (["--prefill", "tp=1,block=0", "--decode", "tp=2"], "every N at least 1"),
        (["--prefill", "tp=1", "--decode", "tp=3"], "--decode tp=3: axis head"),
        (["--prefill", "tp=1", "--decode", "tp=2", "--draft"], "no effect without --model"),
        (["--prefill", "tp=1", "--decode", "tp=2", "--model", "qwen3-8b", "--head-dim", "64"], "found: --head-dim"),
        (["--prefill", "tp=1,tp=2", "--decode", "tp=2"], "invalid shape of an engine"),
        (["--prefill", "", "--decode", "tp=2"], "invalid shape of an engine"),
        (["--prefill", "tp=x", "--decode", "tp=2"], "invalid shape of an engine"),
        (["--prefill", "tp=1,format=odd", "--decode", "tp=2"], "unknown cache format"),
        (["--prefill", "tp=1", "--decode", "tp=2", "--dtype", "int3"], "unknown dtype"),
        (["--prefill", "tp=1", "--decode", "format=head-major", "--tokens", "9999999"], "more rows than"),
        (["--prefill", "tp=1", "--decode", "tp=1", "--layout", "foo"], "--layout: unknown cache format"),
        (["--prefill", "tp=1", "--decode", "tp=2,outer=width"], "outer= names an unknown axis"),
        (["--prefill", "tp=1", "--decode", "tp=2", "--prefill-speed", "nan"], "--prefill-speed: not a number"),
        (["--prefill", "tp=1", "--decode", "tp=2", "--prefill-speed", "0"], "from 1 to 1,000,000,000,000 tokens/s"),
        (["--prefill", "tp=1", "--decode", "tp=2", "--html", "plan.pdf"], "the page must be an HTML file"),
        (["--model", "", "--prefill", "tp=1", "--decode", "tp=2"], "unknown model"),
        (["--model", "/", "--prefill", "tp=1", "--decode", "tp=2"], "the folder has no config.json"),
        (["--model", "/nowhere", "--prefill", "tp=1", "--decode", "tp=2"], "unknown model"),
        (["--model", "lama-3.1-8b", "--prefill", "tp=1", "--decode", "tp=2"], "llama-3.1-8b"),
        (["--prefill", "tp=1", "--decode", "tp=2", "--link", "fast"], "invalid --link"),
        (["--prefill", "tp=1", "--decode", "tp=2", "--link", "0GB/s"], "invalid --link"),
        (["--prefill", "tp=1", "--decode", "tp=2,dcp=2"], "cannot be divided among ranks"),
        (["--prefill", "tp=1,block=16,kernel=3", "--decode", "tp=2"], "kernel blocks must divide a block"),
        (["--prefill", "tp=1,pool=own", "--decode", "tp=2"], "invalid shape of an engine"),
        (
            ["--prefill", "tp=1", "--decode", "tp=2", "--tokens", "5", "--cached", "6"],
            "--cached is larger than --tokens",
        ),
        (["--prefill", "tp=1", "--decode", "tp=2", "--html", "/nowhere/page.html"], "the folder does not exist"),
    ],
)
def test_a_mistake_is_one_clear_message(arguments, says):
    result = plan(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in " ".join(result.stderr.split())


def test_all_names_are_listed_without_engines():
    result = plan("--models")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(catalog.names())
    assert {line.split()[-1] for line in lines} >= {"moonshotai/Kimi-K2.5", "Qwen/Qwen3-8B"}
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("options", [("--models", "--json"), ("--json", "--models")])
def test_all_names_are_listed_for_machines(options):
    result = plan(*options)
    assert (result.exit_code, result.stderr) == (0, "")
    listed = json.loads(result.stdout)
    assert list(listed) == list(catalog.names())
    assert "moonshotai/Kimi-K2.5" in listed["kimi-k2"]


@pytest.mark.parametrize("content", ["[1]", "{}", '{"num_hidden_layers": "a"}', "{", '{"num_hidden_layers": null}'])
def test_a_broken_configuration_is_one_clear_message(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    result = plan("--model", str(tmp_path), "--prefill", "tp=1", "--decode", "tp=2")
    assert result.exit_code == 2
    assert "config.json" in result.stderr
    assert "hint:" in result.stderr
    assert result.stdout == ""


def test_a_field_that_nobody_knows_is_refused_unless_told_otherwise(tmp_path):
    fields = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 100,
        "intermediate_size": 8,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | {"kv_stride": 2}))
    shape = ["--model", str(path), "--prefill", "tp=1", "--decode", "tp=2"]
    refused = plan(*shape)
    assert refused.exit_code == 2
    assert "field kv_stride may change what a cache holds" in " ".join(refused.stderr.split())
    found = facts(*shape, "--assume-standard")
    assert found["bytes_per_token"] == 4 * 2 * 64 * 2
    assert any("nobody has read kv_stride" in note for note in found["notes"])
    (heads,) = [field for field in found["fields"] if field["name"] == "num_attention_heads"]
    assert heads == {
        "name": "num_attention_heads",
        "value": 8,
        "decides": ["keys and values", "active parameters"],
        "said_by": "config",
    }


def test_a_hybrid_by_name_moves_its_windows_tail_and_its_fixed_states():
    """Gemma 3: 10 full layers, 52 with a window of 1,024 of which the last 1,023 tokens are still seen."""
    found = facts("--model", "gemma-3-27b", "--prefill", "tp=2", "--decode", "tp=1,pool=shared", "--tokens", "5000")
    assert {group["name"]: group["moved_tokens"] for group in found["groups"]} == {"window-1024": 1023, "full": 5000}
    assert found["bytes"] == (52 * 1023 + 10 * 5000) * 2 * 16 * 128 * 2


def test_entries_of_several_tokens_move_when_they_are_complete():
    """DeepSeek V4: 1,250 entries of 4 tokens and 39 of 128; blocks hold whole entries without being told."""
    found = facts("--model", "deepseek-v4-flash", "--prefill", "tp=2", "--decode", "tp=1", "--tokens", "5000")
    groups = {group["name"]: (group["moved_tokens"], group["tokens_per_entry"]) for group in found["groups"]}
    assert groups == {"window-128": (127, 1), "every-4": (5000, 4), "window-8": (7, 1), "every-128": (4992, 128)}
    assert found["lasting_bytes_per_token"] == 6229
    rows = 127 * (43 * 1024 + 20 * 4096) + 7 * 21 * 4 * (2048 + 512)
    assert found["bytes"] == rows + 21 * 1250 * (1024 + 132) + 20 * 39 * 1024
    assert found["source"]["block_tokens"] == 128


def test_a_prefix_that_the_target_has_does_not_move_but_fixed_states_do():
    shapes = ["--prefill", "tp=2", "--decode", "tp=2,block=32", "--tokens", "1000", "--cached", "900"]
    found = facts("--model", "nemotron-h-8b", *shapes)
    assert found["bytes"] == 100 * found["bytes_per_token"] + found["fixed_bytes"]


def test_shared_out_tokens_go_to_their_ranks():
    found = facts("--model", "deepseek-v2-lite", "--prefill", "tp=1", "--decode", "tp=2,dcp=2,run=4", "--tokens", "64")
    assert [pair["tokens"] for pair in found["pairs"]] == ["t % 8 in [0, 4)", "t % 8 in [4, 8)"]
    assert found["bytes"] == 64 * found["bytes_per_token"]


def test_axes_of_one_name_and_different_extent_are_told_apart():
    """Qwen3-Next: 2 attention heads; 32 value heads and 16 query heads of the recurrent layers."""
    found = facts("--model", "qwen3-next-80b-a3b", "--prefill", "tp=2", "--decode", "tp=1", "--tokens", "64")
    assert found["pairs"][1]["boxes"] == ["full.head [1, 2)", "recurrent.head [16, 32)", "recurrent.head_of_16 [8, 16)"]
    assert found["source"]["ranks"][1]["axes"] == {"full.head": [1, 2], "recurrent.head": [16, 32]}


def test_the_verdict_compares_moving_with_computing_again():
    shapes = [*MODEL, "--prefill", "tp=1", "--decode", "tp=1", "--tokens", "1000", "--link", "1GB/s"]
    slow, fast = facts(*shapes, "--prefill-speed", "1000"), facts(*shapes, "--prefill-speed", "100000000")
    assert (slow["verdict"]["pays"], fast["verdict"]["pays"]) == (True, False)
    assert "will not pay" in fast["verdict"]["text"]
    assert slow["verdict"]["break_even_tokens_per_s"] == pytest.approx(1000 / slow["predicted_s"])
    unknown = facts(*shapes)["verdict"]
    assert (unknown["pays"], unknown["prefill_tokens_per_s"]) == (None, 0.0)
    assert "Break-even" in unknown["text"]
    assert "Nothing moves" in facts(*shapes, "--cached", "1000")["verdict"]["text"]


def test_states_of_fixed_size_move_though_all_tokens_are_cached():
    words = ["--model", "qwen3-next-80b-a3b", "--prefill", "tp=1", "--decode", "tp=1", "--tokens", "100"]
    found = facts(*words, "--cached", "100")
    assert found["bytes"] == found["fixed_bytes"] > 0
    verdict = found["verdict"]
    assert (verdict["pays"], verdict["break_even_tokens_per_s"]) == (False, 0.0)
    assert "No token is missing" in verdict["text"]
    assert "states of fixed size move in" in verdict["text"]
    assert "Nothing moves" not in verdict["text"]


def test_the_time_is_that_of_the_busiest_rank():
    found = facts(*MODEL, "--prefill", "tp=2", "--decode", "tp=1", "--tokens", "100")
    assert found["predicted_s"] == pytest.approx(sum(pair["predicted_s"] for pair in found["pairs"]))


@pytest.mark.parametrize(
    ("words", "rate"),
    [("50GB/s", 50e9), ("400Gbit/s", 50e9), ("400Gbps", 50e9), ("2 MiB/s", 2 * 2**20), ("1.5TB/s", 1.5e12)],
)
def test_a_link_is_read_in_bits_and_bytes(words, rate):
    assert link_of(words) == rate


def test_the_page_is_written_beside_the_table(tmp_path):
    file = tmp_path / "plan.html"
    result = plan("--model", "qwen3-next-80b-a3b", "--prefill", "tp=4", "--decode", "tp=2", "--html", str(file))
    assert result.exit_code == 0, result.output
    assert f"wrote {file}" in " ".join(result.stderr.split()).replace("\n", "")
    assert "qwen3-next-80b-a3b" in file.read_text()


def test_the_version_is_printed():
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("kvferry 0.")


def test_the_blocks_of_every_group_show_the_source_of_each_part():
    found = facts("--model", "qwen3-next-80b-a3b", "--prefill", "tp=4", "--decode", "tp=2,format=head-major")
    (_, recurrent), (_, full) = strips(found)
    sources = [cell.source for cell in recurrent.groups[0].cells]
    assert sources == sorted(sources)
    assert sources.count(0) == sources.count(1) == len(sources) / 2
    assert "8 heads" in recurrent.words
    assert {cell.source for cell in full.cells} == {0}
