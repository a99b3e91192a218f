"""Our middleware in vLLM's HTTP server, with a stand-in for vLLM: an ASGI app that says what a test wants."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connectors.vllm_middleware import FerryMiddleware, request_names, workers
from kvferry.connectors.vllm_middleware.request_names import RequestNames, names_of
from kvferry.connectors.vllm_middleware.worker_reports import FetchOutcome, FetchOutcomes
from kvferry.connectors.vllm_middleware.workers import TROUBLE, Workers
from kvferry.kv_transfer_params import room_names, room_params, to_params
from kvferry.router.answers.engine_response import lost_cache
from kvferry.router.telemetry.request_timing import told_phases
from kvferry.wire.messages import Reference

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
DECODE = {"model": "m", "prompt": [1, 2], "kv_transfer_params": {"do_remote_prefill": True, "remote_port": 7}}
OK_HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"2"), (b"x-request-id", b"r")]
STREAM_HEADERS = [(b"content-type", b"text/event-stream")]
WHOLE = [
    {"type": "http.response.start", "status": 200, "headers": OK_HEADERS},
    {"type": "http.response.body", "body": b"{}"},
]
BROKEN = [{**WHOLE[0], "status": 500}, {"type": "http.response.body", "body": b"{}"}]
STREAM = [
    {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS},
    {"type": "http.response.body", "body": b'data: {"role": "assistant"}\n\n', "more_body": True},
    {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False},
]
BROKEN_STREAM = [*STREAM[:2], {**STREAM[1], "body": b'data: {"error": {"code": 500}}\n\n'}, STREAM[2]]
LOCAL = (b"x-kvferry-cache", b"local")
FETCHED = FetchOutcome(phases_s={"claim": 0.002, "wire": 0.0105})
LOST = FetchOutcome("peer_lost", "it is gone")
FATAL = replace(LOST, is_fatal=True)
REFERENCE = Reference("p", "epoch", "cmpl-r-0-12345678", "lease")
PARAMS = to_params(REFERENCE, ["tcp://10.0.0.1:7001"], [[1]], 16)


@dataclass
class Vllm:
    """vLLM's app behind the middleware: reads its request, hears what its workers tell, says its messages.

    `noted` are the fetches that end before it answers. `seen` is what it was asked, `sent` what the client got, which
    leaves before the last of `says` if it `leaves`, and at once where there is none.
    """

    says: list[dict[str, Any]] = field(default_factory=lambda: WHOLE)
    noted: dict[str, FetchOutcome] = field(default_factory=dict)
    workers: Any = ()
    extension: str = "Extension"
    replicas: int = 1
    may_sleep: bool = False
    leaves: bool = False
    seen: list[Any] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outcomes = FetchOutcomes()
        self.middleware = FerryMiddleware(self.app, self.outcomes)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(worker_extension_cls=self.extension, data_parallel_size=self.replicas),
            cache_config=SimpleNamespace(enable_prefix_caching=True),
            model_config=SimpleNamespace(enable_sleep_mode=self.may_sleep),
        )
        client = SimpleNamespace(vllm_config=config, collective_rpc=self.collective_rpc)
        self.state = SimpleNamespace(engine_client=client, openai_serving_models=self)

    async def collective_rpc(self, method: str, args: tuple[str, ...]) -> list[Any]:
        self.seen.append((method, args))
        if isinstance(self.workers, Exception):
            raise self.workers
        return self.workers

    async def show_available_models(self) -> Any:
        return SimpleNamespace(data=[SimpleNamespace(id="m"), SimpleNamespace(id="adapter")])

    async def app(self, scope, receive, send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.seen.append(body)
        for request_id, outcome in self.noted.items():
            self.outcomes.note(request_id, outcome)
        for message in self.says:
            await send(message)

    def ask(self, path: str, body: object, headers: dict[str, str] | None = None, **scope: str) -> None:
        """One request, its body in pieces; a POST unless `scope` says something else."""
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        pieces, has_left = [encoded[:9], encoded[9:]], asyncio.Event()
        if self.leaves and not self.says:
            has_left.set()
        messages = [{"type": "http.request", "body": piece, "more_body": i == 0} for i, piece in enumerate(pieces)]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop(0)
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            self.sent.append(message)
            if self.leaves and len(self.sent) == len(self.says) - 1:
                has_left.set()

        pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
        common = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": pairs, "app": self}
        asyncio.run(self.middleware(common | scope, receive, send))

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def passed(self) -> list[dict[str, Any]]:
        """What was sent without what the middleware says of an answer that needs no other engine's cache."""
        head, *rest = self.sent
        return [{**head, "headers": [pair for pair in head["headers"] if pair != LOCAL]}, *rest]

    @property
    def answer(self) -> tuple[int, Any]:
        return self.sent[0]["status"], json.loads(b"".join(message["body"] for message in self.sent[1:]))


