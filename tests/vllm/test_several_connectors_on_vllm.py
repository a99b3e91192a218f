"""kvferry's connector among others, as vLLM's MultiConnector has them: named by its module, without any plug-in."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import replace
from typing import Any

import pytest
from answers import check_equal, judge, loaded_tokens, prompts_of, wait_until_free
from proxy import ask_disaggregated, open_request, prefill
from servers import PLAIN, Pair, Server, ServerSpec, StartError

SIZES = (5, 128, 300, 1000)
FREE_S = 30.0
NO_PLUGINS = (("VLLM_PLUGINS", ""),)
# The other connector knows only one kind of cache, and of a prompt that is computed in chunks it stores one.
FLAGS = ("--disable-hybrid-kv-cache-manager", "--max-num-batched-tokens", "8192")
OURS, OTHER = "FerryConnector", "ExampleConnector"


def side(role: str) -> ServerSpec:
    return ServerSpec(role, flags=FLAGS, environment=NO_PLUGINS)


ORDERS = [
    replace(PLAIN, prefill=side("kv_producer"), decode=side("kv_consumer"), together=order)
    for order in ((OURS, OTHER), (OTHER, OURS))
]
in_both_orders = pytest.mark.parametrize("spec", ORDERS, ids=["ours first", "ours last"])


def answer_of(server: Server, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"{server.url}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as response:
        return json.load(response)


@in_both_orders
def test_answers_equal_a_single_servers(pair: Pair, spec):
    check_equal(pair, prompts_of(SIZES))
    check_equal(pair, prompts_of(SIZES * 2, seed=1), at_once=8)
    wait_until_free(pair.servers, FREE_S)


@in_both_orders
def test_the_front_end_knows_it(pair: Pair, spec):
    (question,) = prompts_of((300,))
    question = replace(question, request_id="known")
    told = answer_of(pair.prefill, "/kvferry/info")
    params = prefill(pair.prefill, question).params
    assert params is not None
    assert told["engine_id"] == params["remote_engine_id"]
    connection = open_request(pair.decode, question, question.body(4, params))
    try:
        response = connection.getresponse()
        response.read()
    finally:
        connection.close()
    assert (response.status, response.headers["x-kvferry-cache"]) == (200, "received")
    assert pair.decode.metric("vllm:kvferry_phase_seconds_count") > 0
    (unread,) = prompts_of((300,), seed=2)
    params = prefill(pair.prefill, unread).params
    assert answer_of(pair.prefill, "/kvferry/release", {"kv_transfer_params": params}) == {"released": True}
    wait_until_free(pair.servers, FREE_S)


@in_both_orders
def test_a_cache_that_another_connector_brings_is_not_fetched(pair: Pair, spec):
    """What the other one has stored comes from there where it is asked first; the source need not wait for a reader."""
    (question,) = prompts_of((1000,))
    ask_disaggregated(pair.prefill, pair.decode, question)
    pair.decode.forget_prefixes(FREE_S)
    before = loaded_tokens(pair.decode)
    again = ask_disaggregated(pair.prefill, pair.decode, question)
    assert loaded_tokens(pair.decode) > before
    assert judge(pair.prefill, pair.decode, question, again).problem == ""
    wait_until_free(pair.servers, FREE_S)


def test_a_server_that_fetches_windows_has_no_connector_that_would_keep_them(tmp_path):
    spec = replace(ORDERS[0], model="gemma3")
    server = Server(spec, spec.decode, OURS, tmp_path / "decode.log")
    with pytest.raises(StartError, match=f"found: {OTHER}"), server.running():
        pass
