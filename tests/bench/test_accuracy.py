"""Two servers' answers are compared, and what differs by more than batches do is a fault."""

from __future__ import annotations

import asyncio
import math
import socket
from collections import Counter
from dataclasses import replace

import accuracy_prompts
import pytest
from aiohttp import web
from typer.testing import CliRunner

from kvferry.bench.accuracy.client import IGNORED, Server
from kvferry.bench.accuracy.comparison import Comparison, Measured, Run, num_correct, perplexity
from kvferry.bench.accuracy.completion import Answer, answer_of
from kvferry.bench.accuracy.items import Item, read_items, shipped_items
from kvferry.bench.accuracy.page import _section, accuracy_page
from kvferry.bench.accuracy.run import Extent, _spread, measure
from kvferry.bench.accuracy.verdict import Limits, faults, remarks, too_many_differ
from kvferry.cli.bench.accuracy import _items
from kvferry.cli.bench.command import AccuracyOptions
from kvferry.cli.bench.same_server import is_same_server
from kvferry.cli.main import app
from kvferry.errors import ConfigurationError

ITEMS = tuple(Item(f"prompt {number}", f"p{number}", answer="1") for number in range(4))


def said(ids, logprobs=None, **how):
    words = tuple(map(str, ids))
    path = {"path": "disaggregated", "cache": "received"}
    return Answer(words, tuple(ids), logprobs or (-0.5,) * len(ids), " ".join(words), **path | how)


SAME = tuple(said((1, 2, 3), (-0.5, -0.25, -1.0)) for _ in ITEMS)
WHOLE = tuple(replace(answer, path="", cache="") for answer in SAME)


def compared(answers, baseline=WHOLE):
    return Comparison(ITEMS, Run(tuple(baseline), ()), Run(tuple(answers), ()))


def faults_of(split, control=None, min_equal=None, factor=2.0):
    return faults(Measured(ITEMS, split.baseline, split, control, ""), Limits(min_equal, factor))


def test_the_prompts_are_what_makes_them():
    shipped = shipped_items()
    assert shipped == read_items(accuracy_prompts.text().splitlines())
    assert len({item.name for item in shipped}) == len(shipped) > 100
    lengths = [len(item.prompt) for item in shipped]
    assert min(lengths) < 100 < 12_000 < max(lengths)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ('{"prompt": ""}', "line 2"),
        ('{"text": "x"}', "line 2"),
        ('{"prompt": "x", "expected": "y"}', "line 2"),
        ("[]", "line 2"),
    ],
)
def test_a_wrong_line_is_named(line, words):
    with pytest.raises(ConfigurationError, match=words):
        read_items(['{"prompt": "fine"}', line])


def test_no_prompts_are_none():
    with pytest.raises(ConfigurationError, match="no prompts"):
        read_items(["", " "])


def test_lines_have_their_numbers_for_names():
    assert [item.name for item in read_items(['{"prompt": "a"}', "", '{"prompt": "b", "name": "B"}'])] == ["1", "B"]


def test_two_prompts_have_two_names():
    with pytest.raises(ConfigurationError, match="same name"):
        read_items(['{"prompt": "a", "name": "2"}', '{"prompt": "b"}'])


def test_equal_answers_are_no_fault():
    run = compared(SAME)
    assert (run.num_equal, run.divergences, run.mean_difference, run.num_split) == (4, {}, 0.0, 4)
    assert faults_of(run, compared(WHOLE), min_equal=1.0, factor=1.0) == []


@pytest.mark.parametrize(("tokens", "first"), [((1, 2, 4), 2), ((9, 2, 3), 0), ((1, 2), 2), ((1, 2, 3, 4), 3)])
def test_the_first_token_that_differs_is_found(tokens, first):
    run = compared([said(tokens), *SAME[1:]])
    assert run.divergences == {"p0": first}
    # What follows a different token is not compared.
    assert len(run.differences) == first + 9