def asked(path=COMPLETIONS, body=DECODE, request_id="r", **vllm) -> Vllm:
    served = Vllm(**vllm)
    served.ask(path, body, {"X-Request-Id": request_id} if request_id else {})
    assert not served.outcomes._expected
    return served


@pytest.fixture(autouse=True)
def known_names(monkeypatch):
    """What is made up for a response is the same each time."""
    monkeypatch.setattr(request_names, "uuid4", lambda: SimpleNamespace(hex="0123"))


IDS = {COMPLETIONS: "cmpl-r-0-12345678", CHAT: "chatcmpl-r-12345678"}
IDS |= {RESPONSES: "resp_r_0123_0-12345678", MESSAGES: "chatcmpl-r-12345678"}


@pytest.mark.parametrize("path", IDS)
@pytest.mark.parametrize("says", [WHOLE, STREAM], ids=["whole", "streamed"])
def test_an_answer_tells_that_its_cache_was_received_and_how_long_it_took(path, says):
    served = asked(path, says=says, noted={IDS[path]: FETCHED, "cmpl-other-0-12345678": LOST})
    assert served.headers.items() >= {"x-kvferry-cache": "received"}.items()
    assert "x-kvferry-cache-reason" not in served.headers
    assert told_phases(served.sent[0]["headers"]) == FETCHED.phases_s
    assert served.sent[0]["headers"][: len(says[0]["headers"])] == says[0]["headers"]
    assert served.sent[1:] == says[1:]
    # vLLM makes up the name of a response that has none.
    asked_for = json.loads(served.seen[0])
    assert asked_for == DECODE | ({"request_id": asked_for["request_id"]} if path == RESPONSES else {})


def test_the_name_of_a_response_that_has_one_stays(monkeypatch):
    body = DECODE | {"request_id": "resp_mine"}
    served = asked(RESPONSES, body, noted={"resp_mine_0-12345678": FETCHED})
    assert json.loads(served.seen[0]) == body
    assert served.headers["x-kvferry-cache"] == "received"
    assert json.loads(asked(RESPONSES, request_id="").seen[0]) == DECODE
    # Nobody else has it, nor guesses it: by its name a response may be asked for again.
    monkeypatch.setattr(request_names, "uuid4", uuid4)
    names = {json.loads(asked(RESPONSES).seen[0])["request_id"] for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith("resp_r_") for name in names)


def of_response(kind, **fields):
    body = f"event: {kind}\ndata: ".encode() + json.dumps({"type": kind, **fields}).encode() + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": True}


OPENING = [STREAM[0], of_response("response.created"), of_response("response.in_progress")]


def test_the_events_that_begin_a_response_wait_for_its_first_token():
    says = [*OPENING, of_response("response.output_text.delta"), STREAM[2]]
    served, counts = Vllm(), []

    async def app(scope, receive, send):
        await receive()
        for message in says:
            if message is says[3]:
                served.outcomes.note(IDS[RESPONSES], FETCHED)
            await send(message)
            counts.append(len(served.sent))

    served.middleware = FerryMiddleware(app, served.outcomes)
    served.ask(RESPONSES, DECODE, {"X-Request-Id": "r"})
    assert counts == [0, 0, 0, 4, 5]
    assert served.headers["x-kvferry-cache"] == "received"
    assert served.sent[1:] == says[1:]


@pytest.mark.parametrize("outcome", [FATAL, FETCHED], ids=["lost", "another reason"])
def test_a_response_that_fails_in_its_stream_for_want_of_a_cache_is_answered_here(outcome):
    """vLLM has no event for that."""
    served = Vllm()

    async def app(scope, receive, send):
        await receive()
        for message in OPENING:
            await send(message)
        served.outcomes.note(IDS[RESPONSES], outcome)
        raise ValueError("no such event")

    served.middleware = FerryMiddleware(app, served.outcomes)
    if outcome is FETCHED:
        with pytest.raises(ValueError, match="no such event"):
            served.ask(RESPONSES, DECODE, {"X-Request-Id": "r"})
        assert served.sent == []
    else:
        served.ask(RESPONSES, DECODE, {"X-Request-Id": "r"})
        status, body = served.answer
        assert (status, body["error"]["code"]) == (502, "peer_lost")
    assert not served.outcomes._expected


