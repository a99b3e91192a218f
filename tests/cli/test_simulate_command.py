"""`kvferry simulate fleet` as a user types it."""

import json
import logging
import os
import re
import subprocess
import sys
from typing import get_type_hints

import pytest
from typer.testing import CliRunner

from kvferry.catalog import Options, names, read
from kvferry.cli.main import app
from kvferry.cli.options import option_of
from kvferry.cli.simulate.command import CacheOptions, EngineOptions, FleetOptions, LoadOptions, RouterOptions
from kvferry.cli.simulate.fleet import _size_of
from kvferry.cli.simulate.page.charts import charts_of
from kvferry.plan.description.tokens import TokenRange

SMALL = ["--prefill", "2", "--decode", "4", "--per-rack", "3", "--rate", "4", "--duration", "20", "--warm-up", "2"]
SHORT = ["--prompt-tokens", "300-900", "--output-tokens", "8-32", "--start-up", "3"]
OF_REQUESTS = {
    *("requests", "good", "good_share", "goodput", "failed", "unfinished", "retried", "decode_alone", "recomputed")
}
OF_TIMES = {f"{part}_{name}_s" for part in ("mean", "median", "p90", "p95", "p99") for name in ("ttft", "itl")}


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", "fleet", *SMALL, *SHORT, *arguments], env={"COLUMNS": "80"})


def facts(*arguments):
    result = simulate(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_json_has_what_the_documentation_says():
    found = facts("--incident", "rack 1 dies from 8 to 10", "--incident", "hot prefix 40% from 14")
    assert set(found) == {
        *("fleet", "costs", "wires", "slo", "duration_s", "warm_up_s", "grace_s", "figures", "resources", "incidents"),
        *("course", "samples", "cpu_s", "router_choices", "router_choice_share", "command"),
    }
    assert found["fleet"] == {"num_prefill": 2, "num_decode": 4, "per_rack": 3, "racks": 2}
    assert found["slo"] == {"ttft_s": 2.0, "itl_s": 0.05, "itl_by": "mean"}
    assert set(found["figures"]) == {"begins_s", "ends_s"} | OF_REQUESTS | OF_TIMES
    assert (found["figures"]["begins_s"], found["figures"]["ends_s"]) == (2.0, 20.0)
    assert (found["grace_s"], found["figures"]["unfinished"]) == (600.0, 0)
    shares = [resource["share"] for resource in found["resources"]]
    assert shares == sorted(shares, reverse=True)
    assert {resource["name"] for resource in found["resources"]} == {
        *("prefill engines", "decode places", "decode steps", "engine link", "rack uplink")
    }
    first, second = found["incidents"]
    assert (first["words"], first["begins_s"], first["ends_s"]) == ("rack 1 dies from 8 to 10", 8.0, 10.0)
    assert second["ends_s"] is None
    assert first["during"]["failed"] + first["during"]["retried"] > 0
    assert sum(window["requests"] for window in found["course"]) > found["figures"]["requests"]
    assert len(found["samples"]) == 120
    assert 0 <= found["router_choice_share"] <= 1


def test_the_same_command_has_the_same_figures_in_another_process():
    words = [*SMALL, *SHORT, "--incident", "rack 0 dies from 5 to 8", "--incident", "rollout from 10 by 2", "--json"]
    found = []
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "kvferry", "simulate", "fleet", *words]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
        found.append(json.loads(done.stdout))
    one, other = ({name: value for name, value in each.items() if name not in TAKEN} for each in found)
    assert one == other


TAKEN = ("cpu_s", "router_choice_share")


def test_the_table_names_the_incidents_and_what_is_the_scarcest():
    result = simulate("--incident", "rack 1 dies from 8 to 10")
    assert result.exit_code == 0, result.output
    assert "1: before" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines() if "│" in line) <= 80
    assert "1: rack 1 dies from 8 to 10: " in result.stdout
    assert "scarcest: " in result.stdout
    assert "…" not in result.stdout
    # The log of what the router found out about each instance would bury it; others of this process may want it.
    assert result.stderr == ""
    assert logging.getLogger("kvferry.router").level == logging.NOTSET


def test_an_incident_before_which_nothing_ended_is_compared_with_nothing():
    (incident,) = facts("--incident", "rack 1 dies from 1 to 8")["incidents"]
    assert incident["before"]["requests"] == 0
    assert (incident["compared"], incident["recovery_s"]) == (False, None)
    shown = simulate("--incident", "rack 1 dies from 1 to 8").stdout
    assert "1: rack 1 dies from 1 to 8: no request that counts ended before it: nothing to compare with" in shown


