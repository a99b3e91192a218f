"""What is refused before any engine is asked."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ConfigurationError, RequestError
from kvferry.http.request_fields import dropped
from kvferry.router.config import RouterConfig
from kvferry.router.request.client_request import FOR_ENGINES, Endpoint, decode_body, parse_request, prefill_body
from kvferry.router.request.headers import decode_headers, prefill_headers, request_id_of, response_headers

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "a", "x": NaN}', "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b"{}", "prompt is missing"),
        (b'{"messages": []}', "prompt is missing"),
        (b'{"prompt": 5}', "prompt cannot be used"),
        (b'{"prompt": null}', "prompt is missing"),
        (b'{"prompt": [1.5]}', "prompt cannot be used"),
        (b'{"prompt": "a", "model": 1}', "model cannot be used"),
        (b'{"prompt": "a", "stream": "yes"}', "stream cannot be used"),
        (b'{"prompt": "a", "max_tokens": "5"}', "max_tokens cannot be used"),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens cannot be used"),
        (b'{"prompt": "a", "max_tokens": -1}', "max_tokens cannot be used; found: -1; expected: a whole number"),
        (b'{"prompt": [{"a": "%s"}]}' % (b"b" * 60), r'found: \[{"a": "b{56}…; expected'),
        (b'{"prompt": "a", "kv_transfer_params": null}', "kv_transfer_params"),
        (b'{"prompt": "a", "kv_transfer\\u005fparams": {}}', "kv_transfer_params"),
        (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested too deeply"),
        (b'{"prompt": [' + b'"a",' * 65_536 + b'"a"]}', "too many prompts.*at least 65,537 prompts; expected: at most"),
        (b'{"prompt": [1,' + b"[]," * 65_536 + b"[1]]}", "too many prompts"),
        (b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_a_malformed_body_is_refused_in_words(raw, words):
    with pytest.raises(RequestError, match=words) as caught:
        parse_request(raw, Endpoint.COMPLETIONS)
    assert caught.value.expected
    assert caught.value.hint


@pytest.mark.parametrize("raw", [b'{"prompt": "a"}', b'{"messages": "a"}', b'{"messages": ["a"]}'])
def test_chat_needs_messages(raw):
    with pytest.raises(RequestError, match="messages"):
        parse_request(raw, Endpoint.CHAT)


@given(st.dictionaries(st.text(), JSON), st.dictionaries(st.text(), JSON))
def test_the_decode_body_is_the_request_and_the_transfer(fields, transfer):
    body = {**fields, "prompt": "a"}
    for name in ("model", "stream", "max_tokens", "max_completion_tokens", "n", "best_of", *FOR_ENGINES):
        body.pop(name, None)
    raw = (json.dumps(body) + " \n").encode()
    request = parse_request(raw, Endpoint.COMPLETIONS)
    decoded = json.loads(decode_body(request, json.dumps(transfer).encode()))
    assert decoded == {**body, "kv_transfer_params": transfer}
    prefilled = json.loads(prefill_body(request))
    untouched = body.keys() - dropped(Endpoint.COMPLETIONS)
    assert {name: prefilled[name] for name in untouched} == {name: body[name] for name in untouched}


@given(st.binary(max_size=40))
def test_any_bytes_are_a_request_or_a_refusal(raw):
    try:
        parse_request(raw, Endpoint.COMPLETIONS)
    except RequestError:
        return
    assert "prompt" in json.loads(raw)


HEADERS = [
    (b"Host", b"router"),
    (b"Authorization", b"Bearer key"),
    (b"Content-Type", b"application/json"),
    (b"Content-Length", b"12"),
    (b"Connection", b"keep-alive, X-Hop"),
    (b"X-Hop", b"1"),
    (b"Keep-Alive", b"timeout=5"),
    (b"TE", b"trailers"),
    (b"Accept-Encoding", b"gzip"),
    (b"X-Request-Id", b"mine"),
    (b"traceparent", b"00-1-2-01"),
]


def test_end_to_end_headers_pass_and_hop_by_hop_ones_do_not():
    kept = decode_headers(HEADERS, "mine")
    assert kept == [
        (b"authorization", b"Bearer key"),
        (b"content-type", b"application/json"),
        (b"accept-encoding", b"gzip"),
        (b"traceparent", b"00-1-2-01"),
        (b"x-request-id", b"mine"),
    ]
    assert dict(prefill_headers(HEADERS, "mine")) == {**dict(kept), b"accept-encoding": b"identity"}


def test_a_body_without_a_type_is_json():
    assert (b"content-type", b"application/json") in decode_headers([], "id")


def test_which_pages_may_read_an_answer_is_not_for_engines_to_say():
    """vLLM lets in every origin by default."""
    upstream = [(b"Access-Control-Allow-Origin", b"*"), (b"content-type", b"application/json")]
    assert response_headers(upstream, {}) == [(b"content-type", b"application/json")]


@pytest.mark.parametrize("select", [prefill_headers, decode_headers])
def test_a_header_that_sglang_takes_for_a_field_of_the_body_does_not_pass(select):
    places = ("bootstrap-host", "bootstrap-port", "bootstrap-room", "routed-dp-rank", "disagg-prefill-dp-rank")
    names = ["X-Data-Parallel-Rank", *(f"x-override-{name}" for name in ("rid", *places))]
    theirs = [(name.encode(), b"1") for name in names]
    assert select([*theirs, *HEADERS], "mine") == select(HEADERS, "mine")


def test_response_headers_keep_the_upstreams_and_add_ours():
    upstream = [(b"Content-Type", b"a/b"), (b"Date", b"x"), (b"Transfer-Encoding", b"chunked"), (b"X-A", b"1")]
    assert response_headers(upstream, {"x-request-id": "i"}) == [
        (b"content-type", b"a/b"),
        (b"x-a", b"1"),
        (b"x-request-id", b"i"),
    ]


@pytest.mark.parametrize("name", [b"Location", b"Content-Location", b"Alt-Svc"])
def test_the_address_of_an_engine_does_not_pass(name):
    assert response_headers([(name, b"http://10.1.2.3:9/x"), (b"x-a", b"1")], {}) == [(b"x-a", b"1")]


@pytest.mark.parametrize("bad", [b"a,b", b"a:b", b"a b", b"", b"x" * 129, b"\xff"])
def test_an_id_that_engines_could_misread_is_refused(bad):
    with pytest.raises(RequestError, match="x-request-id"):
        request_id_of([(b"x-request-id", bad)])


def test_two_ids_are_refused():
    with pytest.raises(RequestError):
        request_id_of([(b"x-request-id", b"a"), (b"X-Request-Id", b"b")])


def test_ids_are_kept_or_made():
    assert request_id_of([(b"X-Request-Id", b"Root=1-67")]) == "Root=1-67"
    assert request_id_of([]) != request_id_of([])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decode_urls": ()}, "needs a decode engine"),
        ({"decode_urls": ("127.0.0.1:80",)}, "invalid URL"),
        ({"decode_urls": ("ftp://a",)}, "invalid URL"),
        ({"decode_urls": ("http://a/v1",)}, "invalid URL"),
        ({"decode_urls": ("http://a?x=1",)}, "invalid URL"),
        ({"decode_urls": ("http://a:99999",)}, "invalid URL"),
        ({"decode_urls": ("http://a/\u20ac",)}, "invalid URL"),
        ({"decode_urls": ("http://a/a b",)}, "invalid URL"),
        ({"decode_urls": ("http://:word@a",)}, "invalid URL"),
        ({"decode_urls": ("http://a", "http://a/")}, "twice"),
        ({"prefill_urls": ("nonsense",)}, "invalid URL of a prefill instance"),
        ({"stall_timeout_s": 0.0}, "stall_timeout_s must be positive"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s must be positive"),
    ],
)
def test_a_wrong_configuration_is_refused_in_words(options, words):
    with pytest.raises(ConfigurationError, match=words):
        RouterConfig(**{"prefill_urls": (), "decode_urls": ("http://a",), **options})