def test_an_error_of_messages_is_one_that_its_clients_read():
    status, body = asked(MESSAGES, says=BROKEN, noted={IDS[MESSAGES]: FATAL}).answer
    assert (status, body["type"], body["error"]["type"]) == (502, "error", "api_error")
    assert lost_cache(json.dumps(body).encode()) == "peer_lost"


def test_a_server_may_be_below_a_path_of_its_own():
    """vLLM's `--root-path`."""
    served = Vllm(noted={IDS[COMPLETIONS]: FETCHED})
    served.ask(f"/below{COMPLETIONS}", DECODE, {"X-Request-Id": "r"}, root_path="/below")
    assert served.headers["x-kvferry-cache"] == "received"


def test_an_answer_that_was_computed_again_says_so_and_why():
    served = asked(says=STREAM, noted={IDS[COMPLETIONS]: LOST})
    assert (served.headers["x-kvferry-cache"], served.headers["x-kvferry-cache-reason"]) == ("recomputed", "peer_lost")
    assert "server-timing" not in served.headers
    assert served.sent[1:] == STREAM[1:]


@pytest.mark.parametrize("says", [BROKEN, BROKEN_STREAM], ids=["whole", "streamed"])
def test_an_error_for_want_of_a_cache_is_that_of_our_own_engine(says):
    """It has a status of its own, and a body in which routers find the reason."""
    served = asked(says=says, noted={IDS[COMPLETIONS]: FATAL})
    assert len(served.sent) == 2
    status, body = served.answer
    assert status == 502
    assert lost_cache(json.dumps(body).encode()) == "peer_lost"
    assert "the prefill engine has stopped responding" in body["error"]["message"]
    assert "it is gone" not in body["error"]["message"]
    assert (served.headers["x-kvferry-cache"], served.headers["x-kvferry-cache-reason"]) == ("lost", "peer_lost")
    assert served.headers["content-length"] == str(len(served.sent[1]["body"]))
    assert [name for name, _ in served.sent[0]["headers"]].count(b"content-type") == 1


def test_a_request_that_has_taken_over_the_name_of_one_that_was_given_up_is_answered_by_vllm():
    gone = FetchOutcome("aborted", "the request was aborted", is_fatal=True)
    served = asked(says=STREAM, noted={IDS[COMPLETIONS]: gone})
    assert served.sent == STREAM


@pytest.mark.parametrize("says", [BROKEN, BROKEN_STREAM], ids=["whole", "streamed"])
def test_an_error_that_came_after_the_cache_is_vllms(says):
    served = asked(says=says, noted={IDS[COMPLETIONS]: FETCHED})
    assert [message.get("body") for message in served.sent] == [message.get("body") for message in says]
    assert served.sent[0]["status"] == says[0]["status"]


