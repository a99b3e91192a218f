"""Two vLLM servers behind a stand-in for llm-d's routing sidecar: what it alone does, beside `test_behind_others`."""

from __future__ import annotations

import http.client
import json
import re
from contextlib import closing

import pytest
from answers import alone, loaded_tokens, prompts_of
from fronts import COMPLETIONS, answer_of, body_of, check_right, sent, tokens_of
from llm_d.proxy import PREFILL_HEADER
from llm_d.running import RunningSidecar
from llm_d.scheduler import SCHEDULED_BY
from proxy import ANSWER_S, ask
from servers import PLAIN

NOBODY = {PREFILL_HEADER: "127.0.0.1:1"}
one_pair = pytest.mark.parametrize("spec", [PLAIN], ids=str)


@pytest.fixture
def sidecar(pair, tmp_path):
    with RunningSidecar(pair, tmp_path / "sidecar.log", "nixlv2").running() as sidecar:
        yield sidecar


@one_pair
def test_a_client_may_have_an_id_of_its_own(sidecar, pair, spec):
    """The sidecar adds another one; vLLM and our middleware have to take the same of the two."""
    (question,) = prompts_of((300,), seed=72)
    before = loaded_tokens(pair.decode)
    headers = {**sidecar.headers, "X-Request-Id": "mine"}
    status, told, text = sent(sidecar, body_of(question), COMPLETIONS, headers)
    assert (status, told["x-kvferry-cache"]) == (200, "received"), text
    assert json.loads(text)["id"] == "cmpl-mine"
    assert loaded_tokens(pair.decode) - before == 299


@one_pair
def test_the_scheduler_reads_its_metrics_through_the_sidecar(sidecar, pair, spec):
    with closing(http.client.HTTPConnection("127.0.0.1", sidecar.port, timeout=ANSWER_S)) as connection:
        connection.request("GET", "/metrics")
        written = connection.getresponse().read().decode()
    assert [name for name in SCHEDULED_BY if not re.search(rf"^{name}{{", written, re.MULTILINE)] == []


@one_pair
def test_the_usage_says_what_the_prefill_server_had_cached(sidecar, pair, spec):
    (question,) = prompts_of((700,), seed=65)
    ask(pair.prefill, question)
    usage = answer_of(sidecar, question)["usage"]
    assert usage["prompt_tokens"] == 700
    # Without `--enable-prompt-tokens-details` vLLM does not say, and the sidecar takes that for none.
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@one_pair
def test_a_request_that_names_no_prefill_server_is_computed_by_the_decode_server(sidecar, pair, spec):
    (question,) = prompts_of((300,), seed=66)
    before = loaded_tokens(pair.decode)
    status, _, text = sent(sidecar, body_of(question), COMPLETIONS, {})
    assert (status, tokens_of(json.loads(text))) == (200, ask(pair.decode, alone(question)).tokens)
    assert loaded_tokens(pair.decode) == before


@one_pair
def test_a_prefill_server_that_cannot_be_reached_is_502_and_nothing_is_computed(sidecar, pair, spec):
    """llm-d's scheduler has to know that it is gone; a client's retry gets another one."""
    (question,) = prompts_of((300,), seed=70)
    before = pair.decode.metric("vllm:prompt_tokens_total")
    assert sent(sidecar, body_of(question), COMPLETIONS, NOBODY)[::2] == (502, b"")
    assert pair.decode.metric("vllm:prompt_tokens_total") == before
    check_right(sidecar, pair, question)


@pytest.mark.full
@one_pair
def test_a_prefill_server_that_is_started_again_is_found_again(sidecar, pair, spec):
    (question,) = prompts_of((300,), seed=71)
    check_right(sidecar, pair, question)
    pair.prefill.kill()
    assert sent(sidecar, body_of(question))[0] == 502
    pair.prefill.start()
    pair.prefill.wait_until_ready()
    check_right(sidecar, pair, alone(question))
