"""Our middleware in real vLLM servers: how a cache came, releases, who they are, and what our router makes of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from answers import prompts_of, wait_until_free
from crossing import get, metric, route
from proxy import REMOTE_DECODE, Question, open_request, prefill
from servers import PLAIN, Pair

from kvferry import __version__
from kvferry.router.telemetry.request_timing import told_phases
from kvferry.wire.messages import WIRE_VERSION

# Long before the leases of these pairs end.
FREE_S = 10.0
ASKED_S = 60.0
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
USAGE = "vllm:kv_cache_usage_perc"
RECOMPUTE = replace(PLAIN, failure_policy="recompute")
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
RESPONSES = PATHS[2]
MESSAGES = [{"role": "user", "content": "What does the ferry carry across the river at night?"}]


def question_of(name: str, num_tokens: int = 300, seed: int = 0) -> Question:
    return replace(prompts_of((num_tokens,), seed=seed)[0], salt=f"middleware-{name}", request_id=f"middleware-{name}")


def post(url: str, path: str, body: dict[str, Any], request_id: str = "") -> tuple[int, dict[str, str], bytes]:
    """Status, headers by their names in lower case, and the whole body."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
    headers = {"content-type": "application/json"} | ({"x-request-id": request_id} if request_id else {})
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def asked(question: Question, path: str, num_tokens: int = 4) -> dict[str, Any]:
    """A request to one of vLLM's endpoints, of which Anthropic's does not know `ignore_eos`."""
    content: dict[str, Any] = {"prompt": list(question.prompt), "max_tokens": num_tokens, "ignore_eos": True}
    if path == RESPONSES:
        content = {"input": MESSAGES, "max_output_tokens": num_tokens, "ignore_eos": True}
    elif path != PATHS[0]:
        content = {"messages": MESSAGES, "max_tokens": num_tokens}
    return {"model": "tiny", "temperature": 0, **content, "cache_salt": question.salt}


