"""What one asks, what comes back, and what two answers say beside each other."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from kvferry.errors import RequestError
from kvferry.testing.output_check import Answer, Comparison, Question, ask, compare


@contextmanager
def server(status: int, body: bytes, **headers: str) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """The URL of one that answers every request so, and what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            asked[-1]["key"] = self.headers["authorization"]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}", asked
        finally:
            http.shutdown()
            thread.join()


def events(*chunks: dict[str, object]) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def test_an_answer_is_put_together_from_its_events():
    body = events(
        {"choices": [{"text": "so ", "token_ids": [5]}]},
        {"choices": [{"text": "it goes", "token_ids": [6, 7]}], "kvferry": {"bytes": 9}},
        {"choices": [], "usage": {"prompt_tokens": 40}},
    )
    shown = []
    with server(200, body, X_Kvferry_Path="disaggregated") as (url, asked):
        answer = ask(url, Question("tiny", "The ferry", 3, "salt"), shown.append, api_keys=("first", "second"))
    assert (answer.text, answer.token_ids, answer.prompt_tokens) == ("so it goes", (5, 6, 7), 40)
    assert (answer.report, answer.path) == ({"bytes": 9}, "disaggregated")
    assert shown == ["so ", "it goes"]
    assert (asked[0]["cache_salt"], asked[0]["key"]) == ("salt", "Bearer first")


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [
        (
            200,
            events({"choices": [{"text": "so"}]}, {"error": {"message": "the cache did not come"}}),
            "the cache did not",
        ),
        (404, b'{"error": {"message": "no such model"}}', "no such model"),
        (422, b'{"detail": "not found"}', '{"detail": "not found"}'),
        (400, b"[1]", "[1]"),
        (400, b'{"error": "plain"}', '{"error": "plain"}'),
        (502, b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
    ],
)
def test_a_refusal_is_told_in_the_servers_words(status, body, found):
    with server(status, body) as (url, _), pytest.raises(RequestError) as caught:
        ask(url, Question("tiny", "The ferry", 4))
    assert caught.value.what == f"{url} refused the prompt"
    assert caught.value.found.startswith(found)


def test_a_stream_that_is_none_is_no_answer():
    with server(200, b"data: {broken\n\n") as (url, _), pytest.raises(RequestError, match=f"no answer from {url}"):
        ask(url, Question("tiny", "The ferry", 4))


def test_neither_of_two_that_are_compared_is_answered_from_the_others_prefix():
    with server(200, events({"choices": [{"text": "so", "token_ids": [5]}]})) as (url, asked):
        assert compare(url, url, "tiny").equal
    assert asked[0]["cache_salt"] != asked[1]["cache_salt"]
    assert asked[0]["prompt"] == asked[1]["prompt"]


@pytest.mark.parametrize(
    ("text", "token_ids", "cache", "passed", "words"),
    [
        ("same", (1, 2), "received", True, "equal to"),
        ("same", (1, 2), "recomputed", False, "equal to"),
        ("other", (1, 2), "received", False, "DIFFERENT FROM"),
        ("same", (1, 3), "received", False, "DIFFERENT FROM"),
    ],
)
def test_a_comparison_says_what_differs(text, token_ids, cache, passed, words):
    answer = Answer(text, token_ids, 40, {"bytes": 7, "inside": 1}, {"x-kvferry-cache": cache, "date": "today"})
    found = Comparison(answer, Answer("same", (1, 2), 40, {}, {}))
    assert found.passed == passed
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines] == ["answer", "x-kvferry-cache", "bytes", "compared"]
    assert words in lines[-1]
