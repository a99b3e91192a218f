"""`kvferry top`: what it makes of two looks at a router, and of a real one."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvferry.cli import main
from kvferry.cli.scrape import START, reading_of
from kvferry.cli.top import watch as command
from kvferry.cli.top.command import TopOptions
from kvferry.cli.top.view import Frame, summary, view
from kvferry.errors import ConfigurationError

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))
from router_harness import cluster, decode_engine, prefill_engine

BEFORE = """# TYPE requests counter
requests_total{path="a",status="200"} 10
requests_total{path="b",status="200"} 5
# TYPE gap histogram
gap_bucket{le="0.1"} 0
gap_bucket{le="1.0"} 0
gap_bucket{le="+Inf"} 0
gap_sum 0
gap_count 0
"""
AFTER = """# TYPE requests counter
requests_total{path="a",status="200"} 30
requests_total{path="b",status="200"} 5
# TYPE gap histogram
gap_bucket{le="0.1"} 98
gap_bucket{le="1.0"} 100
gap_bucket{le="+Inf"} 100
gap_sum 5
gap_count 100
"""


def test_rates_and_percentiles_are_of_the_time_between_two_looks():
    before, after = reading_of(BEFORE, 10.0), reading_of(AFTER, 12.0)
    assert after.rate(before, "requests_total") == 10
    assert after.rate(before, "requests_total", path="b") == 0
    assert after.by("path", "requests_total") == {"a": 30, "b": 5}
    assert after.percentile(before, "gap", 0.5) == pytest.approx(0.1 * 50 / 98)
    assert after.percentile(before, "gap", 0.99) == pytest.approx(0.1 + 0.9 * 1 / 2)
    assert after.mean(before, "gap") == 0.05
    assert after.mean(after, "gap") == after.percentile(after, "gap", 0.5) == 0
    assert after.rate(after, "requests_total") == 0
    assert before.rate(after, "requests_total") == 0


MEMBER = {
    "role": "decode",
    "url": "http://d0",
    "origin": "registered",
    "healthy": True,
    "ready": True,
    "breaker": "closed",
    "in_flight_requests": 3,
    "in_flight_tokens": 77,
    "prefill_tokens_per_s": 0.0,
    "models": ["tiny"],
}
PAIR = {"prefill": "http://p0", "decode": "http://d0", "breaker": "open"}
MEMBERS = {
    "members": [MEMBER, MEMBER | {"healthy": False}, MEMBER | {"ready": False}, MEMBER | {"breaker": "open"}],
    "broken_pairs": [PAIR],
    "incompatible_pairs": [PAIR],
}


def shown(frame: Frame) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(view(frame))
    return console.file.getvalue()


def test_a_frame_shows_who_is_there_and_what_is_out():
    reading = reading_of(BEFORE, 10.0)
    text = shown(Frame(reading, reading, MEMBERS))
    for words in ("http://d0", "77", "down", "not ready", "failing (open)", "tiny"):
        assert words in text
    assert "transfers fail: http://p0 to http://d0 (open)" in text
    assert "incompatible: http://p0" in text
    assert "more pairs" not in text
    many = MEMBERS | {"num_incompatible_pairs": 125_000}
    assert "incompatible: 124,999 more pairs" in shown(Frame(reading, reading, many))


def test_answers_that_are_errors_of_the_service_are_counted():
    """Retries alone look like a fleet that gets on."""
    text = 'kvferry_router_requests_total{{endpoint="e",path="p",status="{}"}} {}\n'
    before, after = (
        reading_of("".join(text.format(*line) for line in lines), at_s)
        for at_s, lines in ((10.0, [(200, 5), (500, 1)]), (12.0, [(200, 5), (500, 9), (502, 4), (429, 7)]))
    )
    assert "answered with 5xx 6.0/s" in shown(Frame(before, after, MEMBERS))
    assert summary(Frame(before, after, MEMBERS))["trouble"]["answered with 5xx"] == 13
    assert "answered" not in shown(Frame(before, before, MEMBERS)).replace("answers", "")


async def test_a_frame_of_a_real_router_has_its_figures():
    async with cluster([prefill_engine()], [decode_engine()]) as c:
        before = reading_of(await c.metrics(), 0.0)
        for _ in range(4):
            await c.complete({"prompt": "x", "stream": True})
        frame = Frame(before, reading_of(await c.metrics(), 2.0), await c.members())
        found = summary(frame)
        assert found["requests_per_s"] == 2
        # Three frames and the end of each stream: those that come together are counted, too.
        assert found["ttft_p50_s"] > 0
        assert set(found["phases_s"]) == {"queue", "prefill", "first_decode"}
        assert re.search(r"2\.0 requests/s  \d+ streamed tokens/s", shown(frame))


async def test_tokens_of_whole_answers_are_not_said_to_be_none():
    """The router counts what lies between the tokens of streams. It reads no others."""
    async with cluster([prefill_engine()], [decode_engine()]) as c:
        await c.complete({"prompt": "x"})
        frame = Frame(START, reading_of(await c.metrics(), 0.0), await c.members())
    assert shown(frame).startswith("1 requests  0 streamed tokens since the router started")


async def test_once_shows_totals_since_the_router_started(capsys):
    async with cluster([prefill_engine()], [decode_engine()]) as c:
        for _ in range(3):
            await c.complete({"prompt": "x", "stream": True})
        no_nap = lambda seconds: pytest.fail("waited")  # noqa: E731
        for as_json in (False, True):
            options = TopOptions(c.url, 2.0, once=True, as_json=as_json)
            await asyncio.to_thread(command.top, options, no_nap)
    *table, line = capsys.readouterr().out.splitlines()
    assert table[0].startswith("3 requests ")
    assert re.search(r" \d+ streamed tokens since the router started$", table[0].rstrip())
    assert "first token p50 -" not in table[1]
    found = json.loads(line)
    assert (found["requests"], found["requests_per_s"]) == (3, None)
    assert found["ttft_p50_s"] > 0


def test_what_did_not_happen_took_no_time_at_all():
    reading = reading_of(BEFORE, 10.0)
    found = summary(Frame(reading, reading, MEMBERS))
    assert found["ttft_p50_s"] is found["itl_p99_s"] is None
    assert "p50 -" in shown(Frame(reading, reading, MEMBERS))


async def test_into_a_pipe_frames_follow_one_another(capsys):
    naps = iter([None, None])

    def sleep(seconds):
        if next(naps, 0) is not None:
            raise KeyboardInterrupt

    async with cluster([], [decode_engine()]) as c:
        options = TopOptions(c.url, 2.0, once=False, as_json=False)
        with pytest.raises(KeyboardInterrupt):
            await asyncio.to_thread(command.top, options, sleep)
        assert capsys.readouterr().out.count(c.decode[0].url) == 2


async def test_the_command_asks_a_running_router(capsys):
    async with cluster([], [decode_engine()]) as c:
        options = TopOptions(c.url, 2.0, once=True, as_json=True)
        await asyncio.to_thread(command.top, options, lambda _: None)
        told = json.loads(capsys.readouterr().out)
        assert [member["role"] for member in told["members"]] == ["decode"]
        await asyncio.to_thread(command.top, TopOptions(c.url, 2.0, once=True, as_json=False), lambda _: None)
        told = capsys.readouterr().out
        assert c.decode[0].url in told
        assert told.endswith("\n")


def test_a_router_that_is_not_there_is_said_to_be_so():
    with pytest.raises(ConfigurationError, match="no router answers"):
        command.top(TopOptions("http://127.0.0.1:1", 1.0, once=True, as_json=True))


@pytest.mark.parametrize("said", [b"[]", b"{}", b'{"members": 1}'])
def test_who_answers_something_else_is_no_router(monkeypatch, said):
    monkeypatch.setattr(command, "get", lambda _url, _timeout_s: said)
    with pytest.raises(ConfigurationError, match=r"no router answers at .*; found: a list of members"):
        command.top(TopOptions("http://127.0.0.1:1", 1.0, once=True, as_json=True))


@pytest.mark.parametrize("once", [True, False])
async def test_an_engine_is_no_router(once):
    async with cluster([], [decode_engine()]) as c:
        options = TopOptions(c.decode[0].url, 2.0, once, as_json=False)
        with pytest.raises(ConfigurationError, match="it is no router that answers"):
            await asyncio.to_thread(command.top, options, lambda _: None)


def test_what_lies_past_the_last_edge_is_put_at_the_last_edge():
    text = AFTER.replace('le="1.0"} 100', 'le="1.0"} 98')
    assert reading_of(text, 12.0).percentile(reading_of(BEFORE, 10.0), "gap", 0.99) == 1.0


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://127.0.0.1:1/ x"])
def test_what_cannot_be_asked_is_said_to_be_no_router(url):
    with pytest.raises(ConfigurationError, match="no router answers"):
        command.top(TopOptions(url, 1.0, once=True, as_json=True))


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"])
def test_neither_is_what_speaks_no_http_or_ends_amid_its_answer(said):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        options = TopOptions(f"http://127.0.0.1:{server.getsockname()[1]}", 1.0, once=True, as_json=True)
        with pytest.raises(ConfigurationError, match="no router answers"):
            command.top(options)
        thread.join(20)


async def test_no_proxy_is_asked_for_a_fleet():
    async with cluster([], [decode_engine()]) as c:
        words = f"from kvferry.cli.http_get import get; get({c.decode[0].url + '/health'!r}, 20.0)"
        environment = os.environ | {"http_proxy": "http://127.0.0.1:9"}
        asking = await asyncio.create_subprocess_exec(sys.executable, "-c", words, env=environment)
        assert await asking.wait() == 0


def test_what_is_no_url_is_said_to_be_none():
    result = CliRunner().invoke(main.app, ["top", "127.0.0.1:8000"])
    assert result.exit_code == 2
    assert "invalid router URL" in result.stderr
