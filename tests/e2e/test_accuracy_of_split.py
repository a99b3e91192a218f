"""`kvferry bench accuracy` sees what is wrong with a split, and digests stop it before anybody could see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import accuracy_prompts
import pytest
from chaos_support import Process, running
from conftest import post, prefilled

TWISTED = Path(__file__).parents[1] / "twisted_serve.py"
DEADLINE_S = 300.0
NUM_PROMPTS = 10
WAYS = ("swapped", "shifted", "short", "neighbour")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tiny_model, tmp_path_factory):
    """A prefill engine, and two decode engines that read what they are told to, each behind a router: one digests
    nothing, one everything."""
    logs, prompts = tmp_path_factory.mktemp("twisted"), tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    # They fit the tiny model.
    short = [item for item in accuracy_prompts.items() if len(item["prompt"]) < 4000][::6][:NUM_PROMPTS]
    prompts.write_text("".join(json.dumps(item) + "\n" for item in short))
    common = ("serve", "--model", str(tiny_model), "--served-name", "tiny", "--engine-id")
    how = ("--transport", "shm", "--strategy", "direct", "--transfer-direction", "pull", "--digest")
    p = Process(logs / "p.log", *common, "p")
    names = ("off", "full")
    off, full = (Process(logs / f"{name}.log", *common, name, *how, name, script=TWISTED) for name in names)
    with running(p, off, full):
        urls = [("--prefill", p.url, "--decode", d.url) for d in (off, full)]
        routers = [Process(logs / f"router-{name}.log", "route", *pair) for name, pair in zip(names, urls, strict=True)]
        with running(*routers):
            routed = dict(zip(names, routers, strict=True))
            yield SimpleNamespace(p=p, off=off, full=full, routers=routed, prompts=str(prompts))


def compare(site, digest, *more):
    """The exit code, and what `--json` says."""
    servers = ("--url", site.routers[digest].url, "--against", site.p.url)
    words = ("bench", "accuracy", *servers, "--prompts", site.prompts, "--max-tokens", "8", "--json", *more)
    command = [sys.executable, "-m", "kvferry", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("digest", ["off", "full"])
def test_a_split_answers_as_the_whole_does(site, digest):
    code, found = compare(site, digest, "--min-equal", "1")
    assert (code, found["faults"]) == (0, [])
    split = found["split"]
    assert (split["compared"], split["equal"], split["errors"]) == (NUM_PROMPTS, NUM_PROMPTS, [])
    assert split["split"] > NUM_PROMPTS
    assert split["perplexity"] == pytest.approx(found["baseline"]["perplexity"], rel=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_wrong_is_seen_without_digests(site, way):
    site.off.gate.write_text(way)
    try:
        code, found = compare(site, "off")
    finally:
        site.off.gate.unlink()
    assert (code, bool(found["faults"])) == (1, True), found


@pytest.mark.parametrize("way", WAYS)
def test_what_is_wrong_is_stopped_by_digests(site, way):
    """Without a router, which would soon use such a pair no more."""
    prompt = accuracy_prompts.items()[0]["prompt"] * 8
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "return_token_ids": True}
    (whole,) = post(f"{site.p.url}/v1/completions", body)["choices"]
    site.full.gate.write_text(way)
    try:
        found = post(f"{site.full.url}/v1/completions", body | {"kv_transfer_params": prefilled(site.p.url, prompt)})
    finally:
        site.full.gate.unlink()
    assert (found["choices"][0]["token_ids"], found["kvferry"]["recomputed"]) == (whole["token_ids"], "digest")
