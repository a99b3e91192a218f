"""`kvferry bench serve` on what `kvferry up` starts, and engines whose steps are simulated."""

import json
import subprocess
import sys

import pytest
from conftest import DEADLINE_S, metric

BENCH = [sys.executable, "-m", "kvferry.cli.main", "bench", "serve"]
LENGTHS = ("--prompt-tokens", "40-60", "--output-tokens", "5")


def bench(*arguments):
    command = [*BENCH, *arguments, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S * 3, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
def test_a_fleet_is_measured_with_its_own_token_counts(start_fleet):
    fleet = start_fleet()
    facts = bench(
        "--url", fleet.url, "--requests", "6", "--rate", "50", *LENGTHS, "--slo", "ttft=60s", "--every-request"
    )
    assert (facts["completed"], facts["failed"], facts["model_id"]) == (6, 0, "tiny")
    assert facts["output_lens"] == [5] * 6
    assert all(40 <= length <= 60 for length in facts["input_lens"])
    assert facts["slo_attainment"] == 1.0
    assert all(ttft > 0 for ttft in facts["ttfts"])
    # Every prompt but its last token came from the other engine; one more request had warmed up.
    received = metric(fleet.decode_urls[0], "kvferry_engine_tokens_received_total")
    assert received >= sum(length - 1 for length in facts["input_lens"])


@pytest.mark.slow
def test_chat_is_measured_too(start_fleet):
    facts = bench("--url", start_fleet().url, "--requests", "2", "--endpoint", "chat", *LENGTHS)
    assert (facts["completed"], facts["total_output_tokens"]) == (2, 10)