def test_texts_of_tokens_are_compared_where_a_server_has_no_ids():
    unnumbered = [replace(answer, ids=()) for answer in SAME]
    assert compared(unnumbered).num_equal == 4
    assert compared([replace(unnumbered[0], tokens=("1", "2", "x")), *unnumbered[1:]]).divergences == {"p0": 2}


def test_log_probabilities_are_compared_as_far_as_tokens_are_equal():
    run = compared([said((1, 2, 9), (-0.4, -0.25, -7.0)), *SAME[1:]])
    assert run.difference(100) == pytest.approx(0.1)
    assert run.mean_difference == pytest.approx(0.1 / 11)


def test_an_error_is_told_and_nothing_compared():
    run = compared([Answer(error="HTTP 500"), *SAME[1:]])
    assert (run.num_compared, run.errors) == (3, ["HTTP 500"])
    assert faults_of(run) == ["1 requests to the split failed, the first: HTTP 500"]


def test_what_the_whole_server_cannot_take_is_left_out():
    refused = Answer(error="HTTP 400: too long", is_unfit=True)
    run = compared([refused, *SAME[1:]], baseline=(refused, *WHOLE[1:]))
    assert (run.num_compared, run.num_equal, run.errors) == (3, 3, [])
    assert faults_of(run, run, min_equal=1.0) == []
    nothing = compared([refused] * 4, baseline=(refused,) * 4)
    assert faults_of(nothing) == ["the whole server has answered nothing: HTTP 400: too long"]


def test_other_errors_of_the_whole_server_are_a_fault():
    gone = compared(SAME, baseline=(WHOLE[0], *[Answer(error="refused")] * 3))
    assert faults_of(gone, min_equal=1.0)[0] == "3 requests to the whole server failed, the first: refused"
    control = compared([Answer(error="HTTP 503")] * 4)
    assert faults_of(compared(SAME), control)[0] == "4 requests to the whole server failed, the first: HTTP 503"


def test_answers_that_differ_more_than_batches_make_them_are_a_fault():
    different = compared([said((7,))] * 4)
    assert "4 of 4 answers differ, where 0 do in the control" in faults_of(different, compared(WHOLE))
    one = compared([said((7,)), *SAME[1:]])
    assert faults_of(one, compared(WHOLE)) == [], "one may be chance"
    (fault,) = faults_of(one, compared(WHOLE), min_equal=1.0)
    assert "at least 100.0%" in fault
    three = compared([*[said((7,))] * 3, SAME[0]])
    assert "too few to tell" in faults_of(three, one)[0]


def test_a_split_that_is_as_good_as_the_control_has_no_fault_and_maybe_a_remark():
    """However many answers differ in both, as with random weights."""
    assert list(too_many_differ(84, 108, 84, None)) == []
    assert list(too_many_differ(85, 108, 84, None)) != [], "nobody can tell"
    different = compared([said((7,))] * 4)
    assert faults_of(different, different) == []
    (remark,) = remarks(84, 108, 84, 108)
    assert "84 of 108 answers differ, and 84 in the control" in remark
    assert list(remarks(10, 108, 10, 108)) == list(remarks(0, 3, 3, 3)) == list(remarks(3, 3, None, 3)) == []


def test_a_split_that_may_be_none_is_remarked():
    (remark,) = remarks(0, 108, 0, None)
    assert "--url may be one server" in remark


def test_answers_without_tokens_compare_nothing():
    one = [replace(answer, path="", cache="") for answer in (said(()), *SAME[1:])]
    assert faults_of(compared(one, baseline=one)) == []
    empty = [said(())] * 3 + [SAME[0]]
    whole = [replace(answer, path="", cache="") for answer in empty]
    assert faults_of(compared(empty, baseline=whole)) == ["3 of 4 answers of the whole server are empty"]


