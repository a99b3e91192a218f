"""The router on real sockets: answers, streams, headers, models, readiness."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import openai
import pytest
from aiohttp import web
from router_harness import (
    STREAM,
    TRANSFER,
    cluster,
    decode_engine,
    decoding,
    failing,
    hanging,
    open_stream,
    prefill_engine,
    prefilling,
)
from yarl import URL

from kvferry import __version__
from kvferry.errors import IllegalEventError
from kvferry.router.config import Registration
from kvferry.router.events import Opened
from kvferry.router.flow.state_machine import Flow
from kvferry.router.http import app

DISAGGREGATED = "disaggregated"
COUNT_OF_DEFECTS = 'kvferry_router_requests_total{endpoint="/v1/completions",path="%s",status="500"}'


def client_of(c, retries=0):
    return openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="sk-test", max_retries=retries)


async def test_the_openai_client_completes():
    async with cluster([prefill_engine()], [decode_engine()]) as c, client_of(c) as client:
        answer = await client.completions.create(model="tiny", prompt="hello", max_tokens=9)
        assert answer.choices[0].text == "one two"
        assert answer.model_extra["kvferry"] == {"moved_bytes": 7}
        [prefill], [decode] = c.prefill[0].seen, c.decode[0].seen
        assert (prefill.body["max_tokens"], prefill.body["stream"]) == (1, False)
        assert decode.body["max_tokens"] == 9
        assert decode.body["kv_transfer_params"] == {**TRANSFER, "remote_engine_id": "p0"}
        assert prefill.headers["Authorization"] == decode.headers["Authorization"] == "Bearer sk-test"


async def test_the_openai_client_streams():
    async with cluster([prefill_engine()], [decode_engine()]) as c, client_of(c) as client:
        messages = [{"role": "user", "content": "hello"}]
        stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "one two"
        assert chunks[-1].model_extra["kvferry"] == {"moved_bytes": 7}
        assert c.decode[0].seen[0].body["stream"] is True
        assert await c.metric('kvferry_router_time_to_first_token_seconds_count{path="disaggregated"}') == 1


@pytest.mark.parametrize(
    "pieces",
    [
        [b'data: {"x": 1}\n\n', b"data: [DONE]\n\n", b": trailing comment\n\n"],
        [b'data: {"x": 1}\r\n\r\n', b"data: [DONE]\r\n\r\n"],
    ],
)
@pytest.mark.parametrize("prefill", [[], ["p0"]])
async def test_a_stream_passes_as_it_arrives(prefill, pieces):
    """The engine sends the next event only after the client has the last one: none may be held back."""
    received = asyncio.Semaphore(0)

    async def behave(request, seen):
        response = await open_stream(request)
        for piece in pieces:
            await response.write(piece)
            await received.acquire()
        return response

    async with cluster([prefill_engine(name) for name in prefill], [decode_engine("d0", behave)]) as c:
        body = STREAM
        async with c.session.post(c.url + "/v1/completions", json=body) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            for piece in pieces:
                assert await response.content.readany() == piece
                received.release()
            assert await response.content.readany() == b""


async def test_bodies_and_headers_reach_the_client_verbatim():
    raw = b'{"a":1.10,\n "kv_transfer_params": {"x": null}, "kvferry": {}}  '

    async def behave(request, seen):
        headers = {"content-type": "application/json", "x-engine": "d", "server": "secret", "set-cookie": "a=b"}
        return web.Response(body=raw, status=201, headers=headers)

    async with cluster([prefill_engine()], [decode_engine("d0", behave)]) as c:
        response = await c.complete(headers={"x-request-id": "mine-1", "x-tenant": "t", "te": "trailers"})
        assert (response.status, response.raw) == (201, raw)
        assert response.headers["x-engine"] == "d"
        assert response.headers["set-cookie"] == "a=b"
        assert response.headers.getall("server") == ["uvicorn"]
        assert len(response.headers.getall("date")) == 1
        assert response.headers.getall("x-request-id") == ["mine-1"]
        assert response.headers["x-kvferry-path"] == DISAGGREGATED
        for engine in (c.prefill[0], c.decode[0]):
            headers = {name.lower(): value for name, value in engine.seen[0].headers.items()}
            assert (headers["x-request-id"], headers["x-tenant"]) == ("mine-1", "t")
            assert "te" not in headers
            assert headers["host"] == engine.url.removeprefix("http://")


async def test_an_id_is_made_and_is_the_same_on_both_requests():
    async with cluster([prefill_engine()], [decode_engine()]) as c:
        response = await c.complete()
        ids = {engine.seen[0].headers["X-Request-ID"] for engine in (c.prefill[0], c.decode[0])} | {
            response.headers["x-request-id"]
        }
        assert len(ids) == 1
        assert (await c.complete()).headers["x-request-id"] not in ids


async def test_query_and_compression_are_between_client_and_decode():
    async def behave(request, seen):
        response = web.json_response({"big": "x" * 4096})
        response.enable_compression(web.ContentCoding.gzip)
        return response

    async with cluster([prefill_engine()], [decode_engine("d0", behave)]) as c:
        url = c.url + "/v1/completions?a=1%20b&c"
        async with c.session.post(url, json={"prompt": "a"}) as response:
            assert response.headers["content-encoding"] == "gzip"
            assert (await response.json())["big"] == "x" * 4096
        assert c.decode[0].seen[0].path == c.prefill[0].seen[0].path == "/v1/completions?a=1%20b&c"
        assert c.prefill[0].seen[0].headers["Accept-Encoding"] == "identity"


async def test_a_large_prompt_passes():
    async with cluster([prefill_engine()], [decode_engine()]) as c:
        prompt = "word " * 600_000
        data = io.BytesIO(json.dumps({"prompt": prompt}).encode())
        async with c.session.post(c.url + "/v1/completions", data=data) as response:
            assert response.status == 200
        assert c.decode[0].seen[0].body["prompt"] == prompt


async def test_a_4xx_of_prefill_leaves_the_word_to_decode():
    p0, p1 = prefill_engine("p0", failing(422, "one token is no call")), prefill_engine("p1")
    async with cluster([p0, p1], [decode_engine("d0", failing(404, "no such model")), decode_engine("d1")]) as c:
        response = await c.complete()
        assert response.status == 404
        assert response.error["message"] == "no such model"
        assert response.headers["retry-after"] == "3"
        assert response.headers["x-kvferry-reason"] == "prefill_refused"
        assert len(p1.seen) == len(c.decode[1].seen) == 0


async def test_a_4xx_of_decode_reaches_the_client_as_it_is():
    async with cluster([prefill_engine()], [decode_engine("d0", failing(429, "busy")), decode_engine("d1")]) as c:
        response = await c.complete()
        assert (response.status, response.headers["retry-after"]) == (429, "3")
        assert len(c.decode[1].seen) == 0


async def test_two_prefill_and_two_decode_instances_share_concurrent_work():
    """Four requests at once, held in prefill and then in decode: two on each instance."""
    released = asyncio.Event()

    def counted(behave, arrived):
        async def wait(request, seen):
            arrived.release()
            await released.wait()
            return await behave(request, seen)

        return wait

    arrived = asyncio.Semaphore(0)
    prefill = [prefill_engine(name, counted(prefilling(name), arrived)) for name in ("p0", "p1")]
    async with cluster(prefill, [decode_engine("d0"), decode_engine("d1")]) as c:
        tasks = [asyncio.create_task(c.complete()) for _ in range(4)]
        for _ in tasks:
            await arrived.acquire()
        for engine in (*c.prefill, *c.decode):
            role = "prefill" if engine in c.prefill else "decode"
            line = f'kvferry_router_in_flight_requests{{instance="{engine.url}",role="{role}"}}'
            assert await c.metric(line) == 2
        released.set()
        assert [(await task).status for task in tasks] == [200] * 4
        assert [len(engine.seen) for engine in (*c.prefill, *c.decode)] == [2, 2, 2, 2]
        assert "_in_flight_requests" in await c.metrics()
        for engine in c.prefill:
            line = f'kvferry_router_in_flight_requests{{instance="{engine.url}",role="prefill"}}'
            assert await c.metric(line) == 0


async def test_a_busy_instance_is_spared():
    held = asyncio.Event()

    async def first_waits(request, seen):
        if seen.body["prompt"] == "long":
            await held.wait()
        return web.json_response({"ok": True})

    busy, idle = decode_engine("d0", first_waits), decode_engine("d1", first_waits)
    async with cluster([], [busy, idle]) as c:
        long = asyncio.create_task(c.complete({"prompt": "long"}))
        await busy.arrived.wait()
        for _ in range(3):
            assert (await c.complete({"prompt": "short"})).status == 200
        assert (len(busy.seen), len(idle.seen)) == (1, 3)
        held.set()
        assert (await long).status == 200


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        (b"no json", "found:", None),
        (b"[1]", "expected: a JSON object", None),
        (b"{}", "prompt is missing", "prompt"),
        (b'{"prompt": "a", "stream": 1}', "stream cannot be used", "stream"),
        (b'{"prompt": "a", "kv_transfer_params": {}}', "must not be sent by clients", "kv_transfer_params"),
    ],
)
async def test_a_malformed_body_is_a_400_in_words(body, words, param):
    async with cluster([prefill_engine()], [decode_engine()]) as c:
        async with c.session.post(c.url + "/v1/completions", data=body) as response:
            assert response.status == 400
            error = (await response.json())["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            assert words in error["message"]
            assert "hint:" in error["message"]
        assert len(c.prefill[0].seen) == len(c.decode[0].seen) == 0
        line = 'kvferry_router_requests_total{endpoint="/v1/completions",path="none",status="400"}'
        assert await c.metric(line) == 1


async def test_an_id_with_a_separator_is_a_400():
    async with cluster([], [decode_engine()]) as c:
        response = await c.complete(headers={"x-request-id": "a,b"})
        assert response.status == 400
        assert "x-request-id" in response.error["message"]
        assert response.headers["x-request-id"] not in ("", "a,b")


@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 400), ("/nowhere", 404), ("/v1/models", 405)])
async def test_a_refusal_is_found_by_the_caller_s_id(path, status):
    async with (
        cluster([], [decode_engine()]) as c,
        c.session.post(c.url + path, data=b"{", headers={"x-request-id": "mine-1"}) as response,
    ):
        assert (response.status, response.headers["x-request-id"]) == (status, "mine-1")


async def test_who_shows_no_key_is_counted_and_logged(caplog):
    caplog.set_level(logging.INFO, "kvferry.router.access")
    ids = {b"/v1/completions": "told-1", b"/v1/models": "told-2"}
    async with cluster([], [decode_engine()]) as c:
        for path, request_id in ids.items():
            scope = {"type": "http", "method": "POST", "path": path.decode(), "headers": []}
            c.app.turn_away(scope, request_id)
        for endpoint in ("/v1/completions", "other"):
            line = f'kvferry_router_requests_total{{endpoint="{endpoint}",path="none",status="401"}}'
            assert await c.metric(line) == 1
    assert [record.fields["request_id"] for record in caplog.records if hasattr(record, "fields")] == ["told-1"]


async def test_a_too_large_body_is_a_413_announced_or_not():
    async def chunks():
        yield b'{"prompt": "'
        yield b"x" * 200
        yield b'"}'

    async with cluster([], [decode_engine()], max_body_bytes=100) as c:
        for data in (b'{"prompt": "' + b"x" * 100 + b'"}', chunks()):
            async with c.session.post(c.url + "/v1/completions", data=data) as response:
                assert response.status == 413
                assert (await response.json())["error"]["code"] == "request_too_large"
        assert c.decode[0].seen == []


async def test_a_body_that_is_announced_too_large_is_refused_before_it_comes():
    async with cluster([], [decode_engine()], max_body_bytes=100) as c:
        host, port = c.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 101\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.close()
        await writer.wait_closed()


async def test_a_finished_prefill_is_no_load_any_more():
    d = decode_engine("d0", hanging)
    async with cluster([prefill_engine()], [d]) as c:
        task = asyncio.create_task(c.complete())
        await d.arrived.wait()
        for engine, role, num in ((c.prefill[0], "prefill", 0), (d, "decode", 1)):
            line = f'kvferry_router_in_flight_requests{{instance="{engine.url}",role="{role}"}}'
            assert await c.metric(line) == num
        task.cancel()
        await d.left.wait()


async def test_unknown_paths_and_methods_are_openai_errors():
    async with cluster([], [decode_engine()]) as c:
        for method, path, status, words in (
            ("GET", "/v1/nonsense", 404, "POST to /v1/completions"),
            ("POST", "/v1/completions/", 404, "POST to /v1/completions"),
            ("GET", "/v1/completions", 405, "expected: POST"),
            ("POST", "/v1/models", 405, "expected: "),
            ("DELETE", "/health", 405, "expected: "),
        ):
            async with c.session.request(method, c.url + path) as response:
                assert response.status == status
                error = (await response.json())["error"]
                assert error["type"] == "invalid_request_error"
                assert words in error["message"]


async def test_what_engines_are_asked_is_a_path_of_ours():
    """A path that only decodes to nearly one of them is not passed on as it decodes: here, with a line feed in it."""
    d = decode_engine()
    async with cluster([], [d]) as c:
        almost = URL(c.url + "/v1/completions%0a?a=b", encoded=True)
        async with c.session.post(almost, json={"prompt": "x", "max_tokens": 1}) as response:
            assert response.status == 200
        (seen,) = d.seen
        assert seen.path == "/v1/completions?a=b"


async def test_models_are_the_union_in_order():
    p, d0, d1 = prefill_engine(), decode_engine("d0"), decode_engine("d1")
    p.models = [{"id": "a", "owned_by": "p"}]
    d0.models = [{"id": "a", "owned_by": "p"}, {"id": "b", "extra": 1.10}]
    d1.models = [{"no id": 1}]
    async with cluster([p], [d0, d1]) as c, client_of(c) as client:
        assert [model.id async for model in client.models.list()] == ["a", "b"]
        async with c.session.get(c.url + "/v1/models") as response:
            assert b'"extra": 1.1' in await response.read()


@pytest.mark.parametrize(
    "listed",
    [
        b'{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"data": [{"id": "a"}, {"id": "b", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        b'{"data": [{"id": "\xff"}]}',
    ],
    ids=["list", "entry", "no UTF-8"],
)
async def test_a_listing_that_cannot_be_read_is_none(listed):
    async def list_models(request):
        return web.Response(body=listed, content_type="application/json")

    p, d = prefill_engine(), decode_engine()
    p.list_models, d.models = list_models, [{"id": "good"}]
    async with cluster([p], [d]) as c:
        for path in ("/v1/models", "/v1/models/good"):
            async with c.session.get(c.url + path) as response:
                assert (response.status, "good" in await response.text()) == (200, True)


async def test_a_router_without_engines_has_no_models_yet_and_a_version():
    async with cluster([], [], registration=Registration(is_open=True)) as c:
        for path in ("/v1/models", "/v1/models/tiny"):
            async with c.session.get(c.url + path) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "no_instance"
        async with c.session.get(c.url + "/version") as response:
            assert await response.json() == {"version": __version__}


async def test_no_models_is_a_502():
    async with cluster([], [decode_engine()]) as c, c.session.get(c.url + "/v1/models") as response:
        assert response.status == 502
        assert (await response.json())["error"]["code"] == "no_models"


async def test_a_refused_listing_is_no_listing_and_keeps_its_status():
    d0, d1 = decode_engine("d0"), decode_engine("d1")
    d0.models, d0.models_status = [{"id": "a"}], 401
    d1.models_status = 500
    async with cluster([], [d0, d1]) as c, c.session.get(c.url + "/v1/models") as response:
        assert response.status == 401


async def test_readiness_needs_a_decode_instance():
    p, d = prefill_engine(), decode_engine()
    d.health_status = 503
    async with cluster([p], [d]) as c:
        async with c.session.get(c.url + "/ready") as response:
            assert response.status == 503
            body = await response.json()
            assert (body["num_healthy_prefill"], body["num_healthy_decode"]) == (1, 0)
        response = await c.complete()
        assert response.status == 503
        assert response.error["code"] == "no_decode_instance"
        assert "x-kvferry-path" not in response.headers
        assert p.seen == []
        labels = 'endpoint="/v1/completions",path="none",status="503"'
        assert await c.metric(f"kvferry_router_requests_total{{{labels}}}") == 1
        async with c.session.get(c.url + "/health") as response:
            assert response.status == 200


async def test_a_defect_is_a_500_and_leaves_the_history_to_the_log(monkeypatch, caplog):
    def illegal(flow, event):
        raise IllegalEventError("the flow met an event", found="the history")

    monkeypatch.setattr(Flow, "handle", illegal)
    async with cluster([], [decode_engine()]) as c:
        response = await c.complete()
        assert (response.status, response.error["code"]) == (500, "internal_error")
        assert "history" not in response.error["message"]
        assert await c.metric(COUNT_OF_DEFECTS % "none") == 1
    assert any("the history" in str(record.exc_info) for record in caplog.records)


async def test_a_crash_is_a_500_too(monkeypatch):
    def crash(flow, event):
        raise ZeroDivisionError

    monkeypatch.setattr(Flow, "handle", crash)
    async with cluster([], [decode_engine()]) as c:
        response = await c.complete()
        assert (response.status, response.error["code"]) == (500, "internal_error")
        assert await c.metric(COUNT_OF_DEFECTS % "none") == 1


@pytest.mark.parametrize("error", [ZeroDivisionError(), IllegalEventError("x", found="y")])
async def test_a_defect_is_counted_and_logged_once_by_the_path_that_was_taken(error, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "kvferry.router.access")
    handle = Flow.handle

    def crash(flow, event):
        if isinstance(event, Opened):
            raise error
        return handle(flow, event)

    monkeypatch.setattr(Flow, "handle", crash)
    async with cluster([prefill_engine()], [decode_engine()]) as c:
        response = await c.complete()
        assert (response.status, response.error["code"]) == (500, "internal_error")
        assert await c.metric(COUNT_OF_DEFECTS % "disaggregated") == 1
        assert await c.metric(COUNT_OF_DEFECTS % "none") == 0
    entries = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert [(entry["path"], entry["status"]) for entry in entries] == [("disaggregated", 500)]


async def test_a_defect_before_a_request_is_understood_is_counted_as_well(monkeypatch):
    def crash(request):
        raise ZeroDivisionError

    monkeypatch.setattr(app, "cost_of", crash)
    async with cluster([], [decode_engine()]) as c:
        assert (await c.complete()).status == 500
        assert await c.metric(COUNT_OF_DEFECTS % "none") == 1


async def test_engines_are_shown_the_routers_own_key_and_not_the_clients():
    shown = []

    def showing(behave):
        async def wrapped(request, seen):
            shown.append(request.headers.getall("authorization", []))
            return await behave(request, seen)

        return wrapped

    engines = [prefill_engine("p0", showing(prefilling("p0")))], [decode_engine("d0", showing(decoding))]
    async with cluster(*engines, engine_api_key="inner") as c:
        await c.complete({"prompt": "x"}, headers={"authorization": "Bearer outer"})
    assert shown == [["Bearer inner"]] * 2