OTHERS = {
    "for one engine alone": {"body": {"model": "m", "prompt": "x"}},
    "a prefill request": {
        "body": {**DECODE, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    },
    "a word in the prompt": {"body": {"model": "m", "prompt": "do_remote_prefill"}},
    "no object": {"body": b'["do_remote_prefill"'},
    "half a character": {"body": b'{"do_remote_prefill": "\xed\xa0\x80"}'},
    "a type of its own": {"body": {"kv_transfer_params": {"do_remote_prefill": "yes"}}},
    "a large one": {"body": {**DECODE, "prompt": "x" * 200}},
    "no id": {"request_id": ""},
    "another id": {"request_id": "s"},
    "several at once": {"noted": {"cmpl-r-0-12345678": LOST, "cmpl-r-0-87654321": FETCHED}},
    "nothing heard": {"noted": {}},
}


# Of these it is known that no other engine was asked for a cache. The last one is nothing that vLLM answers with 200.
LOCALS = ("for one engine alone", "a prefill request", "a word in the prompt", "half a character")


@pytest.mark.parametrize("says", [WHOLE, STREAM, BROKEN, BROKEN_STREAM], ids=["whole", "streamed", "500", "broken"])
@pytest.mark.parametrize("name", OTHERS)
def test_an_answer_of_which_nothing_is_known_passes_unchanged(name, says, monkeypatch):
    monkeypatch.setattr("kvferry.connectors.vllm_middleware.middleware.MAX_BODY_BYTES", 200)
    served = asked(**{"says": says, "noted": {IDS[COMPLETIONS]: LOST}, **OTHERS[name]})
    assert served.passed == says
    assert (LOCAL in served.sent[0]["headers"]) == (name in LOCALS and says[0]["status"] == 200)


@pytest.mark.parametrize(("body", "sent"), [(DECODE, [0, 2, 3]), ({"prompt": "x"}, [1, 2, 3])], ids=["decode", "other"])
def test_only_the_head_waits_and_only_for_the_first_of_the_body(body, sent):
    served, counts = Vllm(), []

    async def app(scope, receive, send):
        await receive()
        served.outcomes.note(IDS[COMPLETIONS], FETCHED)
        for message in STREAM:
            await send(message)
            counts.append(len(served.sent))

    served.middleware = FerryMiddleware(app, served.outcomes)
    served.ask(COMPLETIONS, body, {"X-Request-Id": "r"})
    assert counts == sent


def test_an_app_that_fails_before_it_answers_leaves_nothing_behind():
    served = Vllm()

    async def app(scope, receive, send):
        await receive()
        await send(WHOLE[0])
        assert len(served.outcomes._expected) == 1
        raise ValueError("a defect")

    served.middleware = FerryMiddleware(app, served.outcomes)
    with pytest.raises(ValueError, match="a defect"):
        served.ask(COMPLETIONS, DECODE, {"X-Request-Id": "r"})
    assert (served.sent, served.outcomes._expected) == ([], {})


def test_what_is_no_request_and_what_is_no_door_of_ours_is_vllms():
    served = Vllm(workers=["released"])
    served.ask("/v1/models", b"", method="GET")
    served.ask("/kvferry/release", b"", method="GET")
    served.ask("/kvferry/info", b"")
    assert served.sent == WHOLE * 3
    scopes = []

    async def app(scope, receive, send):
        scopes.append(scope)

    asyncio.run(FerryMiddleware(app, FetchOutcomes())({"type": "lifespan"}, None, None))
    assert scopes == [{"type": "lifespan"}]


# --- the names of requests ---


def test_the_callers_header_goes_before_the_bodys_id():
    body = json.dumps({**DECODE, "request_id": "of-body"}).encode()
    assert names_of(CHAT, None, body).decode_names == ("chatcmpl-of-body",)
    assert names_of(COMPLETIONS, "given", body).decode_names == ("cmpl-given-0",)
    assert names_of(COMPLETIONS, None, json.dumps(DECODE).encode()).decode_names == ()


@pytest.mark.parametrize(
    ("prompt", "num_names"),
    [("text", 1), ([1, 2, 3], 1), ([], 1), (["a", "b", "c"], 3), ([[1, 2], [3]], 2), (7, 1), (["a"] * 10_000, 256)],
)
def test_each_prompt_has_a_name_of_its_own(prompt, num_names):
    body = json.dumps({**DECODE, "prompt": prompt}).encode()
    names = names_of(COMPLETIONS, "given", body).decode_names
    assert names == tuple(f"cmpl-given-{number}" for number in range(num_names))
    body = json.dumps({"kv_transfer_params": {"do_remote_decode": True}, "prompt": prompt}).encode()
    assert names_of(COMPLETIONS, "given", body) == RequestNames(prefill_names=names, is_local=True)


def test_an_error_says_which_of_several_prompts_had_no_cache():
    noted = {"cmpl-r-0-12345678": FETCHED, "cmpl-r-1-abcdef01": FATAL}
    several = {**DECODE, "prompt": ["a", "b"]}
    failed = asked(body=several, noted=noted, says=BROKEN)
    assert failed.answer[0] == 502
    assert failed.headers["x-kvferry-cache"] == "lost"
    passed = asked(body=several, noted=noted)
    assert passed.headers["x-kvferry-cache"] == "received"


def test_several_answers_to_a_prompt_have_the_cache_of_the_one_that_fetched_it():
    assert asked(noted={"0_cmpl-r-0-12345678": FETCHED}).headers["x-kvferry-cache"] == "received"
    failed = asked(noted={"2_cmpl-r-0-12345678": FATAL}, says=BROKEN)
    assert failed.answer[0] == 502


@pytest.mark.parametrize(
    "text", ['"x": ' + "[" * 100_000, '"request_id": "\xff"', '"request_id": 7'], ids=["deep", "not UTF-8", "a number"]
)
def test_a_body_that_makes_no_sense_is_vllms_to_refuse(text):
    body = '{"kv_transfer_params": {"do_remote_prefill": true}, ' + text + "}"
    assert names_of(CHAT, "given", body.encode("latin-1")).decode_names == ()


@given(st.text(min_size=1), st.text("0123456789abcdef", min_size=8, max_size=8))
def test_any_id_is_found_with_and_without_vllms_random_characters(given_id, random):
    outcomes = FetchOutcomes()
    (name,) = names_of(CHAT, given_id, json.dumps(DECODE).encode()).decode_names
    for request_id in (f"{name}-{random}", name):
        outcomes.expect(name)
        outcomes.note(request_id, LOST)
        assert outcomes.known(name) == LOST
        outcomes.forget(name)
    assert not outcomes._expected


def test_ranks_tell_the_slowest_phases_and_any_failure():
    outcomes = FetchOutcomes()
    outcomes.expect("a")
    for outcome in (FetchOutcome(phases_s={"wire": 2.0}), FATAL, FetchOutcome(phases_s={"wire": 1.0, "verify": 0.5})):
        outcomes.note("a-12345678", outcome)
    assert outcomes.known("a") == FetchOutcome("peer_lost", "it is gone", True, {"wire": 2.0, "verify": 0.5})


def test_two_answers_that_wait_under_one_name_are_not_told_apart():
    outcomes = FetchOutcomes()
    outcomes.expect("a")
    outcomes.expect("a")
    outcomes.note("a-12345678", LOST)
    assert outcomes.known("a") is None
    outcomes.forget("a")
    assert outcomes.known("a") == LOST
    outcomes.forget("a")
    assert (outcomes.known("a"), outcomes._expected) == (None, {})


def test_what_nobody_waits_for_is_not_kept():
    outcomes = FetchOutcomes()
    outcomes.expect("b")
    outcomes.note("b-c", LOST)
    assert outcomes.known("b") is None
    outcomes.forget("b")
    outcomes.note("a-12345678", LOST)
    outcomes.expect("a")
    assert outcomes.known("a") is None


# --- the paths of our own ---

RELEASE_BODY = {"kv_transfer_params": PARAMS}


@pytest.mark.parametrize("answers", [["released"], ["unknown_lease"], ["released", "unknown_lease"]])
def test_a_release_is_passed_to_the_workers(answers):
    served = Vllm(workers=answers)
    served.ask("/kvferry/release", RELEASE_BODY)
    assert served.answer == (200, {"released": "released" in answers})
    assert served.seen == [("kvferry_release", ("p", "epoch", "cmpl-r-0-12345678", "lease"))]


def test_what_a_prefill_keeps_in_a_room_is_released_by_the_rooms_number():
    served = Vllm(workers=[FACTS])
    served.ask("/kvferry/info", b"", method="GET")
    served.sent.clear()
    served.workers = ["released"]
    served.ask("/kvferry/release", {"kv_transfer_params": room_params(7, "127.0.0.1", 8999)})
    assert served.answer == (200, {"released": True})
    assert served.seen[1:] == [("kvferry_release", ("p", "e", *room_names(7)))]


PREFILL = {"prompt": "a", "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


def head(status):
    return [
        {"type": "http.response.start", "status": status, "headers": []},
        {"type": "http.response.body", "body": b""},
    ]


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize(("path", "name"), [(path, name.removesuffix("-12345678")) for path, name in IDS.items()])
def test_the_cache_of_a_prefill_that_fails_is_not_left_to_its_lease(path, name, status):
    served = asked(path, PREFILL, says=head(status), workers=[True])
    assert served.seen[1:] == [("kvferry_withdraw", ([name],))]
    assert served.sent[0]["status"] == status


def test_the_cache_of_a_prefill_that_is_not_answered_is_not_left_to_its_lease():
    assert asked(body=PREFILL, says=[], workers=[True]).seen[1:] == [("kvferry_withdraw", (["cmpl-r-0"],))]


@pytest.mark.parametrize("says", [WHOLE, STREAM, STREAM[:2]], ids=["whole", "streamed", "in the middle"])
def test_the_cache_of_a_prefill_whose_client_left_just_before_its_answer_is_not_left_to_its_lease(says):
    """vLLM answers with 200 all the same."""
    assert asked(body=PREFILL, says=says, leaves=True, workers=[True]).seen[1:] == [
        ("kvferry_withdraw", (["cmpl-r-0"],))
    ]


def test_other_answers_are_sent_without_a_look_at_the_client():
    for body in (DECODE, {"prompt": "a"}):
        served = asked(body=body, says=WHOLE, leaves=True)
        assert (len(served.seen), len(served.sent)) == (1, 2)


@pytest.mark.parametrize(("body", "status"), [(PREFILL, 200), (PREFILL, 400), (DECODE, 500), ({"prompt": "a"}, 500)])
def test_nothing_else_is_withdrawn(body, status):
    assert len(asked(body=body, says=head(status), workers=[True]).seen) == 1


@pytest.mark.parametrize("workers", [RuntimeError("busy"), [False]])
def test_an_answer_does_not_depend_on_what_workers_say_of_a_withdrawn_cache(workers):
    assert asked(body=PREFILL, says=head(500), workers=workers).sent[0]["status"] == 500
    assert asked(body=PREFILL, says=head(500), extension="").sent[0]["status"] == 500


async def test_releases_are_passed_on_one_by_one():
    """Anybody may send them, and vLLM stops computing for each."""
    open_calls, most = set(), []

    async def collective_rpc(method, args):
        open_calls.add(args)
        most.append(len(open_calls))
        await asyncio.sleep(0)
        open_calls.remove(args)
        return ["released"]

    state = Vllm().state
    state.engine_client.collective_rpc = collective_rpc
    workers = Workers()
    references = [Reference("p", "epoch", f"r-{i}", "lease") for i in range(5)]
    released = await asyncio.gather(*(workers.release(state, reference) for reference in references))
    assert released == [True] * 5
    assert most == [1] * 5


async def test_clients_that_leave_while_workers_are_asked_are_told_of_together():
    asked_for = []

    async def collective_rpc(method, args):
        asked_for.append(list(args[0]))
        await asyncio.sleep(0)
        return [False]

    state = Vllm().state
    state.engine_client.collective_rpc = collective_rpc
    workers = Workers()
    await asyncio.gather(*(workers.withdraw_leases(state, [f"cmpl-{i}-0", f"cmpl-{i}-1"]) for i in range(5)))
    assert asked_for == [["cmpl-0-0", "cmpl-0-1"], [f"cmpl-{i}-{at}" for i in range(1, 5) for at in range(2)]]


@pytest.mark.parametrize("reason", ["wrong_engine", "wrong_epoch"])
def test_a_reference_of_another_engine_is_the_callers_mistake(reason):
    served = Vllm(workers=[reason])
    served.ask("/kvferry/release", RELEASE_BODY)
    status, body = served.answer
    assert (status, body["error"]["code"], body["error"]["type"]) == (404, reason, "invalid_request_error")


MISTAKES = {
    "no object": (b"[", "invalid_request"),
    "deep": (b'{"kv_transfer_params": {"x": ' + b"[" * 100_000, "invalid_request"),
    "not UTF-8": (b'{"kv_transfer_params": {"\xff": 1}}', "invalid_request"),
    "no parameters": ({}, "invalid_request"),
    "too large": ({"kv_transfer_params": {**PARAMS, "x": "x" * (1 << 20)}}, "invalid_request"),
    "no lease": ({"kv_transfer_params": {**PARAMS, "kvferry": {"epoch": "e", "addresses": ["x"]}}}, "malformed"),
    "half a character": ({"kv_transfer_params": {**PARAMS, "remote_request_id": "\ud800"}}, "invalid_request"),
    "not of kvferry": ({"kv_transfer_params": {"do_remote_prefill": True}}, "malformed"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_release_that_makes_no_sense_reaches_no_worker(name):
    body, code = MISTAKES[name]
    served = Vllm(workers=["released"])
    served.ask("/kvferry/release", body)
    status, answer = served.answer
    assert (status, answer["error"]["code"], served.seen) == (400, code, [])


FACTS = {"version": "0.32.0", "engine_id": "p", "epoch": "e", "cache": "abc"}


def test_a_server_says_who_it_is_and_asks_its_workers_once():
    served = Vllm(workers=[FACTS, FACTS])
    served.ask("/kvferry/info", b"", method="GET")
    told = served.answer
    assert told == (
        200,
        {
            "engine": "vllm",
            "wire_version": told[1]["wire_version"],
            "models": ["m", "adapter"],
            "prefix_cache": True,
            "early": False,
            "meets_in_rooms": True,
            "bootstrap_host": "",
            "bootstrap_port": 0,
            **FACTS,
        },
    )
    served.sent.clear()
    served.ask("/kvferry/info", b"", method="GET")
    assert served.answer == told
    assert served.seen == [("kvferry_facts", ())]


@pytest.mark.parametrize(
    ("replicas", "place"), [(1, {"bootstrap_host": "::1", "bootstrap_port": 8999}), (2, {"bootstrap_port": 0})]
)
def test_a_server_says_where_its_first_rank_is_found_in_a_room(replicas, place):
    """Of replicas it is not known in advance which one computes a prompt: they only decode."""
    addresses = [{**FACTS, "address": f"tcp://[::1]:{port}"} for port in (8999, 9000)]
    served = Vllm(workers=addresses, replicas=replicas)
    served.ask("/kvferry/info", b"", method="GET")
    assert {**served.answer[1], **place, "meets_in_rooms": True} == served.answer[1]


@pytest.mark.parametrize(
    ("vllm", "status", "words"),
    [
        ({"extension": "", "workers": [FACTS]}, 501, "--worker-extension-cls"),
        ({"workers": [{}]}, 501, "FerryConnector"),
        ({"workers": Exception("Executor failed.")}, 500, "did not answer"),
    ],
    ids=["not extended", "another connector", "dead"],
)
def test_a_server_that_cannot_say_who_it_is_says_why(vllm, status, words):
    served = Vllm(**vllm)
    served.ask("/kvferry/info", b"", method="GET")
    assert served.answer[0] == status
    assert words in served.answer[1]["error"]["message"]
    # It may be able to later.
    assert served.middleware._workers._told == ()


def draining(vllm, is_draining=True):
    """What vLLM looks like once it has been told to end."""
    vllm.state.engine_client.engine_core = SimpleNamespace(_finalizer=SimpleNamespace(alive=not is_draining))
    return vllm


def test_a_server_that_drains_is_not_ready_and_takes_no_more():
    vllm = draining(Vllm(says=WHOLE))
    vllm.ask("/ready", b"", method="GET")
    status, body = vllm.answer
    assert (status, body["reason"]) == (503, "it is draining")
    vllm.sent.clear()
    vllm.ask(COMPLETIONS, {"prompt": "x"})
    status, body = vllm.answer
    assert (status, body["error"]["code"]) == (503, "draining")
    vllm.sent.clear()
    vllm.ask(MESSAGES, {"messages": []})
    status, body = vllm.answer
    assert (status, body["type"], body["error"]["type"]) == (503, "error", "api_error")
    assert vllm.seen == []


@pytest.mark.parametrize("root", ["", "/behind"])
def test_a_server_that_does_not_drain_is_as_ready_as_it_is_healthy(root):
    vllm, asked_for = draining(Vllm(says=WHOLE), is_draining=False), []
    app = vllm.app

    async def noting(scope, receive, send):
        asked_for.append((scope["method"], scope["path"]))
        await app(scope, receive, send)

    vllm.middleware = FerryMiddleware(noting, vllm.outcomes)
    vllm.ask(f"{root}/ready", b"", method="GET", root_path=root)
    assert asked_for == [("GET", f"{root}/health")]
    assert vllm.sent == WHOLE


@pytest.mark.parametrize("answer", ["", "wrong_engine", "wrong_epoch"])
def test_of_several_replicas_the_first_one_does_not_know_what_the_others_have_released(answer):
    served = Vllm(workers=[answer], replicas=2)
    served.ask("/kvferry/release", RELEASE_BODY)
    assert served.answer == (200, {"released": None})
    assert [method for method, _ in served.seen] == ["kvferry_release"]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("facts", "code"), [({"epoch": "epoch"}, ""), ({}, "wrong_epoch"), ({"engine_id": "q"}, "wrong_engine")]
)
def test_what_is_known_to_be_anothers_costs_no_worker_a_step(facts, code, replicas):
    """Replicas of one server have names of their own, of which the first one's is known."""
    served = Vllm(workers=[FACTS | facts], replicas=replicas)
    served.ask("/kvferry/info", b"", method="GET")
    served.sent.clear()
    served.seen.clear()
    served.workers = ["released"]
    served.ask("/kvferry/release", RELEASE_BODY)
    status, body = served.answer
    if code and replicas == 1:
        assert (status, body["error"]["code"], served.seen) == (404, code, [])
    else:
        assert (status, body) == (200, {"released": True})


# --- engines that sleep ---

AWAKE = FACTS | {"epoch": "epoch", "address": "tcp://127.0.0.1:7001"}
AWAKE_AGAIN = FACTS | {"epoch": "next epoch", "address": "tcp://127.0.0.1:7002"}
ASLEEP = {TROUBLE: "this engine sleeps, and has no caches; hint: wake it up: POST /wake_up"}


@pytest.fixture
def clock(monkeypatch):
    """The seconds that have passed, in a list."""
    passed = [1000.0]
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: passed[0]))
    return passed


def info(served: Vllm) -> tuple[int, Any]:
    served.sent.clear()
    served.ask("/kvferry/info", b"", method="GET")
    return served.answer


@pytest.mark.parametrize("root", ["", "/behind"])
@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/release_kv_cache_memory", "/collective_rpc"])
def test_a_server_that_was_told_to_sleep_or_to_wake_up_says_anew_who_it_is(path, root, clock):
    served = Vllm(workers=[AWAKE], may_sleep=True)
    assert info(served)[1]["epoch"] == "epoch"
    served.workers = [AWAKE_AGAIN]
    # It is asked once, as long as nothing has happened.
    assert info(served)[1]["epoch"] == "epoch"
    served.sent.clear()
    served.ask(root + path, {}, root_path=root)
    assert served.sent == WHOLE
    status, told = info(served)
    assert (status, told["epoch"], told["bootstrap_port"]) == (200, "next epoch", 7002)
    assert [seen for seen in served.seen if isinstance(seen, tuple)] == [("kvferry_facts", ())] * 2


def test_what_was_asked_while_an_engine_fell_asleep_is_not_kept(clock):
    served = Vllm(workers=[AWAKE], may_sleep=True)

    async def app(scope, receive, send):
        await served.middleware._workers.facts(served.state)
        served.workers = [ASLEEP]
        await served.app(scope, receive, send)

    served.middleware = FerryMiddleware(app, served.outcomes)
    served.ask("/sleep", b"")
    assert info(served)[0] == 503


def test_whoever_hears_that_an_engine_is_awake_is_told_anew_who_it_is(clock):
    """Also before the request that has woken it is over."""
    served, found = Vllm(workers=[AWAKE], may_sleep=True), []
    info(served)

    async def app(scope, receive, send):
        served.workers = [AWAKE_AGAIN]
        await served.app(scope, receive, send)
        found.append(await served.middleware._workers.facts(served.state))

    served.middleware._app = app
    served.ask("/wake_up", b"")
    assert found == [AWAKE_AGAIN]


def test_an_engine_that_another_server_has_told_to_sleep_is_asked_again_soon(clock):
    served = Vllm(workers=[AWAKE], may_sleep=True)
    info(served)
    served.workers = [AWAKE_AGAIN]
    clock[0] += workers.FACTS_S
    assert info(served)[1]["epoch"] == "epoch"
    clock[0] += 1
    assert info(served)[1]["epoch"] == "next epoch"
    # One that never sleeps is not asked again.
    other = Vllm(workers=[AWAKE])
    info(other)
    other.workers = [AWAKE_AGAIN]
    clock[0] += 1_000_000
    assert info(other)[1]["epoch"] == "epoch"


def test_a_lease_made_after_a_sleep_is_released_whatever_is_remembered(clock):
    served = Vllm(workers=[AWAKE], may_sleep=True)
    info(served)
    served.sent.clear()
    served.workers = ["released"]
    reference = Reference("p", "next epoch", "cmpl-r-0-12345678", "lease")
    served.ask("/kvferry/release", {"kv_transfer_params": to_params(reference, ["tcp://127.0.0.1:7002"], [[1]], 16)})
    assert served.answer == (200, {"released": True})


@pytest.mark.parametrize("ranks", [[ASLEEP], [AWAKE, ASLEEP]], ids=["all", "one of them"])
def test_a_server_that_sleeps_says_so_and_is_known_again_when_it_is_awake(ranks, clock):
    """Not with a status by which a router takes it for a server without kvferry."""
    served = Vllm(workers=ranks, may_sleep=True)
    status, told = info(served)
    assert (status, told["error"]["code"]) == (503, "asleep")
    assert "POST /wake_up" in told["error"]["message"]
    served.workers = [AWAKE_AGAIN]
    assert info(served)[0] == 200


async def test_several_that_ask_at_once_are_told_by_one_question():
    served = Vllm(workers=[AWAKE], may_sleep=True)
    asked_all = served.middleware._workers
    found = await asyncio.gather(*(asked_all.facts(served.state) for _ in range(5)))
    assert found == [AWAKE] * 5
    assert served.seen == [("kvferry_facts", ())]
