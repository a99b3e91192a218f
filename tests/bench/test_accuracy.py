"""Two servers' answers are compared, and what differs by more than batches do is a fault."""

from __future__ import annotations

import asyncio
import json
import math

import accuracy_prompts
import pytest
from aiohttp import web

from kvferry.bench.accuracy.client import Server
from kvferry.bench.accuracy.comparison import Comparison, Measured, Run, faults
from kvferry.bench.accuracy.completion import Answer, answer_of
from kvferry.bench.accuracy.items import Item, read_items, shipped_items
from kvferry.bench.accuracy.page import accuracy_page
from kvferry.bench.accuracy.run import Extent, measure
from kvferry.errors import ConfigurationError

ITEMS = tuple(Item(f"prompt {number}", f"p{number}", answer="1") for number in range(4))
SAME = tuple(Answer((1, 2, 3), (-0.5, -0.25, -1.0), "1 2 3", "disaggregated") for _ in ITEMS)


def compared(answers, baseline=SAME):
    return Comparison(ITEMS, baseline, tuple(answers))


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


def test_equal_answers_are_no_fault():
    run = compared(SAME)
    assert (run.num_equal, run.divergences, run.mean_difference, run.num_disaggregated) == (4, {}, 0.0, 4)
    assert faults(run, compared(SAME), min_equal=1.0, factor=1.0) == []


@pytest.mark.parametrize(
    ("tokens", "first"), [((1, 2, 4), 2), ((9, 2, 3), 0), ((1, 2), 2), ((1, 2, 3, 4), 3), (("1", "2", "3"), 0)]
)
def test_the_first_token_that_differs_is_found(tokens, first):
    changed = Answer(tokens, (-0.5,) * len(tokens), "1")
    run = compared([changed, *SAME[1:]])
    assert run.divergences == {"p0": first}
    # What follows a different token is not compared.
    assert len(run.differences) == first + 9


def test_log_probabilities_are_compared_as_far_as_tokens_are_equal():
    run = compared([Answer((1, 2, 9), (-0.4, -0.25, -7.0), "1"), *SAME[1:]])
    assert run.difference(100) == pytest.approx(0.1)
    assert run.mean_difference == pytest.approx(0.1 / 11)


def test_an_error_is_told_and_nothing_compared():
    run = compared([Answer(error="HTTP 500"), *SAME[1:]])
    assert (run.num_compared, run.errors, run.left_out) == (3, ["HTTP 500"], [])
    assert faults(run, None, None, 2.0) == ["1 requests failed, the first: HTTP 500"]


def test_what_the_whole_server_refuses_is_left_out():
    refused = Answer(error="HTTP 400: too long")
    run = compared([refused, *SAME[1:]], baseline=(refused, *SAME[1:]))
    assert (run.num_compared, run.num_equal, run.errors, run.left_out) == (3, 3, [], ["HTTP 400: too long"])
    assert faults(run, run, 1.0, 2.0) == []
    nothing = compared([refused] * 4, baseline=(refused,) * 4)
    assert faults(nothing, None, None, 2.0) == ["the whole server has answered nothing: HTTP 400: too long"]


def test_answers_that_differ_more_than_batches_make_them_are_a_fault():
    other = Answer((7,), (-0.5,), "7", "disaggregated")
    different = compared([other] * 4)
    assert "4 of 4 answers differ, where 0 do in the control" in faults(different, compared(SAME), None, 2.0)
    assert faults(different, different, None, 2.0) == []
    assert faults(compared([other, *SAME[1:]]), compared(SAME), None, 2.0) == [], "one may be chance"
    (fault,) = faults(compared([other, *SAME[1:]]), compared(SAME), 1.0, 2.0)
    assert "at least 100.0%" in fault


def test_log_probabilities_that_differ_more_than_in_the_control_are_a_fault():
    apart = [Answer((1, 2, 3), (-0.5, -0.25, -1.0 + 0.01 * step), "1", "disaggregated") for step in range(4)]
    near = [Answer((1, 2, 3), (-0.5, -0.25, -1.0 + 0.004 * step), "1") for step in range(4)]
    (fault,) = faults(compared(apart), compared(near), None, 2.0)
    assert "2 times the control's" in fault
    assert faults(compared(apart), compared(near), None, 3.0) == []


def test_two_whole_servers_prove_nothing():
    whole = [Answer(answer.tokens, answer.logprobs, answer.text, "decode-only") for answer in SAME]
    assert "not one request was split" in faults(compared(whole), None, None, 2.0)[0]
    unsaid = [Answer(answer.tokens, answer.logprobs, answer.text) for answer in SAME]
    assert faults(compared(unsaid), None, None, 2.0) == []


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
    ],
)
def test_what_is_no_answer_is_an_error(status, body, error):
    assert error in answer_of(status, body, "").error


class Stub:
    """A server whose tokens are its prompt's words, whose log-probabilities follow from `shift`."""

    def __init__(self, shift=0.0, knows_tokens=True):
        self.shift, self.knows_tokens, self.salts, self.bodies = shift, knows_tokens, set(), []

    async def complete(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.salts.add(body["cache_salt"])
        ids = body["prompt"] if isinstance(body["prompt"], list) else tokens_of(body["prompt"])
        token = body.get("allowed_token_ids", [sum(ids) % 97])[0]
        logprob = -(sum(ids) % 13) / 7 - self.shift
        choice = {
            "text": f" {token}",
            "token_ids": [token],
            "logprobs": {"tokens": [f" {token}"], "token_logprobs": [logprob]},
        }
        return web.json_response({"choices": [choice]}, headers={"x-kvferry-path": "disaggregated"})

    async def tokenize(self, request):
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
    assert len(whole.salts) == 2, "the control uses no cache of the baseline"
    assert not split.salts & whole.salts


def test_a_server_that_does_not_know_its_tokens_scores_nothing():
    found, _ = asyncio.run(measured(Stub(knows_tokens=False), Stub(), SCORED, with_control=False))
    assert found.unscored == "HTTP 404: what?"
    assert (found.baseline.scores, found.control, found.split.perplexity) == ((), None, None)


def test_the_page_says_what_came_of_it():
    run = compared([Answer((1, 2, 9), (-0.4, -0.25, -7.0), "<b>"), *SAME[1:]])
    found = Measured(ITEMS, Run(SAME, ()), run, compared(SAME), "")
    text = accuracy_page("<split>", found, ["a fault"])
    assert "&lt;split&gt;" in text
    assert "a fault" in text
    assert text.count("<svg") == 4
    json.dumps(run.divergences)