def test_an_incident_after_the_last_request_is_compared_with_nothing(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 7, "output_length": 9}\n' * 2)
    words = ["simulate", "fleet", "--trace", str(trace), "--warm-up", "0", "--incident", "rack 0 dies at 0.9"]
    shown = CliRunner().invoke(app, words).stdout
    assert "1: rack 0 dies at 0.9: no request came after it began: nothing to compare with" in shown


def test_an_incident_that_is_not_over_at_the_end_is_compared():
    (incident,) = facts("--decode", "1", "--incident", "rack 0 dies at 8")["incidents"]
    assert (incident["compared"], incident["recovery_s"]) == (True, None)
    assert "not back to normal at the end" in simulate("--decode", "1", "--incident", "rack 0 dies at 8").stdout


def test_times_that_no_answer_has_are_none(tmp_path):
    """No answer at all is not one that took no time."""
    page = tmp_path / "run.html"
    words = ["--decode", "1", "--warm-up", "9", "--incident", "rack 0 dies at 1"]
    found = facts("--prefill-fallback", "refuse", *words)
    assert found["figures"]["requests"] > 0
    assert {found["figures"][name] for name in OF_TIMES} == {None}
    assert {window["p99_ttft_s"] for window in found["course"][30:]} == {None}
    shown = simulate("--prefill-fallback", "refuse", *words, "--page", str(page)).stdout
    assert re.search(r"ttft p99 +│ +- │", shown), shown
    assert "µs" not in shown
    assert "<dd>-<small>median -</small></dd>" in page.read_text()


def test_requests_that_are_unfinished_at_the_end_are_counted_apart_and_later_than_all_others(tmp_path):
    """Of an engine that has work for half an hour."""
    page = tmp_path / "run.html"
    words = ["--prefill", "1", "--decode", "1", "--prompt-tokens", "200000", "--rate", "10"]
    found = facts(*words)
    figures = found["figures"]
    assert (figures["failed"], figures["good"]) == (0, 0)
    assert 0 < figures["unfinished"] < figures["requests"]
    assert {figures[f"{part}_ttft_s"] for part in ("mean", "median", "p90", "p95", "p99")} == {None}
    assert figures["p99_itl_s"] == pytest.approx(0.012, rel=0.1)
    assert sum(window["unfinished"] for window in found["course"]) >= figures["unfinished"]
    shown = simulate(*words, "--page", str(page)).stdout
    assert re.search(r"ttft p50 +│ +> 600 s", shown), shown
    told = f"nfinished 600 s after the last request came: {figures['unfinished']}; they count as not good"
    assert f"u{told}" in shown
    assert f"U{told}" in page.read_text()
    assert "<dd>&gt; 600 s<small>median &gt; 600 s</small></dd>" in page.read_text()
    assert "> 600 s" in simulate(*words, "--find-ratio").stdout


def test_nothing_is_said_of_unfinished_requests_where_there_are_none(tmp_path):
    page = tmp_path / "run.html"
    assert "unfinished 600 s" not in simulate("--page", str(page)).stdout
    assert "nfinished 600 s" not in page.read_text()


def test_a_curve_has_a_gap_where_there_is_no_value():
    run = {"duration_s": 4.0, "slo": {}, "samples": [SAMPLE], "course": [window(at) for at in (0.5, None, 1.0, 0.25)]}
    _, times, *_ = charts_of(run)
    assert [len(part.split()) for part in times.lines[0].parts] == [2, 2]
    first, other = times.lines[0].parts
    assert len(set(first.split())) == 1, "a dot"
    assert len(set(other.split())) == 2


SAMPLE = {"at_s": 4.0, "num_waiting_prefill": 0, "num_waiting_decode": 0} | dict.fromkeys(
    ("busy_prefill", "busy_decode", "used_decode", "busy_uplink"), 0.5
)


def window(ttft_s):
    return {
        "begins_s": 0.0,
        "ends_s": 1.0,
        "requests": 1,
        "goodput": 1.0,
        "p99_ttft_s": ttft_s,
        "median_ttft_s": ttft_s,
    }


