"""Early prefills in our middleware, with a stand-in for vLLM: what vLLM reads, and what the caller hears first."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest
from test_vllm_middleware import CHAT, COMPLETIONS, FACTS, STREAM, WHOLE, Vllm

from kvferry.connectors.early_lease import Promise, unsealed
from kvferry.connectors.vllm_middleware.buffered_request import BufferedRequest
from kvferry.connectors.vllm_middleware.early import EarlyPrefill
from kvferry.connectors.vllm_middleware.workers import TROUBLE
from kvferry.kv_transfer_params import from_params

KEY = "k" * 64
RANKS = [
    {**FACTS, "address": f"tcp://127.0.0.1:{port}", "early": "yes", "key": KEY if port == 7001 else "another rank's"}
    for port in (7001, 7002)
]
EARLY = {"do_remote_decode": True, "do_remote_prefill": False, "kvferry": {"early": True}}
ASK: dict[str, Any] = {"model": "m", "prompt": [1, 2], "stream": True, "seed": 12345678901234567890, "n": 1}
PREFILL = {**ASK, "kv_transfer_params": EARLY}


def early(body: object = PREFILL, path: str = COMPLETIONS, headers: dict[str, str] | None = None, **vllm: Any) -> Vllm:
    served = Vllm(**{"says": STREAM, "workers": RANKS, **vllm})
    served.ask(path, body, headers)
    return served


def read(served: Vllm) -> dict[str, Any]:
    """What vLLM was asked."""
    (body,) = [seen for seen in served.seen if isinstance(seen, bytes)]
    found: dict[str, Any] = json.loads(body)
    return found


def first_event(served: Vllm) -> dict[str, Any]:
    """Between the head and the body of the answer."""
    head, first, *rest = served.passed
    assert served.headers["x-kvferry-cache"] == "local"
    assert [head, *rest] == STREAM
    assert first["more_body"] is True
    data, end = first["body"].removeprefix(b"data: ").split(b"\n\n")
    assert end == b""
    found: dict[str, Any] = json.loads(data)
    return found


@pytest.mark.parametrize(("path", "kind"), [(COMPLETIONS, "text_completion"), (CHAT, "chat.completion.chunk")])
def test_the_reference_goes_before_the_first_token_and_is_that_of_the_promise(path, kind):
    served = early(path=path)
    event = first_event(served)
    params = event.pop("kv_transfer_params")
    assert (event["object"], event["model"], event["choices"]) == (kind, "m", [])
    # How many tokens a text has only vLLM knows; the decode side counts its own.
    assert "remote_num_tokens" not in params
    remote = from_params(params)
    assert remote.addresses == ("tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002")
    reference = remote.reference
    assert (reference.engine_id, reference.epoch) == (FACTS["engine_id"], FACTS["epoch"])
    promise = unsealed(read(served)["kv_transfer_params"], KEY)
    assert promise == Promise(reference.request_id, reference.lease_id)


def test_nothing_else_of_the_request_changes():
    served = early()
    asked = read(served)
    assert {name: value for name, value in asked.items() if name != "kv_transfer_params"} == ASK
    ours = asked["kv_transfer_params"].pop("kvferry")
    assert asked["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert ours["early"] is True


def test_the_length_of_the_body_is_that_of_the_new_one():
    lengths = []
    served = Vllm(says=STREAM, workers=RANKS)
    app = served.app

    async def noting(scope, receive, send):
        opened = await BufferedRequest.read(scope, receive, 1 << 20)
        lengths.append((dict(scope["headers"]), len(opened.body)))
        await app(scope, opened.receive, send)

    served.middleware._app = noting
    size = str(len(json.dumps(PREFILL)))
    served.ask(COMPLETIONS, PREFILL, {"Content-Length": size, "Transfer-Encoding": "chunked", "X-Request-Id": "r"})
    ((headers, length),) = lengths
    assert headers == {b"content-length": str(length).encode(), b"x-request-id": b"r"}


def test_no_two_have_the_same_name_or_lease_and_the_workers_are_asked_once():
    served = Vllm(says=STREAM, workers=RANKS)
    found = set()
    for _ in range(3):
        served.sent.clear()
        served.ask(COMPLETIONS, PREFILL)
        params = first_event(served)["kv_transfer_params"]
        found |= {params["remote_request_id"], params["kvferry"]["lease_id"]}
    assert len(found) == 6
    assert [seen for seen in served.seen if isinstance(seen, tuple)] == [("kvferry_facts", ())]


def test_after_a_sleep_a_reference_is_that_of_the_epoch_in_which_it_can_be_read():
    served = Vllm(says=STREAM, workers=RANKS, may_sleep=True)
    served.ask(COMPLETIONS, PREFILL)
    served.ask("/sleep", b"")
    served.ask("/wake_up", b"")
    served.workers = [rank | {"epoch": "next epoch", "address": "tcp://127.0.0.1:7009"} for rank in RANKS[:1]]
    served.sent.clear()
    served.ask(COMPLETIONS, PREFILL)
    remote = from_params(first_event(served)["kv_transfer_params"])
    assert (remote.reference.epoch, remote.addresses) == ("next epoch", ("tcp://127.0.0.1:7009",))


def test_a_client_cannot_choose_what_it_is_promised():
    theirs = {"early": True, "name": "mine", "lease_id": "mine", "seal": "mine", "key": KEY}
    served = early({**PREFILL, "kv_transfer_params": {**EARLY, "kvferry": theirs}})
    assert "mine" not in json.dumps(read(served))
    assert unsealed(read(served)["kv_transfer_params"], KEY) is not None


@pytest.mark.parametrize("says", [WHOLE, [{**STREAM[0], "status": 400}, STREAM[1]], [{**STREAM[0], "headers": []}]])
def test_an_answer_that_is_no_stream_passes_as_it_is(says):
    assert early(says=says).passed == says


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not streamed": ({"stream": False}, "set stream to true"),
    "no word of a stream": ({"stream": None}, "set stream to true"),
    "a stream in words": ({"stream": "true"}, "set stream to true"),
    "several answers": ({"n": 2}, "found: n"),
    "the best of several": ({"best_of": 2}, "found: best_of"),
    "beams": ({"use_beam_search": True}, "found: use_beam_search"),
    "several prompts": ({"prompt": ["a", "b"]}, "found: prompt"),
    "several prompts of ids": ({"prompt": [[1], [2]]}, "found: prompt"),
    "embeddings beside a prompt": ({"prompt_embeds": "AAAA"}, "found: prompt, prompt_embeds"),
    "several prompts of embeddings": ({"prompt": None, "prompt_embeds": ["AAAA", "BBBB"]}, "found: prompt_embeds"),
    "both requests": ({"kv_transfer_params": {**EARLY, "do_remote_prefill": True}}, "prefill and decode at once"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_reference_cannot_stand_for_this(name):
    changed, words = REFUSED[name]
    served = early({**PREFILL, **changed})
    status, body = served.answer
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert words in body["error"]["message"]
    assert served.seen == []


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_there_is_no_early_prefill_where_no_stream_could_begin_with_a_reference(path):
    served = early(PREFILL, path)
    status, body = served.answer
    assert status == 400
    assert body["error"]["message"].startswith(f"there is no early prefill of {path}")
    assert served.seen == []


@pytest.mark.parametrize(
    "changed",
    [
        {"n": None, "best_of": 1, "use_beam_search": False},
        {"prompt": [[1, 2]]},
        {"prompt": None, "prompt_embeds": "AAAA"},
        {"prompt": None, "prompt_embeds": ["AAAA"]},
    ],
)
def test_what_asks_for_one_answer_in_more_words_is_fine(changed):
    assert first_event(early({**PREFILL, **changed}))["choices"] == []


OTHERS: dict[str, Any] = {
    "not for prefill": {**ASK, "note": "do_remote_decode early"},
    "a plain prefill request": {**ASK, "kv_transfer_params": {"do_remote_decode": True}, "note": "early"},
    "a decode request": {
        **PREFILL,
        "kv_transfer_params": {**EARLY, "do_remote_decode": False, "do_remote_prefill": True},
    },
    "early in other words": {**PREFILL, "kv_transfer_params": {**EARLY, "kvferry": {"early": 1}}},
    "params of another type": {**PREFILL, "kv_transfer_params": ["do_remote_decode", "early"]},
    "no object": ["do_remote_decode", "early"],
    "no JSON": b'{"do_remote_decode": "early"',
    "not UTF-8": b'{"do_remote_decode": "early\xff"}',
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_request_is_vllms_as_it_came(name):
    served = early(OTHERS[name])
    assert served.passed == STREAM
    body = OTHERS[name]
    assert served.seen == [body if isinstance(body, bytes) else json.dumps(body).encode()]


@pytest.mark.parametrize(
    ("vllm", "status", "words"),
    [
        ({"replicas": 2}, 501, "one replica"),
        ({"extension": ""}, 501, "--worker-extension-cls"),
        ({"workers": [{}]}, 501, "FerryConnector"),
        ({"workers": Exception("Executor failed.")}, 500, "did not answer"),
        ({"workers": [{TROUBLE: "this engine sleeps"}]}, 503, "sleeps"),
    ],
    ids=["replicas", "not extended", "another connector", "dead", "asleep"],
)
def test_a_server_that_can_promise_nothing_says_why_and_computes_nothing(vllm, status, words):
    served = early(**vllm)
    assert served.answer[0] == status
    assert words in served.answer[1]["error"]["message"]
    assert [seen for seen in served.seen if isinstance(seen, bytes)] == []


@pytest.mark.parametrize(("word", "replicas", "told"), [("yes", 1, True), ("", 1, False), ("yes", 2, False)])
def test_routers_are_told_where_it_is_of_use_and_never_the_key(word, replicas, told):
    served = Vllm(workers=[{**RANKS[0], "early": word}], replicas=replicas)
    served.ask("/kvferry/info", b"", method="GET")
    status, body = served.answer
    assert (status, body["early"]) == (200, told)
    assert KEY not in json.dumps(body)


def test_a_client_that_leaves_while_it_asks_is_vllms_to_notice():
    """And one that leaves later: what it says after its body is passed on."""
    heard = []
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def app(scope, receive, send):
        heard.extend([await receive(), await receive()])

    served = Vllm(workers=RANKS)
    served.middleware._app = app

    async def receive():
        return messages.pop(0)

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "root_path": "", "headers": [], "app": served}
    asyncio.run(served.middleware(scope, receive, None))
    assert [message["type"] for message in heard] == ["http.request", "http.disconnect"]
    served, heard[:] = early(), []
    served.leaves, served.says = True, []

    async def waiting(scope, receive, send):
        heard.extend([(await receive())["type"], (await receive())["type"]])

    served.middleware._app = waiting
    served.ask(COMPLETIONS, PREFILL)
    assert heard == ["http.request", "http.disconnect"]


def asked_in_pieces(pieces, app):
    """How often the app was given something, and what."""
    given = []
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages += [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]

    async def reading(scope, receive, send):
        while (message := await receive())["type"] == "http.request":
            given.append(message)
        await app(scope, receive, send)

    async def receive():
        return messages.pop(0)

    served = Vllm(workers=RANKS)
    served.middleware._app = reading
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "root_path": "", "headers": [], "app": served}
    asyncio.run(served.middleware(scope, receive, None))
    return given


async def nothing(scope, receive, send):
    return


def test_a_body_in_many_pieces_is_handed_on_in_one():
    body = json.dumps(ASK).encode()
    pieces = [body[at : at + 1] for at in range(len(body))]
    assert asked_in_pieces(pieces, nothing) == [{"type": "http.request", "body": body, "more_body": False}]


def test_what_is_too_large_is_handed_on_as_far_as_it_was_read(monkeypatch):
    monkeypatch.setattr("kvferry.connectors.vllm_middleware.middleware.MAX_BODY_BYTES", 3)
    given = asked_in_pieces([b"ab", b"cd", b"ef"], nothing)
    assert [message["body"] for message in given] == [b"abcd", b"ef", b""]
    assert [message["more_body"] for message in given] == [True, True, False]


def test_a_body_is_not_kept_while_its_answer_lasts():
    """The app's own copy is enough."""
    seen = []

    async def looking(scope, receive, send):
        gc.collect()
        alive = [one for one in gc.get_objects() if type(one) in (BufferedRequest, EarlyPrefill)]
        seen.append([(type(one), one.body, one._messages) for one in alive])

    for body in ({**PREFILL, "prompt": "x" * 1000}, ASK):
        asked_in_pieces([json.dumps(body).encode()], looking)
    assert seen == [[(BufferedRequest, b"", [])]] * 2


def test_a_body_that_is_too_large_to_be_looked_at_is_vllms(monkeypatch):
    monkeypatch.setattr("kvferry.connectors.vllm_middleware.middleware.MAX_BODY_BYTES", 100)
    served = early({**PREFILL, "prompt": "x" * 200})
    assert served.sent == STREAM
    assert read(served)["kv_transfer_params"] == EARLY