@pytest.mark.parametrize(
    ("answer", "is_right"), [("1", True), (" 1", True), ("1 2 ", True), ("\t1\n", True), ("2", False), (" ", False)]
)
def test_an_answer_is_right_whatever_space_is_around_it(answer, is_right):
    item = Item("x", answer=answer)
    assert num_correct([item], SAME[:1]) == is_right
    assert item.has_answer == bool(answer.strip())


def test_the_share_that_must_be_equal_may_be_met_exactly():
    """0.56 times 100 is more than 56, as a computer multiplies."""
    items = tuple(Item("x", str(number)) for number in range(100))
    other = Run((SAME[0],) * 56 + (said((7,)),) * 44, ())
    split = Comparison(items, Run((WHOLE[0],) * 100, ()), other)
    for share, num_faults in ((0.56, 0), (0.57, 1)):
        assert len(faults(Measured(items, split.baseline, split, None, ""), Limits(share))) == num_faults


def test_ids_are_compared_where_both_servers_tell_them():
    assert compared([replace(SAME[0], ids=(1, 2, 4)), *SAME[1:]]).divergences == {"p0": 2}


def test_what_is_invalid_for_a_server_is_told_from_what_fails():
    assert [answer_of(status, b"{}", {}).is_unfit for status in (400, 413, 422, 401, 404, 429, 500)] == [True] * 3 + [
        False
    ] * 4


def test_a_token_is_never_asked_for_after_nothing():
    assert [each.prompt for each in _spread((5,), (7, 8, 9), 2)] == [(7,), (7, 8)]


def test_a_server_that_is_gone_or_silent_is_an_error_of_each_answer():
    async def ask():
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            gone = Server(f"http://127.0.0.1:{nobody.getsockname()[1]}", "m")
            answers = await gone.answers(["x"], 1, lambda: None)
            measured = await measure(gone, gone, SCORED, Extent(1, 1), lambda *_: lambda: None, with_control=False)
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            server = Server(f"http://127.0.0.1:{silent.getsockname()[1]}", "m", timeout_s=0.2)
            return [*answers, *await server.answers(["x"], 1, lambda: None)], measured

    (gone, silent), measured = asyncio.run(ask())
    assert gone.error
    assert "--timeout" in silent.error
    assert measured.unscored
    assert len(measured.failures) == len(SCORED)


def test_log_probabilities_that_differ_more_than_in_the_control_are_a_fault():
    apart = [said((1, 2, 3), (-0.5, -0.25, -1.0 + 0.01 * step)) for step in range(4)]
    near = [said((1, 2, 3), (-0.5, -0.25, -1.0 + 0.004 * step)) for step in range(4)]
    (fault,) = faults_of(compared(apart), compared(near))
    assert "2 times the control's" in fault
    assert faults_of(compared(apart), compared(near), factor=3.0) == []


@pytest.mark.parametrize("how", [{"path": "decode-only"}, {"cache": "recomputed"}])
def test_what_is_mostly_whole_proves_nothing(how):
    whole = [replace(answer, **how) for answer in SAME]
    assert faults_of(compared([*whole[1:], SAME[0]])) == ["only 1 of 4 requests went through a split"]
    assert faults_of(compared(WHOLE)) == [], "nobody says so"


def test_a_split_is_not_compared_with_a_split():
    assert faults_of(compared(SAME, baseline=SAME)) == ["what was to be the whole server is a split itself"]


def test_a_perplexity_is_a_number():
    assert math.isfinite(perplexity([said((1,), (-9999.0,))]))


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (500, b'{"error": {"message": "no room"}}', "HTTP 500: no room"),
        (200, b"{}", "not a completion"),
        (200, b'{"choices": []}', "not a completion"),
        (200, b'{"choices": [{"text": "x", "logprobs": null}]}', "not a completion"),
        (
            200,
            b'{"choices": [{"text": "x", "token_ids": [1, 2], "logprobs": {"tokens": ["x"], "token_logprobs": [0]}}]}',
            "as many",
        ),
        (500, b'{"error": "\xff"}', "HTTP 500"),
        (200, b'{"choices": [{"text": "\xff"}]}', "not a completion"),
    ],
)
def test_what_is_no_answer_is_an_error(status, body, error):
    assert error in answer_of(status, body, {}).error