def test_the_ratio_that_is_found_is_among_those_that_were_tried():
    found = facts("--find-ratio")
    numbers = [row["num_prefill"] for row in found["tried"]]
    assert numbers == sorted(set(numbers))
    assert all(row["num_prefill"] + row["num_decode"] == 6 for row in found["tried"])
    assert found["best"] in found["tried"]
    assert found["best"]["num_prefill"] in found["as_good"]
    assert OF_REQUESTS | OF_TIMES | {"scarcest"} <= set(found["best"])
    table = simulate("--find-ratio").stdout
    assert f"best: {found['best']['num_prefill']} prefill and {found['best']['num_decode']} decode engines" in table


def test_a_search_in_which_no_fleet_meets_the_limits_gives_no_advice():
    words = ["--find-ratio", "--slo", "ttft=1us"]
    found = facts(*words)
    assert (found["best"], found["as_good"]) == (None, [])
    assert found["tried"]
    assert not any(row["good"] for row in found["tried"])
    table = simulate(*words).stdout
    assert "none of those tried answers a request within the limits" in table
    assert "best:" not in table
    assert "as good" not in table


def test_a_trace_is_replayed(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000 * at, "input_length": 700, "output_length": 9, "hash_ids": [1, at]} for at in range(9)]
    # With the mark of its encoding, as some editors write it.
    trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8-sig")
    result = CliRunner().invoke(app, ["simulate", "fleet", "--trace", str(trace), "--warm-up", "0", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["figures"]["requests"], found["duration_s"]) == (9, 9.0)


def test_measured_figures_take_the_place_of_the_assumed_ones():
    costs = facts("--prefill-speed", "10000", "--decode-steps", "1=8ms,32=10ms", "--context-cost", "0.5")["costs"]
    assert costs["token_s"] == pytest.approx(1e-4)
    assert costs["points"] == [[0, 0.0], [1, 0.008], [2, pytest.approx(0.008 + 0.002 / 31)], [32, 0.01]]
    assert costs["context_s"] == pytest.approx(5e-7)


@pytest.mark.parametrize("steps", [[], ["--decode-steps", "1=8ms,32=10ms"], ["--step-cost", "step=50ms"]])
def test_an_engine_computes_a_prompt_as_fast_as_its_prefill_speed_says(steps):
    """Nothing else happens to it: a step without answers has no time beside that of its tokens."""
    alone = ["--prefill", "0", "--decode", "1", "--rate", "0.1", "--prompt-tokens", "20000", "--output-tokens", "1"]
    found = facts(*alone, "--warm-up", "0", "--prefill-speed", "20000", *steps)
    assert found["figures"]["requests"] > 0
    assert found["figures"]["median_ttft_s"] == pytest.approx(1.0)


def test_a_dense_model_has_bytes_for_each_token():
    dense = _size_of(read("llama-3.3-70b", Options("auto", False)).cache)
    # 80 layers of keys and values, 8 heads of 128 elements of two bytes.
    assert (dense.bytes_per_token, dense.fixed_bytes, dense.rows_per_block) == (80 * 2 * 8 * 128 * 2, 0, 160)


OF_ALL_KINDS = [
    *("llama-3.3-70b", "mistral-7b", "gemma-3-27b", "gpt-oss-20b", "llama-4-scout", "deepseek-v4-flash"),
    *("qwen3-next-80b-a3b", "gemma-3n-e4b"),
]


@pytest.mark.parametrize("model", OF_ALL_KINDS)
@pytest.mark.parametrize(("num_tokens", "num_cached"), [(100, 0), (512, 256), (4096, 0), (8193, 0), (20_000, 8192)])
def test_a_model_has_the_bytes_that_its_plan_has(model, num_tokens, num_cached):
    """Whether prompts are shorter or longer than its windows and chunks, or begin in their middle."""
    words = ["--model", model, "--prefill", "tp=1", "--decode", "tp=1", "--tokens", num_tokens, "--cached", num_cached]
    planned = CliRunner().invoke(app, ["plan", *map(str, words), "--json"])
    assert planned.exit_code == 0, planned.output
    size = _size_of(read(model, Options("auto", False)).cache)
    assert size.num_bytes(TokenRange(num_cached, num_tokens)) == json.loads(planned.stdout)["bytes"]


@pytest.mark.parametrize("model", names())
def test_a_fleet_of_any_shipped_model_can_be_simulated(model):
    found = facts("--model", model, "--duration", "3", "--warm-up", "0")
    assert found["figures"]["requests"] > 0
    size = found["wires"]["cache"]
    assert size["bytes_per_token"] + size["fixed_bytes"] + len(size["parts"]) > 0


def test_a_page_shows_the_run_and_needs_nothing_else(tmp_path):
    page = tmp_path / "run.html"
    result = simulate("--incident", "rack 1 dies from 8 to 10", "--page", str(page))
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "2 prefill and 4 decode engines" in text
    assert "rack 1 dies from 8 to 10" in text
    assert text.count("<svg") == 4
    assert "<script" not in text
    assert "kvferry simulate fleet --prefill 2" in text
    assert not [link for link in ("http://", "https://", "src=", "@import") if link in text]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--incident", "rack 7 dies at 10"], "a rack from 0 to 1"),
        (["--incident", "meteor at 10"], "rack 3 dies at 60"),
        (["--incident", "rollout from 30"], "a time before 20 s"),
        (["--incident", "rack 1 dies from 9 to 8"], "from 60 to 120"),
        (["--step-cost", "token=1"], "such as token=1.2ms"),
        (["--step-cost", "step=1ms"], "times above 0"),
        (["--decode-steps", "1=8"], "answers in the batch"),
        (["--slo", "ttft=5"], "such as ttft=5s"),
        (["--link", "fast"], "such as 50GB/s"),
        (["--uplink", "fast"], "such as 50GB/s"),
        (["--model", "gpt-99"], "kvferry plan --models"),
        (["--model", "llama-3.3-70b", "--kv-bytes-per-token", "10"], "one of them"),
        (["--rate", "0"], "above 0"),
        (["--warm-up", "20"], "less than 20 s"),
        (["--prompt-tokens", "none"], "such as 512"),
        (["--policy", "mine"], "balanced"),
        (["--prefill-fallback", "pray"], "decode or refuse"),
        (["--trace-speed", "2"], "without --trace"),
        (["--trace", "x.jsonl"], "with --trace"),
        (["--find-ratio", "--incident", "rollout from 5"], "with --find-ratio"),
        (["--page", "run.pdf"], ".html"),
        (["--decode", "30000"], "at most 20,000 engines"),
        (["--cache-tokens", "600"], "at most 600, which the cache holds"),
        (["--prompt-tokens", "999000", "--output-tokens", "1001"], "1,000,001 tokens of a prompt and its answer"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_what_can(arguments, words):
    result = simulate(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert words in " ".join(result.stderr.split())


RECORDS = (FleetOptions, EngineOptions, CacheOptions, LoadOptions, RouterOptions)
FLOATS = [option_of(name) for record in RECORDS for name, hint in get_type_hints(record).items() if hint is float]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e308", "-1"])
@pytest.mark.parametrize("option", FLOATS)
def test_a_number_that_nothing_can_have_is_refused(option, value):
    """By the option itself, or by what becomes of it."""
    result = CliRunner().invoke(app, ["simulate", "fleet", option, value])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)


def test_the_options_that_are_numbers_are_known():
    assert {"--rate", "--duration", "--prefill-speed", "--handover-ms", "--trace-speed", "--ttft-slo"} < set(FLOATS)
    assert len(FLOATS) == 12


MANY = "9" * 400


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--uplink", f"{MANY}GB/s", "--per-rack", "3"], "bytes/s"),
        (["--link", f"0.{'0' * 300}1GB/s"], "bytes/s"),
        (["--step-cost", f"token={MANY}s,step=1ms"], "none above 86400 s"),
        (["--decode-steps", f"1={MANY}s"], "none above 86400 s"),
        (["--prefill-speed", "1e-300"], "none above 86400 s"),
        (["--prefix-tokens", MANY], "--prefix-tokens"),
    ],
)
def test_a_number_that_is_too_large_in_words_is_refused(arguments, words):
    result = CliRunner().invoke(app, ["simulate", "fleet", *arguments])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("times", [(0, 1e300), (0, 1e12)])
def test_a_trace_that_is_too_long_is_refused(tmp_path, times):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(f'{{"timestamp": {at}, "input_length": 7, "output_length": 9}}' for at in times))
    result = CliRunner().invoke(app, ["simulate", "fleet", "--trace", str(trace)])
    assert result.exit_code == 2, result.output
    assert "the trace is too long" in result.stderr
    assert "at most 604800 s" in result.stderr


def test_a_trace_that_cannot_be_read_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["simulate", "fleet", "--trace", str(tmp_path / "none.jsonl")])
    assert result.exit_code == 2
    assert "cannot read the trace" in result.stderr
