"""What lm-eval writes, what it is told, and when two of its runs are too far apart."""

from __future__ import annotations

import json

import pytest

from kvferry.bench.accuracy.client import Server
from kvferry.bench.accuracy.lm_eval import Evaluation, read_files
from kvferry.bench.accuracy.samples import Sample, TaskComparison, TaskRuns, read_samples, task_faults
from kvferry.errors import ConfigurationError

# A line that lm-eval 0.4.13 wrote, but for its hashes.
WRITTEN = {
    "doc_id": 3,
    "doc": {"question": "The capital of Italy is", "answer": "Rome"},
    "target": "Rome",
    "arguments": {"gen_args_0": {"arg_0": "The capital of Italy is", "arg_1": {"until": ["\n"]}}},
    "resps": [[" Rome."]],
    "filtered_resps": ["Rome"],
    "filter": "strict",
    "metrics": ["exact_match", "bypass"],
    "exact_match": 1.0,
    "bypass": None,
}


def samples(right: int, of: int, differ: int = 0):
    """As many right answers; the last `differ` answers are others."""
    return {
        (("task", number), "none"): Sample(number if number < of - differ else -number - 1, {"acc": number < right})
        for number in range(of)
    }


def faults(split, control=None, baseline=None, *, num_split=None, min_equal=None):
    baseline = samples(10, 20) if baseline is None else baseline
    compared = None if control is None else TaskComparison(baseline, control)
    return list(task_faults(TaskRuns(baseline, TaskComparison(baseline, split, num_split), compared), min_equal))


def test_a_line_of_lm_eval_is_read():
    (found,) = read_samples("capitals", [json.dumps(WRITTEN)]).items()
    assert found == ((("capitals", 3), "strict"), Sample([[" Rome."]], {"exact_match": 1.0}))


@pytest.mark.parametrize("line", ["{}", "[1]", "not JSON", '{"doc_id": "x", "resps": []}'])
def test_another_file_is_refused(line):
    with pytest.raises(ConfigurationError, match="line 2 of lm-eval's samples of capitals"):
        read_samples("capitals", [json.dumps(WRITTEN), line])


def test_the_task_is_in_the_name_of_its_file(tmp_path):
    names = ["samples_a_b_2026-11-27T11-00-47.608643.jsonl", "samples_c_2026-11-27T11-00-47.608643.jsonl"]
    for name in names:
        (tmp_path / name).write_text(json.dumps(WRITTEN) + "\n")
    found = read_files([tmp_path / name for name in names])
    assert {task for (task, _), _ in found} == {"a_b", "c"}


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


def test_a_document_that_only_one_run_has_differs():
    run = TaskComparison(samples(10, 20), samples(10, 12))
    assert (len(run.different), run.num_compared) == (8, 20)


@pytest.mark.parametrize("right", [2, 18])
def test_a_score_that_changes_one_way_is_a_fault(right):
    (fault,) = faults(samples(right, 20), samples(10, 20))
    assert fault == f"acc of task changes by {(right - 10) / 20:+.3f}, more than chance makes it"


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
    assert faults({}, baseline={}) == ["lm-eval has asked the whole server nothing"]
    assert faults(samples(10, 20), num_split=9) == ["only 9 of 20 requests went through a split"]


def test_it_is_told_what_to_ask_of_whom():
    server = Server("http://here:1", "m", {"Authorization": "Bearer k"}, at_once=4, salt="s", timeout_s=9.6)
    told = Evaluation(("a", "b"), limit=3).settings(server)
    assert (told["model"], told["tasks"], told["limit"]) == ("local-completions", ["a", "b"], 3)
    assert told["gen_kwargs"] == {"temperature": 0, "cache_salt": "s"}
    model = told["model_args"]
    assert model["base_url"] == "http://here:1/v1/completions"
    assert (model["num_concurrent"], model["timeout"], model["header"]) == (4, 10, {"Authorization": "Bearer k"})


@pytest.mark.parametrize("word", ["--apply_chat_template", "--apply_chat_template=x"])
def test_a_chat_template_makes_a_chat_of_it(word):
    told = Evaluation(("a",), arguments=(word,)).settings(Server("http://here:1", "m"))
    assert told["model"] == "local-chat-completions"
    assert told["model_args"]["base_url"] == "http://here:1/v1/chat/completions"
    assert not {"header", "limit"} & {*told, *told["model_args"]}


@pytest.mark.parametrize("word", ["--tasks", "--gen_kwargs=x=1", "-a", "--use_cache"])
def test_what_the_command_decides_is_not_decided_twice(word):
    with pytest.raises(ConfigurationError, match="set by kvferry"):
        Evaluation(("a",), arguments=("--num_fewshot", "2", word)).check()
    Evaluation(("a",), arguments=("--num_fewshot", "2")).check()