def routed(url: str, question: Question, num_tokens: int = 4) -> http.client.HTTPConnection:
    """A request to a router that nobody has read the answer of: closed, its client has left."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
    body = json.dumps(asked(question, PATHS[0], num_tokens))
    connection.request("POST", PATHS[0], body, {"content-type": "application/json"})
    return connection


def prefill_params(url: str, question: Question, path: str) -> dict[str, Any]:
    status, _, body = post(url, path, asked(question, path, 1) | {"kv_transfer_params": REMOTE_DECODE})
    assert status == 200, body
    params: dict[str, Any] = json.loads(body)["kv_transfer_params"]
    return params


def unknown(params: dict[str, Any]) -> dict[str, Any]:
    """The same reference but for its lease, which there is not."""
    return {**params, "kvferry": {**params["kvferry"], "lease_id": "never-given"}}


def outdated(params: dict[str, Any]) -> dict[str, Any]:
    """The same reference as if its server had been started again since. It is refused at once."""
    return {**params, "kvferry": {**params["kvferry"], "epoch": "before"}}


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_tells_how_its_cache_came(pair, spec, path, stream):
    question = question_of(f"came-{stream}")
    body = asked(question, path) | {"stream": stream}
    params = prefill_params(pair.prefill.url, question, path)
    request = body | {"kv_transfer_params": params}
    status, headers, text = post(pair.decode.url, path, request, question.request_id)
    assert (status, headers["x-kvferry-cache"]) == (200, "received"), text
    assert {"claim", "wire", "verify"} <= told_phases([(b"server-timing", headers["server-timing"].encode())]).keys()
    _, headers, _ = post(pair.decode.url, path, body, question.request_id)
    assert headers["x-kvferry-cache"] == "local"
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_the_reference_of_another_prompt_is_never_used(pair, spec):
    ours, theirs = question_of("mixed-up-1", seed=1), question_of("mixed-up-2", seed=2)
    request = asked(ours, PATHS[0]) | {"kv_transfer_params": prefill_params(pair.prefill.url, theirs, PATHS[0])}
    status, headers, text = post(pair.decode.url, PATHS[0], request, ours.request_id)
    assert (status, headers["x-kvferry-cache-reason"]) == (502, "wrong_prompt"), text
    assert json.loads(text)["error"]["code"] == "wrong_prompt"
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_error_for_want_of_a_cache_has_a_status_and_a_reason(pair, spec, path, stream):
    question = question_of(f"want-{stream}")
    params = prefill_params(pair.prefill.url, question, path)
    request = asked(question, path) | {"stream": stream, "kv_transfer_params": outdated(params)}
    status, headers, text = post(pair.decode.url, path, request, question.request_id)
    assert (status, json.loads(text)["error"]["code"]) == (502, "wrong_epoch")
    assert (headers["x-kvferry-cache"], headers["x-kvferry-cache-reason"]) == ("lost", "wrong_epoch")
    assert post(pair.prefill.url, "/kvferry/release", {"kv_transfer_params": params})[0] == 200
    wait_until_free(pair.servers, FREE_S)


@contextmanager
def freed_at_once(pair: Pair) -> Iterator[None]:
    """Both servers are free at the end, and no lease had to run out for that."""
    expired = pair.prefill.metric(EXPIRED)
    yield
    wait_until_free(pair.servers, FREE_S)
    assert pair.prefill.metric(EXPIRED) == expired


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_a_release_frees_the_blocks_of_a_prefill_at_once(pair, spec):
    with freed_at_once(pair):
        params = prefill(pair.prefill, question_of("release")).params
        assert pair.prefill.metric(USAGE) > 0
        assert released(pair, unknown(params)) == (200, {"released": False})
        for changed, code in (({"remote_engine_id": "x"}, "wrong_engine"), ({"kvferry": {}}, "malformed")):
            status, answer = released(pair, params | changed)
            assert (400 <= status < 500, answer["error"]["code"]) == (True, code)
        assert pair.prefill.metric(USAGE) > 0
        assert released(pair, params) == (200, {"released": True})
    assert released(pair, params) == (200, {"released": False})
    assert pair.prefill.healthy()


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_a_reset_of_what_connectors_have_frees_the_blocks_of_a_prefill_at_once(pair, spec):
    with freed_at_once(pair):
        params = prefill(pair.prefill, question_of("reset")).params
        status, _, body = post(pair.prefill.url, "/reset_prefix_cache?reset_external=true", {})
        # vLLM looks first whether blocks are in use.
        assert (status, json.loads(body)) == (200, {"success": False})
        pair.prefill.forget_prefixes(FREE_S)
    assert released(pair, params) == (200, {"released": False})


def released(pair: Pair, params: dict[str, Any]) -> tuple[int, Any]:
    status, _, body = post(pair.prefill.url, "/kvferry/release", {"kv_transfer_params": params})
    return status, json.loads(body)


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_a_client_that_leaves_a_prefill_in_its_last_step_frees_it_at_once(pair, spec):
    """One step computes all of it, and takes longer than the client stays: the request ends before its lease begins."""
    for i, after_s in enumerate((0.01, 0.015, 0.02)):
        with freed_at_once(pair):
            question = question_of(f"last-{i}", 1000, seed=i)
            connection = open_request(pair.prefill, question, question.body(1, REMOTE_DECODE))
            threading.Event().wait(after_s)
            connection.close()


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_servers_say_who_they_are(pair, spec):
    told = [get(f"{server.url}/kvferry/info") for server in pair.servers]
    for one in told:
        assert (one["engine"], one["models"], one["wire_version"]) == ("vllm", ["tiny"], str(WIRE_VERSION))
        assert one["version"].startswith("0.")
        assert one["version"] != __version__
    assert told[0]["cache"] == told[1]["cache"] != ""
    assert told[0]["epoch"] != told[1]["epoch"]
    params = prefill(pair.prefill, question_of("who")).params
    assert told[0]["engine_id"] == params["remote_engine_id"]
    released(pair, params)


# --- behind our router ---


class Between(BaseHTTPRequestHandler):
    """Between the router and a server: passes everything on, but for what a test changes."""

    def do_GET(self) -> None:
        self._pass_on(b"")

    def do_POST(self) -> None:
        self._pass_on(self.rfile.read(int(self.headers["content-length"])))

    def _pass_on(self, body: bytes) -> None:
        connection = http.client.HTTPConnection(self.server.upstream, timeout=300)
        kept = {name: self.headers[name] for name in ("content-type", "x-request-id") if name in self.headers}
        with contextlib.closing(connection):
            connection.request(self.command, self.path, body, kept)
            answer = connection.getresponse()
            status, text = answer.status, answer.read()
        if self.command == "POST" and self.path in PATHS:
            text = self.server.changed(text)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words: object) -> None:
        """Nothing."""


@contextmanager
def between(upstream: str, changed) -> Iterator[str]:
    """The URL of a server that changes answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Between) as server:
        server.upstream, server.changed = upstream.removeprefix("http://"), changed
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_a_pair_whose_caches_do_not_arrive_is_taken_apart_and_its_clients_are_served(pair, spec, tmp_path):
    def forged(answer: bytes) -> bytes:
        document = json.loads(answer)
        released(pair, document["kv_transfer_params"])
        return json.dumps(document | {"kv_transfer_params": outdated(document["kv_transfer_params"])}).encode()

    with between(pair.prefill.url, forged) as source, route(source, pair.decode.url, tmp_path / "log") as url:
        assert get(f"{url}/kvferry/members")["broken_pairs"] == []
        for i in range(4):
            question = question_of(f"pair-{i}", seed=i)
            body = asked(question, PATHS[0]) | {"stream": bool(i % 2)}
            status, headers, text = post(url, PATHS[0], body, question.request_id)
            assert (status, headers["x-kvferry-path"]) == (200, "decode-only"), text
        (broken,) = get(f"{url}/kvferry/members")["broken_pairs"]
        assert (broken["prefill"], broken["decode"]) == (source, pair.decode.url)
        assert metric(url, "kvferry_router_lost_caches_total") == 3
        ready = get(f"{url}/ready")
        assert (ready["num_ready_decode"], ready["num_usable_pairs"]) == (1, 0)
    wait_until_free(pair.servers, FREE_S)


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_a_client_that_leaves_between_prefill_and_decode_frees_both_sides_at_once(pair, spec, tmp_path):
    """The decode request is held back until the client has left."""
    begun, left = threading.Event(), threading.Event()

    def held(answer: bytes) -> bytes:
        begun.set()
        left.wait(FREE_S)
        return answer

    with between(pair.prefill.url, held) as source, route(source, pair.decode.url, tmp_path / "log") as url:
        with freed_at_once(pair):
            connection = routed(url, question_of("leaves"))
            assert begun.wait(ASKED_S)
            assert pair.prefill.metric(USAGE) > 0
            connection.close()
            left.set()
        assert metric(url, "kvferry_router_releases_total") == 1


