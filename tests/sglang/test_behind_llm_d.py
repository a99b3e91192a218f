"""Two servers whose caches kvferry moves behind a stand-in for llm-d's routing sidecar: the whole model's answers.

The stand-in, `llm_d`, says which file and commit it follows.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from asking import alone, prompts_of
from llm_d.running import RunningSidecar
from llm_d.sglang import BOOTSTRAP_PORT
from routed import completion, post, stream, tokens_of, until_free
from sglang_servers import PairSpec

SPECS = [PairSpec("llama")]
one_pair = pytest.mark.parametrize("spec", SPECS, ids=str)


@pytest.fixture
def sidecar(pair, tmp_path):
    variables = {BOOTSTRAP_PORT: str(pair.prefill.bootstrap_port)}
    with RunningSidecar(pair, tmp_path / "sidecar.log", "sglang", variables).running() as sidecar:
        yield sidecar


@one_pair
def test_answers_of_several_pages_are_the_whole_models(sidecar, pair, spec):
    for prompt in prompts_of((1, 17, 300, 1500), seed=51):
        status, _, answer = post(sidecar, completion(prompt), headers=sidecar.headers)
        assert (status, tokens_of(answer)) == (200, alone(spec.model, prompt)), answer
    for server in pair.servers:
        until_free(server)


@one_pair
def test_a_stream_is_the_whole_models(sidecar, spec):
    (prompt,) = prompts_of((500,), seed=52)
    events = stream(sidecar, completion(prompt), headers=sidecar.headers)
    assert [token for event in events for token in tokens_of(event)] == alone(spec.model, prompt)


@one_pair
def test_several_at_once(sidecar, spec):
    """The rooms of two requests are a moment apart."""
    prompts = prompts_of([30 + 50 * number for number in range(8)], seed=53)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: post(sidecar, completion(prompt), headers=sidecar.headers), prompts))
    assert [tokens_of(answer) for _, _, answer in answers] == [alone(spec.model, prompt) for prompt in prompts]


@one_pair
@pytest.mark.parametrize(("num_tokens", "within_s"), [(60, 3.0), (7000, 0.5)], ids=["decoding", "prefilling"])
def test_a_client_that_leaves_frees_both(sidecar, pair, spec, num_tokens, within_s):
    """The sidecar ends the decode request and lets the prefill request be."""
    (prompt, other) = prompts_of((num_tokens, 60), seed=54)
    with pytest.raises(TimeoutError):
        post(sidecar, completion(prompt, max_tokens=1000), within_s=within_s, headers=sidecar.headers)
    for server in pair.servers:
        until_free(server)
    assert tokens_of(post(sidecar, completion(other), headers=sidecar.headers)[2]) == alone(spec.model, other)


@one_pair
def test_a_request_that_names_no_prefill_server_is_refused_by_sglang(sidecar, spec):
    (prompt,) = prompts_of((20,), seed=55)
    status, _, answer = post(sidecar, completion(prompt))
    assert status >= 400, answer
