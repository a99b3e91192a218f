"""What lm-eval writes, what it is told, and when two of its runs are too far apart."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
from typer.testing import CliRunner

from kvferry.bench.accuracy import lm_eval
from kvferry.bench.accuracy.client import Server
from kvferry.bench.accuracy.lm_eval import Evaluation, EvaluationError, _pass_on, _run, read_folder
from kvferry.bench.accuracy.samples import Sample, TaskComparison, TaskRuns, named, read_samples, task_faults
from kvferry.cli.bench import accuracy_tasks
from kvferry.cli.bench.accuracy_tasks import _ended_by_sigterm, _num_split, _runs
from kvferry.cli.main import app
from kvferry.errors import ConfigurationError

# A line that lm-eval 0.4.13 wrote, but for its hashes.
WRITTEN = {
    "doc_id": 3,
    "doc": {"question": "The capital of Italy is", "answer": "Rome"},
    "target": "Rome",
    "arguments": {"gen_args_0": {"arg_0": "The capital of Italy is", "arg_1": {"until": ["\n"], "cache_salt": "s"}}},
    "resps": [[" Rome."]],
    "filtered_resps": ["Rome"],
    "filter": "strict",
    "metrics": ["exact_match", "bypass"],
    "exact_match": 1.0,
    "bypass": None,
}


def samples(right: int, of: int, differ: int = 0, repeats: int = 1):
    """As many right answers; the last `differ` answers are others."""
    return {
        (("task", number), "none"): Sample(
            ((f"{number if number < of - differ else -number - 1}",) * repeats,), {"acc": number < right}
        )
        for number in range(of)
    }


def faults(split, control=None, baseline=None, *, num_split=None, min_equal=None):
    baseline = samples(10, 20) if baseline is None else baseline
    compared = None if control is None else TaskComparison(baseline, control)
    return list(task_faults(TaskRuns(baseline, TaskComparison(baseline, split, num_split), compared), min_equal))


def written(**changes):
    return json.dumps(WRITTEN | changes)


def test_a_line_of_lm_eval_is_read():
    (found,) = read_samples("capitals", [written()], "s").items()
    assert found == ((("capitals", 3), "strict"), Sample(((" Rome.",),), {"exact_match": 1.0}))


def test_scores_that_are_no_numbers_are_left_out():
    (found,) = read_samples("capitals", [written(exact_match=float("nan"), target="\ud83d")], "s").values()
    assert found.scores == {}


@pytest.mark.parametrize(
    "line", ["{}", "[1]", "not JSON", '{"doc_id": "x", "resps": []}', written(resps=[["-1.5", True]])]
)
def test_another_file_is_refused(line):
    with pytest.raises(ConfigurationError, match="line 2 of lm-eval's samples of capitals"):
        read_samples("capitals", [written(), line], "s")


@pytest.mark.parametrize(
    "settings", [{"until": []}, {"cache_salt": "other"}, {"cache_salt": "s", "temperature": 0.5}, None, "x"]
)
def test_a_task_that_does_not_ask_as_it_is_told_is_refused(settings):
    """Runs that share a prefix cache show nothing of a cache that moves, nor does a die."""
    with pytest.raises(ConfigurationError, match="does not ask as it is told"):
        read_samples("capitals", [written(arguments={"gen_args_0": {"arg_0": "x", "arg_1": settings}})], "s")


def folder_of(path, effective=1):
    """As lm-eval leaves it after two tasks."""
    for name in ("samples_a_b_2026-11-27T11-00-47.608643.jsonl", "samples_c_2026-11-27T11-00-47.608643.jsonl"):
        (path / name).write_text(written() + "\n")
    counts = {task: {"original": 9, "effective": effective} for task in ("a_b", "c")}
    (path / "results_2026-11-27T11-00-47.608643.json").write_text(json.dumps({"n-samples": counts}))
    return path


def test_the_task_is_in_the_name_of_its_file(tmp_path):
    assert {task for (task, _), _ in read_folder(folder_of(tmp_path), "s")} == {"a_b", "c"}


def test_samples_that_lm_eval_could_not_save_are_missed(tmp_path):
    with pytest.raises(ConfigurationError, match="has not saved all samples of a_b"):
        read_folder(folder_of(tmp_path, effective=2), "s")
    with pytest.raises(EvaluationError):
        read_folder(tmp_path / "none", "s")


def test_equal_runs_have_no_fault():
    assert faults(samples(10, 20), samples(10, 20), num_split=20, min_equal=1.0) == []


def test_answers_are_counted_once_however_many_filters_they_went_through():
    one = samples(10, 20)
    other = {(document, "strict"): sample for (document, _), sample in samples(10, 20, differ=4).items()}
    both = {**one, **{(document, "strict"): sample for (document, _), sample in one.items()}}
    run = TaskComparison(both, {**samples(10, 20, differ=4), **other})
    assert (len(run.different), run.num_compared) == (4, 20)


def test_answers_that_differ_more_than_in_the_control_are_a_fault():
    (fault,) = faults(samples(10, 20, differ=8), samples(10, 20))
    assert "8 of 20 answers differ, where 0 do in the control" in fault
    assert faults(samples(10, 20, differ=2), samples(10, 20)) == []
    (fault,) = faults(samples(10, 20, differ=2), samples(10, 20), min_equal=1.0)
    assert "at least 100.0%" in fault


@pytest.mark.parametrize("numbers", [(20, 12), (12, 20)])
def test_a_document_that_only_one_run_has_differs(numbers):
    run = TaskComparison(*(samples(10, number) for number in numbers))
    assert (len(run.different), run.num_compared) == (8, 20)


def test_a_score_names_its_filter():
    assert [named(("capitals", "acc", used)) for used in ("none", "strict")] == [
        "capitals: acc",
        "capitals: acc (strict)",
    ]


@pytest.mark.parametrize("right", [2, 18])
def test_a_score_that_changes_one_way_is_a_fault(right):
    (fault,) = faults(samples(right, 20), samples(10, 20))
    assert fault == f"task: acc changes by {(right - 10) / 20:+.3f}, more than chance makes it"


def test_of_many_scores_one_may_change_more():
    """Eight of eight documents are 2.8 standard deviations, which of forty scores one is by chance now and then."""

    def run(right):
        return {
            ((f"t{task}", number), "none"): Sample((("x",),), {"acc": number < right or task > 0})
            for task in range(40)
            for number in range(8)
        }

    assert faults(run(8), run(0), baseline=run(0)) == []
    one = [{place: sample for place, sample in each.items() if place[0][0] == "t0"} for each in (run(8), run(0))]
    assert len(faults(one[0], one[1], baseline=one[1])) == 1


def test_a_score_that_changes_a_little_or_both_ways_is_none():
    assert faults(samples(7, 20), samples(10, 20)) == [], "three documents of a coin"
    baseline, swapped = samples(10, 20), samples(10, 20)
    for one, other in ((0, 19), (1, 18), (2, 17), (3, 16)):
        places = (("task", one), "none"), (("task", other), "none")
        for place, value in zip(places, (False, True), strict=True):
            swapped[place] = Sample(swapped[place].answers, {"acc": value})
    run = TaskComparison(baseline, swapped)
    assert sum(change != 0 for change in run.changes["task", "acc", "none"]) == 8
    assert faults(swapped, baseline) == []


def test_nothing_asked_and_nothing_moved_are_faults():
    assert faults({}, baseline={}) == ["0 of 0 answers of the whole server are empty"]
    assert faults(samples(10, 20), num_split=9) == ["only 9 of 20 requests went through a split"]
    thrice = samples(10, 20, repeats=3)
    assert faults(thrice, baseline=thrice, num_split=29) == ["only 29 of 60 requests went through a split"]


def test_empty_answers_show_nothing():
    empty = {place: Sample((("",),), sample.scores) for place, sample in samples(10, 20).items()}
    assert faults(empty, empty, baseline=empty) == ["20 of 20 answers of the whole server are empty"]


def test_a_split_that_does_not_answer_is_at_fault():
    whole = samples(10, 20)
    runs = TaskRuns(whole, TaskComparison(whole, {}), TaskComparison(whole, whole), "exit code 1")
    assert list(task_faults(runs, None)) == ["the split did not answer everything: exit code 1"]


def test_it_is_told_what_to_ask_of_whom():
    server = Server("http://here:1", "m", {"Authorization": "Bearer k"}, at_once=4, salt="s", timeout_s=9.6)
    told = Evaluation(("a", "b"), limit=3).settings(server)
    assert (told["model"], told["tasks"], told["limit"]) == ("local-completions", ["a", "b"], 3)
    assert told["gen_kwargs"] == {"temperature": 0, "cache_salt": "s"}
    model = told["model_args"]
    assert model["base_url"] == "http://here:1/v1/completions"
    assert (model["num_concurrent"], model["timeout"], model["max_retries"]) == (4, 10, 1)
    assert model["header"] == {"Authorization": "Bearer k"}


HERE = Server("http://10.1.2.3:1", "m")


def test_servers_are_asked_without_a_proxy(capfd):
    script = "import os, sys; sys.stderr.write(os.environ['NO_PROXY'] + ' ' + os.environ['no_proxy']); sys.exit(3)"
    assert _run([sys.executable, "-c", script], HERE, {"no_proxy": "inside"}) == 3
    assert capfd.readouterr().err == "inside,10.1.2.3 inside,10.1.2.3"


def test_it_does_not_outlive_whoever_has_started_it(monkeypatch):
    started = []

    def interrupted(words, secrets):
        started.append(psutil.Process(int(os.read(words.fileno(), 64))))
        raise KeyboardInterrupt

    monkeypatch.setattr(lm_eval, "_pass_on", interrupted)
    script = "import os, sys, time; sys.stderr.write(str(os.getpid())); sys.stderr.flush(); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        _run([sys.executable, "-c", script], HERE, {})
    assert not started[0].is_running()


def test_sigterm_ends_it_too():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), _ended_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@contextmanager
def metrics(text):
    """A server that shows these."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Server(f"http://127.0.0.1:{server.server_port}", "m")
        finally:
            server.shutdown()
            thread.join()


