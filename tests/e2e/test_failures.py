"""What dies, restarts or lies: the request ends with the right answer or a clear error, and the next one works."""

import json
import os
import signal
import threading
import urllib.request

import psutil
import pytest
from conftest import DEADLINE_S, both, eventually, post, prefilled, ready, silent
from test_main_job import prompt_of
from tiny_models import model_folder

from kvferry.testing.output_check import Question, ask


@pytest.fixture(scope="module")
def fleet(start_fleet):
    return start_fleet(transport="shm")


@pytest.fixture(scope="module")
def fleet_with_windows(start_fleet):
    return start_fleet(transport="shm", more=("--model", str(model_folder("gemma3"))))


def prefill(fleet, prompt, **more):
    return prefilled(fleet.prefill_urls[0], prompt, **more)


def decode(fleet, prompt, params, **more):
    """The decode request alone: the answer's token ids and the report."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "return_token_ids": True, "kv_transfer_params": params}
    body |= more
    answer = post(f"{fleet.decode_urls[0]}/v1/completions", body)
    return tuple(answer["choices"][0]["token_ids"]), answer["kvferry"]


def alone(fleet, prompt):
    return ask(fleet.decode_urls[0], Question("tiny", prompt, 12), silent).token_ids


def kill_prefill(fleet):
    os.kill(fleet.pids["prefill-0"], signal.SIGKILL)


def test_a_reference_works_once(fleet):
    prompt = prompt_of(60, seed=1)
    params = prefill(fleet, prompt)
    tokens, report = decode(fleet, prompt, params)
    assert (tokens, report["recomputed"]) == (alone(fleet, prompt), "")
    tokens, report = decode(fleet, prompt, params)
    assert (tokens, report["recomputed"]) == (alone(fleet, prompt), "expired")
    assert report["tokens_computed"] == 60


def test_a_reference_to_somebody_elses_cache_is_not_believed(fleet):
    """A client that names another request, or makes up a lease, gets its own answer."""
    mine, theirs = prompt_of(60, seed=2), prompt_of(60, seed=3)
    params = prefill(fleet, theirs)
    forged = params | {"kvferry": params["kvferry"] | {"lease_id": "0" * 32}}
    tokens, report = decode(fleet, mine, forged)
    assert (tokens, report["recomputed"]) == (alone(fleet, mine), "unknown_lease")
    renamed = params | {"remote_request_id": "another"}
    tokens, report = decode(fleet, mine, renamed)
    assert (tokens, report["recomputed"]) == (alone(fleet, mine), "unknown_lease")


def test_a_reference_used_with_another_prompt_is_not_used(fleet):
    """One as long, and one that is shorter; but a cache is good for every prompt that its own begins with."""
    theirs = prompt_of(60, seed=13)
    for mine, reason in (
        (prompt_of(60, seed=14), "wrong_prompt"),
        (theirs[:20] + [7] * 20, "wrong_prompt"),
        (theirs[:40], ""),
    ):
        tokens, report = decode(fleet, mine, prefill(fleet, theirs))
        assert (tokens, report["recomputed"]) == (alone(fleet, mine), reason)


@pytest.mark.slow
def test_of_a_window_only_what_is_still_there_is_used(fleet_with_windows):
    """Layers with a window of 192 tokens keep no more: of a longer prompt, not what its beginning would need."""
    fleet = fleet_with_windows
    for size, part, reason in ((400, 400, ""), (400, 399, "out_of_range"), (400, 250, "out_of_range"), (150, 100, "")):
        theirs = prompt_of(size, seed=16)
        mine = theirs[:part]
        tokens, report = decode(fleet, mine, prefill(fleet, theirs), temperature=0)
        assert (tokens, report["recomputed"]) == (alone(fleet, mine), reason)


def test_a_reference_used_under_another_salt_is_not_used(fleet):
    prompt = prompt_of(60, seed=15)
    for salt, reason in (("a", ""), ("b", "wrong_prompt"), (None, "wrong_prompt")):
        tokens, report = decode(fleet, prompt, prefill(fleet, prompt, cache_salt="a"), cache_salt=salt)
        assert (tokens, report["recomputed"]) == (alone(fleet, prompt), reason)


def test_a_longer_prompt_than_was_computed_is_not_read(fleet):
    prompt = prompt_of(60, seed=4)
    longer = prompt_of(90, seed=4)
    tokens, report = decode(fleet, longer, prefill(fleet, prompt))
    assert (tokens, report["recomputed"]) == (alone(fleet, longer), "out_of_range")


def test_parameters_that_make_no_sense_are_recomputed(fleet):
    prompt = prompt_of(30, seed=5)
    tokens, report = decode(fleet, prompt, {"do_remote_prefill": True, "kvferry": "nonsense"})
    assert (tokens, report["recomputed"]) == (alone(fleet, prompt), "malformed")


@pytest.mark.slow
def test_prefill_killed_between_prefill_and_decode(fleet):
    prompt = prompt_of(80, seed=6)
    params = prefill(fleet, prompt)
    kill_prefill(fleet)
    tokens, report = decode(fleet, prompt, params)
    assert tokens == alone(fleet, prompt)
    assert report["recomputed"] in ("deadline", "peer_lost", "unreachable")
    answer, expected = both(fleet, prompt)
    assert answer.token_ids == expected.token_ids
    fleet.restart_and_wait()
    tokens, report = decode(fleet, prompt, params)
    assert (tokens, report["recomputed"]) == (alone(fleet, prompt), report["recomputed"])
    assert report["recomputed"] != ""


def test_prefill_killed_while_it_computes(fleet):
    prompt = prompt_of(3000, seed=7)
    expected = alone(fleet, prompt)
    killer = threading.Timer(0.3, kill_prefill, [fleet])
    killer.start()
    answer = ask(fleet.url, Question("tiny", prompt, 12), silent)
    killer.join()
    assert answer.token_ids == expected
    after = ask(fleet.url, Question("tiny", prompt_of(20, seed=8), 12), silent)
    assert after.token_ids == alone(fleet, prompt_of(20, seed=8))


@pytest.mark.slow
def test_a_router_and_a_decode_engine_that_die_are_started_again(fleet):
    for name in ("router", "decode-0"):
        killed = fleet.pids[name]
        os.kill(killed, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(killed)], timeout=DEADLINE_S)
        fleet.restart_and_wait()
        assert fleet.pids[name] != killed
    eventually(lambda: ready(fleet)["num_healthy_decode"] == 1, "the router has found the decode engine again")


def test_a_restarted_prefill_engine_serves_again(fleet):
    fleet.restart_and_wait()
    eventually(lambda: ready(fleet)["num_healthy_prefill"] == 1, "the router has found the prefill engine again")
    prompt = prompt_of(40, seed=9)
    answer, expected = both(fleet, prompt)
    assert answer.token_ids == expected.token_ids
    assert answer.report["tokens_received"] == 39


@pytest.mark.slow
def test_a_stream_that_is_open_when_all_stops_ends_with_an_error(start_fleet):
    """Never with a silent end: the client must be able to tell a broken answer from a finished one."""
    fleet = start_fleet(transport="shm")
    body = {"model": "tiny", "prompt": prompt_of(10), "max_tokens": 8000, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{fleet.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as stream:
        first = stream.readline()
        stopper = threading.Thread(target=fleet.__exit__, args=(None, None, None))
        stopper.start()
        lines = [line for line in stream if line.startswith(b"data: ")]
        stopper.join(DEADLINE_S)
    assert first.startswith(b"data: {")
    assert b"[DONE]" not in b"".join(lines)
    assert "error" in json.loads(lines[-1][len(b"data: ") :])
