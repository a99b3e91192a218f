"""How a client sends the body of its request: too slowly, or not to its end."""

from __future__ import annotations

import asyncio
import json
import logging
from urllib.parse import urlsplit

import pytest
from router_harness import Cluster, cluster, decode_engine, prefill_engine

from kvferry.router.config import Registration

GENERATE, TOKENIZE, MEMBERS = "/v1/completions", "/tokenize", "/kvferry/members"
# A limit that is soon over: what the tests wait for comes after it.
SHORT_S = 0.1
OPEN = Registration(is_open=True)


async def begun(c: Cluster, path: str, header: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request of which only the beginning of its body is sent."""
    place = urlsplit(c.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n{header}\r\n"
    writer.write(head.encode() + b'{"prompt": ')
    await writer.drain()
    return reader, writer


async def answer_to(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, dict]:
    """Status and error of an answer after which the router closes the connection: a part of the body is missing."""
    head, body = (await reader.read()).split(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)["error"]


async def count(c: Cluster, endpoint: str, status: int) -> float:
    return await c.metric(f'kvferry_router_requests_total{{endpoint="{endpoint}",path="none",status="{status}"}}')


@pytest.mark.parametrize("path", [GENERATE, TOKENIZE])
@pytest.mark.timeout(60)
async def test_the_time_of_a_request_is_over_while_its_body_is_waited_for(path):
    async with cluster([prefill_engine()], [decode_engine()]) as c:
        status, error = await answer_to(*await begun(c, path, f"x-kvferry-timeout: {SHORT_S}\r\n"))
        assert (status, error["code"], error["reason"]) == (504, "deadline_exceeded", "request_deadline")
        assert await count(c, path, 504) == 1
        assert c.decode[0].seen == []


@pytest.mark.parametrize("path", [GENERATE, TOKENIZE, MEMBERS])
@pytest.mark.timeout(60)
async def test_a_client_that_stops_amid_its_body_is_told_so(path):
    async with cluster([], [decode_engine()], stall_timeout_s=SHORT_S, registration=OPEN) as c:
        status, error = await answer_to(*await begun(c, path))
        assert (status, error["type"], error["code"]) == (408, "invalid_request_error", "request_timeout")
        assert await count(c, path if path != MEMBERS else "other", 408) == 1


async def test_a_client_of_anthropics_reads_both_in_its_own_words():
    async with cluster([], [decode_engine()], stall_timeout_s=SHORT_S) as c:
        status, error = await answer_to(*await begun(c, "/v1/messages"))
        assert (status, error["type"]) == (408, "invalid_request_error")
    async with cluster([], [decode_engine()]) as c:
        status, error = await answer_to(*await begun(c, "/v1/messages", f"x-kvferry-timeout: {SHORT_S}\r\n"))
        assert (status, error["type"], error["code"]) == (504, "api_error", "deadline_exceeded")


async def test_a_body_in_many_pieces_is_whole():
    body = json.dumps({"prompt": "hello", "user": "x" * 50}).encode()

    async def pieces():
        for at in range(len(body)):
            yield body[at : at + 1]

    async with cluster([], [decode_engine()]) as c:
        async with c.session.post(c.url + GENERATE, data=pieces()) as response:
            assert response.status == 200
        assert c.decode[0].seen[0].raw == body


@pytest.mark.parametrize("path", [GENERATE, TOKENIZE])
@pytest.mark.timeout(60)
async def test_a_client_that_leaves_amid_its_body_is_counted_and_no_error(path, caplog):
    caplog.set_level(logging.INFO, "kvferry.router.access")
    async with cluster([], [decode_engine()]) as c:
        _, writer = await begun(c, path, "x-request-id: mine\r\n")
        writer.close()
        while not await count(c, path, 499):
            await asyncio.sleep(0)
        assert await count(c, path, 499) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    entries = [record.fields for record in caplog.records if hasattr(record, "fields")]
    told = [(entry["request_id"], entry["status"], entry["reason"]) for entry in entries]
    # Only requests that generate have a line there.
    assert told == ([("mine", 499, "client_left")] if path == GENERATE else [])


async def test_an_engine_that_leaves_amid_its_registration_is_no_defect(caplog):
    sent, received = [], [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return received.pop(0)

    async def send(message):
        sent.append(message)

    async with cluster([], [decode_engine()], registration=OPEN) as c:
        scope = {"type": "http", "method": "POST", "path": MEMBERS, "query_string": b"", "headers": []}
        await c.app(scope | {"raw_path": MEMBERS.encode(), "client": ("127.0.0.1", 1)}, receive, send)
        assert [message["status"] for message in sent if "status" in message] == [499]
        assert await count(c, "other", 500) == 0
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