def test_caches_that_a_router_has_lost_were_not_split():
    router = """
kvferry_router_ready 1
kvferry_router_requests_total{endpoint="x",path="disaggregated",status="200"} 7
kvferry_router_requests_total{endpoint="y",path="disaggregated",status="200"} 2
kvferry_router_requests_total{endpoint="x",path="disaggregated",status="503"} 4
kvferry_router_requests_total{endpoint="x",path="decode-only",status="200"} 5
kvferry_router_lost_caches_total{prefill="p",decode="d",reason="peer_lost"} 3
"""
    for text, expected in ((router, 6), ("kvferry_router_ready 1\n", 0), ("vllm:x 1\n", None), ("<html>", None)):
        with metrics(text) as server:
            assert _num_split(server) == expected
    assert _num_split(server) is None, "nobody is there any more"


def test_no_fewer_than_none_are_split(monkeypatch):
    """Two requests of which both lost their cache, and decode then answered alone."""
    counted = iter((5, 3))
    monkeypatch.setattr(accuracy_tasks, "_num_split", lambda _: next(counted))
    monkeypatch.setattr(Evaluation, "run", lambda *_: {})
    server = Server("http://127.0.0.1:1", "m")
    assert _runs(Evaluation(("a",)), server, server, with_control=False).split.num_split == 0


