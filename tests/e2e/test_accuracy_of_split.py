"""`kvferry bench accuracy` sees what is wrong with a split, and digests stop it before anybody could see it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import accuracy_prompts
import pytest
from chaos_support import Process, running
from conftest import post, prefilled
from tiny_models import model_folder

TWISTED = Path(__file__).parents[1] / "twisted_serve.py"
DEADLINE_S = 300.0
NUM_PROMPTS = 10
WAYS = ("swapped", "shifted", "short", "neighbour")

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def twisted_site(model, tmp_path_factory):
    """A prefill engine, and two decode engines that read what they are told to, each behind a router: one digests
    nothing, one everything."""
    logs, prompts = tmp_path_factory.mktemp("twisted"), tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    # They fit the tiny model.
    short = [item for item in accuracy_prompts.items() if len(item["prompt"]) < 4000][::6][:NUM_PROMPTS]
    prompts.write_text("".join(json.dumps(item) + "\n" for item in short))
    common = ("serve", "--model", str(model), "--served-name", "tiny", "--engine-id")
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


@pytest.fixture(scope="module")
def site(tiny_model, tmp_path_factory):
    with twisted_site(tiny_model, tmp_path_factory) as site:
        yield site


@pytest.fixture(scope="module")
def windowed_site(tmp_path_factory):
    """Most layers have a window, which most prompts exceed."""
    with twisted_site(model_folder("gemma3"), tmp_path_factory) as site:
        yield site


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


def test_windows_of_a_split_answer_as_the_whole_does(windowed_site):
    code, found = compare(windowed_site, "off", "--min-equal", "1")
    assert (code, found["faults"]) == (0, [])
    assert found["split"]["equal"] == NUM_PROMPTS


def test_a_neighbours_window_is_seen_without_digests(windowed_site):
    assert_seen(windowed_site, "window")


def test_a_neighbours_window_is_stopped_by_digests(windowed_site):
    assert_stopped(windowed_site, "window")


@pytest.mark.parametrize("way", WAYS)
def test_what_is_wrong_is_seen_without_digests(site, way):
    assert_seen(site, way)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_wrong_is_stopped_by_digests(site, way):
    assert_stopped(site, way)


def assert_seen(site, way):
    site.off.gate.write_text(way)
    try:
        code, found = compare(site, "off")
    finally:
        site.off.gate.unlink()
    assert (code, bool(found["faults"])) == (1, True), found


def assert_stopped(site, way):
    """Without a router, which would soon use such a pair no more."""
    prompt = accuracy_prompts.items()[0]["prompt"] * 8
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "return_token_ids": True, "temperature": 0}
    (whole,) = post(f"{site.p.url}/v1/completions", body)["choices"]
    site.full.gate.write_text(way)
    try:
        found = post(f"{site.full.url}/v1/completions", body | {"kv_transfer_params": prefilled(site.p.url, prompt)})
    finally:
        site.full.gate.unlink()
    assert (found["choices"][0]["token_ids"], found["kvferry"]["recomputed"]) == (whole["token_ids"], "digest")


TASK = """
task: harbour
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{documents}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with a task of lm-eval: longer prompts of those that come with kvferry."""
    pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
    folder = tmp_path_factory.mktemp("tasks")
    documents = [item for item in accuracy_prompts.items() if 400 < len(item["prompt"]) < 4000][:NUM_PROMPTS]
    lines = [json.dumps({"prompt": item["prompt"], "answer": item.get("answer", "none")}) for item in documents]
    (folder / "documents.jsonl").write_text("\n".join(lines))
    (folder / "harbour.yaml").write_text(TASK.format(documents=folder / "documents.jsonl"))
    return folder


def compare_tasks(site, folder, *more, task="harbour"):
    """The process that has ended."""
    servers = ("--url", site.routers["off"].url, "--against", site.p.url)
    words = (
        "bench",
        "accuracy",
        *servers,
        "--lm-eval",
        task,
        "--json",
        "--header",
        "Authorization: Bearer secret",
        *more,
    )
    command = [sys.executable, "-m", "kvferry", *words, "--", "--include_path", str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)


def test_tasks_of_lm_eval_are_answered_as_the_whole_does(site, tasks):
    done = compare_tasks(site, tasks)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    split = found["split"]
    assert (split["compared"], split["equal"], split["split"]) == (NUM_PROMPTS, NUM_PROMPTS, NUM_PROMPTS)
    assert found["control"]["equal"] == NUM_PROMPTS
    assert [score["metric"] for score in found["baseline"]] == ["exact_match"]
    assert "secret" not in done.stderr


def test_what_is_wrong_is_seen_by_tasks_of_lm_eval(site, tasks):
    site.off.gate.write_text("shifted")
    try:
        done = compare_tasks(site, tasks, "--no-control", "--min-equal", "1")
    finally:
        site.off.gate.unlink()
    assert done.returncode == 1, done.stderr
    assert "answers differ" in json.loads(done.stdout)["faults"][0]


def test_tasks_of_lm_eval_that_a_split_fails_are_its_fault_and_show_no_key(site, tasks, tmp_path):
    """Its engines have gone: the router answers 503, and lm-eval shows the request."""
    router = Process(
        tmp_path / "router.log", "route", "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"
    )
    with running(router):
        broken = SimpleNamespace(p=site.p, routers={"off": router})
        done = compare_tasks(broken, tasks, "--model", "tiny", "--no-control", "--min-equal", "1")
    assert done.returncode == 1, done.stderr
    assert "the split did not answer everything" in json.loads(done.stdout)["faults"][0]
    assert "(hidden)" in done.stderr
    assert "secret" not in done.stderr


def test_tasks_that_lm_eval_refuses_are_one_error(site, tasks):
    done = compare_tasks(site, tasks, task="nosuch")
    assert done.returncode == 2
    assert "lm-eval has not evaluated the server" in done.stderr
    assert "nosuch" in done.stderr