@pytest.mark.parametrize("spec", [PLAIN], ids=str)
def test_a_client_that_leaves_at_any_other_moment_frees_both_sides_at_once(pair, spec, tmp_path):
    with route(pair.prefill.url, pair.decode.url, tmp_path / "log") as url, freed_at_once(pair):
        for i, after_s in enumerate((0.02, 0.1, 0.2, 0.4)):
            connection = routed(url, question_of(f"moment-{i}", 2000, seed=i), 100)
            threading.Event().wait(after_s)
            connection.close()


@pytest.mark.parametrize("spec", [RECOMPUTE], ids=str)
def test_an_answer_that_was_computed_again_says_so(pair, spec):
    """A lease that there is not, and then a server that there is not any more."""
    first, second = question_of("again"), question_of("again-killed", seed=1)
    for path in PATHS:
        params = prefill_params(pair.prefill.url, first, path)
        request = asked(first, path) | {"stream": True, "kv_transfer_params": outdated(params)}
        _, headers, _ = post(pair.decode.url, path, request, first.request_id)
        assert (headers["x-kvferry-cache"], headers["x-kvferry-cache-reason"]) == ("recomputed", "wrong_epoch")
    params = prefill_params(pair.prefill.url, second, PATHS[0])
    pair.prefill.kill()
    request = asked(second, PATHS[0]) | {"kv_transfer_params": params}
    status, headers, text = post(pair.decode.url, PATHS[0], request, second.request_id)
    assert (status, headers["x-kvferry-cache"]) == (200, "recomputed"), text
    assert headers["x-kvferry-cache-reason"] in ("peer_lost", "unreachable", "deadline")
