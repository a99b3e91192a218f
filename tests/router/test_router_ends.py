"""What is open when a router ends is broken off, and counted and logged as its client was told."""

import asyncio
import contextlib
import json
import logging

import aiohttp
import pytest
from router_harness import DEADLINE_S, ONE, STREAM, decode_engine, hanging, serving, stalling

from kvferry.cli.server.open_requests import OpenRequests
from kvferry.router.config import RouterConfig
from kvferry.router.http.app import create_app

PATH = "/v1/completions"
COUNT = 'kvferry_router_requests_total{endpoint="%s",path="%s",status="%d"} 1.0'


@contextlib.asynccontextmanager
async def router_before(engine):
    """The open requests of a router, its URL, and a session that asks it."""
    await engine.start()
    requests = OpenRequests(create_app(RouterConfig((), (engine.url,), probe_interval_s=3600.0)))
    try:
        async with asyncio.timeout(DEADLINE_S), serving(requests) as url, aiohttp.ClientSession() as session:
            async with session.get(f"{url}/health") as response:
                assert response.status == 200
            yield requests, url, session
    finally:
        await engine.stop()


async def counts(session, url):
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return [line for line in lines if line.startswith("kvferry_router_requests_total{")]


async def check_told(caplog, session, url, path, status):
    assert await counts(session, url) == [COUNT % (PATH, path, status)]
    entries = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert [(entry["path"], entry["status"]) for entry in entries] == [(path, status)]


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level(logging.INFO, "kvferry.router.access")


async def test_who_has_heard_nothing_is_counted_with_the_503_that_the_client_gets(caplog):
    engine = decode_engine(behave=hanging)
    async with router_before(engine) as (requests, url, session):
        asking = asyncio.create_task(session.post(url + PATH, json={"prompt": "hello"}))
        await engine.arrived.wait()
        requests.break_off()
        async with await asking as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "server_ended")
        await check_told(caplog, session, url, "decode-only", 503)


async def test_a_stream_that_is_broken_off_is_counted_as_one(caplog):
    async with (
        router_before(decode_engine(behave=stalling(ONE))) as (requests, url, session),
        session.post(url + PATH, json=STREAM) as response,
    ):
        assert await response.content.readuntil(b"\n\n") == ONE
        requests.break_off()
        event = (await response.read()).removeprefix(b"data: ")
        assert (response.status, json.loads(event)["error"]["code"]) == (200, "server_ended")
        await check_told(caplog, session, url, "decode-only", 502)


async def test_a_request_about_tokens_is_counted_as_well():
    engine = decode_engine(behave=hanging)
    async with router_before(engine) as (requests, url, session):
        asking = asyncio.create_task(session.post(f"{url}/tokenize", json={"prompt": "hello"}))
        await engine.arrived.wait()
        requests.break_off()
        async with await asking as response:
            assert response.status == 503
        assert await counts(session, url) == [COUNT % ("/tokenize", "none", 503)]


async def test_a_request_of_which_not_all_has_come_is_counted_as_well(caplog):
    async with router_before(decode_engine()) as (requests, url, session):
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        with contextlib.closing(writer):
            writer.write(f'POST {PATH} HTTP/1.1\r\nhost: h\r\ncontent-length: 99\r\n\r\n{{"prompt":'.encode())
            while not requests.num_open:
                await asyncio.sleep(0)
            requests.break_off()
            assert b" 503 " in await reader.readline()
        await check_told(caplog, session, url, "none", 503)
