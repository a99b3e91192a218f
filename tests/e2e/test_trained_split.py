"""A trained model behind a split answers as it does whole, across its windows and from blocks to larger ones."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import accuracy_prompts
import pytest

from kvferry.cli.environment import cache_directory
from kvferry.cli.up.fleet import Fleet, FleetOptions
from kvferry.embedded.model.trained import NEEDED, ensure_gemma

DEADLINE_S = 900.0
# One of each kind; some are longer than a window of 512 tokens.
NAMES = ("quiz-0", "language-german", "language-hindi", "files-0", "table-40", "register-32-6", "story-48", "sum-60")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in NEEDED), reason="needs the extra demo: make accuracy"
    ),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = ensure_gemma(cache_directory(), print)
    arguments = ("--model", str(folder), "--served-name", "gemma", "--digest", "off")
    with Fleet(FleetOptions(1, 1, arguments, 16, 64, 8192, port=0), tmp_path_factory.mktemp("gemma")) as fleet:
        fleet.start()
        yield fleet


def test_it_answers_as_the_whole_does(fleet, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    chosen = [item for item in accuracy_prompts.items() if item["name"] in NAMES]
    prompts.write_text("".join(json.dumps(item) + "\n" for item in chosen))
    servers = ("--url", fleet.url, "--against", fleet.decode_urls[0])
    words = (
        "bench",
        "accuracy",
        *servers,
        "--prompts",
        str(prompts),
        "--score-tokens",
        "1",
        "--min-equal",
        "1",
        "--json",
    )
    command = [sys.executable, "-m", "kvferry", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert (done.returncode, found["faults"]) == (0, []), done.stderr
    split = found["split"]
    assert (split["compared"], split["equal"]) == (len(NAMES), len(NAMES))
    assert split["split"] == 2 * len(NAMES)
    assert found["baseline"]["perplexity"] < 100, "it knows what it says"