def test_without_lm_eval_it_is_said_how_to_install_it(monkeypatch):
    monkeypatch.setattr(accuracy_tasks, "find_spec", lambda name: None)
    words = ["bench", "accuracy", "--against", "http://127.0.0.1:1", "--lm-eval", "a"]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "kvferry[lm-eval]" in result.stderr


def test_the_key_of_another_service_is_not_sent():
    """lm-eval sends that of the environment unless it has a header."""
    assert Evaluation(("a",)).settings(Server("http://here:1", "m"))["model_args"]["header"]


def test_secrets_are_hidden_however_they_come(capsys, monkeypatch):
    monkeypatch.setattr(lm_eval, "PIECE_BYTES", 7)
    read, write = os.pipe()
    with os.fdopen(write, "wb") as pipe:
        pipe.write(b"one\rrequest with 'Bearer topsecret'\ntopsecret again")
    with os.fdopen(read, "rb") as words:
        _pass_on(words, ["Bearer topsecret"])
    said = capsys.readouterr().err
    assert "topsecret" not in said
    assert said.splitlines() == ["one", "request with '(hidden)'", "(hidden) again"]


@pytest.mark.parametrize("word", ["--apply_chat_template", "--apply_chat_template=x"])
def test_a_chat_template_makes_a_chat_of_it(word):
    told = Evaluation(("a",), arguments=(word,)).settings(Server("http://here:1", "m"))
    assert told["model"] == "local-chat-completions"
    assert told["model_args"]["base_url"] == "http://here:1/v1/chat/completions"
    assert "limit" not in told


@pytest.mark.parametrize(
    "word", ["--tasks", "--task", "--gen_kwargs=x=1", "-a", "-tother", "-b", "--use_cache", "--limit", "--wandb_args=x"]
)
def test_what_is_not_about_tasks_is_not_passed_on(word):
    with pytest.raises(ConfigurationError, match="not passed on"):
        Evaluation(("a",), arguments=("--num_fewshot", "2", word)).check()
    Evaluation(("a",), arguments=("--num_fewshot", "2", "--include_path=x")).check()