class Stub:
    """A server whose tokens are its prompt's words, whose log-probabilities follow from `shift`."""

    def __init__(self, shift=0.0, knows_tokens=True, obeys=True, path=""):
        self.shift, self.knows_tokens, self.obeys, self.path = shift, knows_tokens, obeys, path
        self.salts, self.bodies = set(), []
        self.open, self.most_open = Counter(), Counter()

    async def complete(self, request):
        body = await request.json()
        self.open[body["cache_salt"]] += 1
        self.most_open[body["cache_salt"]] = max(self.most_open[body["cache_salt"]], self.open[body["cache_salt"]])
        # Whoever else asks at the same time has its turn.
        await asyncio.sleep(0)
        self.open[body["cache_salt"]] -= 1
        self.bodies.append(body)
        self.salts.add(body["cache_salt"])
        ids = body["prompt"] if isinstance(body["prompt"], list) else tokens_of(body["prompt"])
        token = (body if self.obeys else {}).get("allowed_token_ids", [sum(ids) % 97])[0]
        logprob = -(sum(ids) % 13) / 7 - self.shift
        choice = {
            "text": f" {token}",
            "token_ids": [token],
            "logprobs": {"tokens": [f" {token}"], "token_logprobs": [logprob]},
        }
        return web.json_response({"choices": [choice]}, headers={"x-kvferry-path": self.path})

    async def tokenize(self, request):
        if self.knows_tokens is None:
            request.transport.close()
        if not self.knows_tokens:
            return web.json_response({"error": {"message": "what?"}}, status=404)
        return web.json_response({"tokens": tokens_of((await request.json())["prompt"]), "count": 1})


def tokens_of(text):
    return [len(word) + ord(word[0]) for word in text.split()]


