"""Servers of SGLang that are killed, clients that leave: an error in bounded time, and the next prompt is served."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from asking import alone, ask, post, prompts_of
from sglang_servers import LEASE_S, PairSpec

SPECS = [PairSpec("llama")]
one_pair = pytest.mark.parametrize("spec", SPECS, ids=str)


@one_pair
def test_a_decode_whose_client_has_left_goes_on(pair, spec):
    (prompt,) = prompts_of((40,), seed=11)
    left = post(pair.decode, prompt, random.getrandbits(62), pair.prefill.bootstrap_port, within_s=1)
    assert "timed out" in left.error
    assert ask(pair, prompt)[1].tokens == alone(spec.model, prompt)


@one_pair
def test_a_prefill_that_nobody_reads_ends_with_its_lease(pair, spec):
    (prompt,) = prompts_of((40,), seed=12)
    answer = post(pair.prefill, prompt, random.getrandbits(62), pair.prefill.bootstrap_port, within_s=4 * LEASE_S)
    assert "expired" in answer.error
    assert ask(pair, prompt)[1].tokens == alone(spec.model, prompt)


@one_pair
def test_a_room_can_be_used_for_one_request_at_a_time(pair, spec):
    prompts, room, port = prompts_of((40, 40), seed=13), random.getrandbits(62), pair.prefill.bootstrap_port
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda prompt: post(pair.prefill, prompt, room, port, 4 * LEASE_S), prompts))
    assert sum("has the same bootstrap_room" in answer.error for answer in answers) == 1


@one_pair
def test_a_prefill_that_is_killed_fails_its_requests_and_its_next_start_serves(pair, spec):
    (prompt,) = prompts_of((40,), seed=14)
    assert ask(pair, prompt)[1].tokens == alone(spec.model, prompt)
    with ThreadPoolExecutor(1) as pool:
        # Nobody computes this one: the decode waits for a prefill that dies meanwhile.
        waiting = pool.submit(post, pair.decode, prompt, random.getrandbits(62), pair.prefill.bootstrap_port)
        pair.prefill.kill()
        assert "Decode transfer failed" in waiting.result().error
    pair.prefill.start()
    pair.prefill.wait_until_ready()
    assert ask(pair, prompt)[1].tokens == alone(spec.model, prompt)


@one_pair
def test_the_first_request_after_a_prefill_was_started_again_is_served(pair, spec):
    """Nothing was under way when it ended: that request is what tells the decode server."""
    (prompt,) = prompts_of((40,), seed=17)
    assert ask(pair, prompt)[1].tokens == alone(spec.model, prompt)
    for _ in range(2):
        pair.prefill.kill()
        pair.prefill.start()
        pair.prefill.wait_until_ready()
        assert ask(pair, prompt)[1].tokens == alone(spec.model, prompt)


@one_pair
def test_a_decode_that_is_killed_costs_the_prefill_nothing(pair, spec):
    (prompt,) = prompts_of((40,), seed=15)
    pair.decode.kill()
    answer = post(pair.prefill, prompt, random.getrandbits(62), pair.prefill.bootstrap_port, within_s=4 * LEASE_S)
    assert "expired" in answer.error
    pair.decode.start()
    pair.decode.wait_until_ready()
    assert ask(pair, prompt)[1].tokens == alone(spec.model, prompt)


@one_pair
def test_more_log_probabilities_than_travel_end_no_server(pair, spec):
    (prompt,), port = prompts_of((40,), seed=18), pair.prefill.bootstrap_port
    for server in pair.servers:
        wanted = {"return_logprob": True, "top_logprobs_num": 200}
        answer = post(server, prompt, random.getrandbits(62), port, **wanted)
        assert "so many log-probabilities" in answer.error
    assert ask(pair, prompt)[1].tokens == alone(spec.model, prompt)


@one_pair
def test_a_prompt_without_tokens_ends_no_server(pair, spec):
    (prompt,), port = prompts_of((40,), seed=16), pair.prefill.bootstrap_port
    for server in pair.servers:
        answer = post(server, [], random.getrandbits(62), port, input_ids=None, text="")
        assert "a prompt without tokens" in answer.error
    assert ask(pair, prompt)[1].tokens == alone(spec.model, prompt)