async def measured(whole, split, items, **how):
    """Of two stubs on loopback."""
    servers, runners = [], []
    for stub in (whole, split):
        app = web.Application()
        app.add_routes([web.post("/v1/completions", stub.complete), web.post("/tokenize", stub.tokenize)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        port = site._server.sockets[0].getsockname()[1]
        servers.append(Server(f"http://127.0.0.1:{port}", "m", at_once=3, salt="s", timeout_s=30.0))
    counted = []
    try:
        found = await measure(
            *servers,
            items,
            Extent(4, 2),
            lambda name, total: lambda: counted.append(name),
            **{"with_control": True} | how,
        )
    finally:
        for runner in runners:
            await runner.cleanup()
    return found, counted


SCORED = (
    Item("the old ferry", "one", reference=" crosses the wide river at noon"),
    Item("a bell", "two", reference=" rings"),
    Item("nothing to score", "three"),
)


def test_references_are_scored_token_by_token_on_both_sides():
    whole, split = Stub(), Stub(shift=0.5)
    found, counted = asyncio.run(measured(whole, split, SCORED))
    assert (found.unscored, len(found.baseline.scores), len(counted)) == ("", 3, 18)
    forced = [body for body in split.bodies if "allowed_token_ids" in body]
    first, last = sorted((body for body in forced if len(body["prompt"]) > 2), key=lambda body: len(body["prompt"]))
    text = tokens_of(SCORED[0].prompt + SCORED[0].reference)
    assert (first["prompt"], first["allowed_token_ids"]) == (text[:3], [text[3]])
    assert (last["prompt"], last["allowed_token_ids"]) == (text[:-1], [text[-1]])
    assert found.split.perplexity == pytest.approx(found.control.perplexity * math.exp(0.5))
    assert found.split.difference(100) == pytest.approx(0.5)
    assert whole.most_open["s-baseline"] == 1
    assert len(whole.salts) == 2, "the control uses no cache of the baseline"
    assert not split.salts & whole.salts


def test_a_server_that_does_not_know_its_tokens_scores_nothing():
    found, _ = asyncio.run(measured(Stub(knows_tokens=False), Stub(), SCORED, with_control=False))
    assert found.unscored == "HTTP 404: what?"
    assert (found.baseline.scores, found.control, found.split.perplexity) == ((), None, None)


def test_a_server_that_hangs_up_when_it_is_asked_for_tokens_scores_nothing():
    found, _ = asyncio.run(measured(Stub(knows_tokens=None), Stub(), SCORED, with_control=False))
    assert found.unscored
    assert not found.failures


def test_tokens_that_a_server_was_not_told_to_say_are_no_scores():
    found, _ = asyncio.run(measured(Stub(obeys=False), Stub(), SCORED, with_control=False))
    assert (found.unscored, found.baseline.scores, found.split.run.scores) == (IGNORED, (), ())
    found, _ = asyncio.run(measured(Stub(), Stub(obeys=False), SCORED, with_control=False))
    assert found.split.errors == [IGNORED] * 3


def test_the_page_says_what_came_of_it():
    run = compared([said((9, 2, 9)), *SAME[1:]])
    found = Measured(ITEMS, run.baseline, run, compared(WHOLE), "")
    text = accuracy_page("<split>", found, ["a fault"])
    assert "&lt;split&gt;" in text
    assert "a fault" in text
    assert text.count("<svg") == 4
    assert _section("Split", run).charts[1].series[0].points == ((1.0, 1.0),), "it differs from its first token on"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--against", "http://127.0.0.1:8000/"],
        ["--against", "http://localhost:8000"],
        ["--url", "http://[::ffff:127.0.0.1]:8000/v1", "--against", "http://[::FFFF:7f00:1]:8000"],
        ["--url", "http://127.0.0.1/", "--against", "http://localhost:80/v1"],
        ["--against", "http://127.0.0.1:1", "--no-control"],
        ["--against", "http://127.0.0.1:1", "--no-control", "--min-equal", "1", "--factor", "3"],
    ],
)
def test_what_would_compare_nothing_is_refused(words):
    result = CliRunner().invoke(app, ["bench", "accuracy", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error:" in result.stderr


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8001"),
        ("http://127.0.0.1/split", "http://localhost/whole"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:99999"),
        ("http://127.0.0.1:8000", f"http://{'a' * 70}.invalid:8000"),
        ("http://127.0.0.1:8000", "nothing"),
    ],
)
def test_servers_that_may_be_two_are_two(one, other):
    assert not is_same_server(one, other)
    assert not is_same_server(other, one)


def test_two_names_of_one_address_may_be_two_servers(monkeypatch):
    """An ingress tells them by their names."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("192.0.2.1", 80))])
    assert not is_same_server("http://split.example", "http://whole.example")
    assert is_same_server("http://192.0.2.1", "http://whole.example")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--", "--include_path", "x"], "these arguments mean nothing here"),
        (["--lm-eval", "a", "--prompts", "x"], "no effect beside --lm-eval"),
        (["--lm-eval", "a", "--plot", "x.html"], "no effect beside --lm-eval"),
    ],
)
def test_options_of_prompts_and_of_tasks_are_not_mixed(words, error):
    result = CliRunner().invoke(app, ["bench", "accuracy", "--against", "http://127.0.0.1:1", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert error in result.stderr


def test_a_file_of_prompts_may_begin_with_the_mark_of_its_encoding(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8-sig")
    assert [item.prompt for item in _items(AccuracyOptions(prompts=str(path)))] == ["a", "b"]


def test_a_limit_takes_prompts_from_all_of_the_file():
    for limit in (1, 7, 60, 107, 108, 1000):
        items = _items(AccuracyOptions(limit=limit))
        assert len(items) == min(limit, 108)
        assert items[-1].name.startswith("sum") or limit < 20
