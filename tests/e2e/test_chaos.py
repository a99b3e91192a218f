"""What is killed, stopped or left while a cache moves: a right answer or a clear error, in time, and no block lost.

Reads go over tcp and can be held at a gate, so that "during the transfer" is certain. Times are printed, not asserted.
"""

import concurrent.futures
import itertools
import json
import signal
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from chaos_support import Asking, Process, running, samples, since, usage_of
from conftest import DEADLINE_S, eventually, get, metric, prefilled
from test_main_job import prompt_of

pytestmark = pytest.mark.slow

LEASE_S = 6.0
PREFILL_TIMEOUT_S = 6.0
STALL_S = 6.0
MAX_GROWTH_BYTES = 32 << 20
EVENTS = 'kvferry_agent_events_total{{reason="{}",what="fetches_failed"}}'
RELEASES = 'kvferry_router_releases_total{{reason="{}"}}'
seeds = itertools.count(100)


@pytest.fixture(scope="module")
def site(tiny_model, tmp_path_factory):
    """A prefill engine, two decode engines and a router; each has met the other, and can be killed and restarted."""
    logs = tmp_path_factory.mktemp("chaos")
    common = ("--model", str(tiny_model), "--served-name", "tiny", "--transport", "tcp", "--num-blocks", "600")
    # The gates are where the decode engines read.
    common += ("--lease-timeout", str(LEASE_S), "--strategy", "direct", "--transfer-direction", "pull")
    p, d, spare = (Process(logs / f"{name}.log", "serve", "--engine-id", name, *common) for name in ("p0", "d0", "d1"))
    limits = ("--prefill-timeout", str(PREFILL_TIMEOUT_S), "--stall-timeout", str(STALL_S))
    with running(p, d, spare):
        router = Process(logs / "router.log", "route", "--prefill", p.url, "--decode", d.url, *limits)
        with running(router):
            yield SimpleNamespace(p=p, d=d, spare=spare, router=router, logs=logs)


@pytest.fixture(autouse=True)
def nothing_is_lost(site):
    """Before each test everything works over the transfer; after it nothing is left in either engine."""
    for process in (site.p, site.d, site.spare, site.router):
        if not process.running:  # One test that went wrong is enough.
            process.restart()
    works(site)
    yield
    works(site)
    for engine in (site.p, site.d):
        engine.until_free()


def works(site, num_tokens=40):
    """As soon as the router has found everybody, a request is answered as ever: from a cache that has moved."""
    eventually(lambda: get(f"{site.router.url}/ready")[1]["num_ready_prefill"] == 1, "the router has found prefill")
    eventually(lambda: get(f"{site.router.url}/ready")[1]["num_ready_decode"] == 1, "the router has found decode")
    answer = Asking(site.router.url, {"prompt": prompt_of(num_tokens, seed=next(seeds)), "max_tokens": 3})
    assert answer.answer()["kvferry"]["recomputed"] == "", site.d.log.read_text()[-2000:]
    assert answer.headers["x-kvferry-cache"] == "received"


def prefill(site, prompt):
    return prefilled(site.p.url, prompt)


def decode(site, prompt, params):
    """The decode request alone, under way."""
    return Asking(site.d.url, {"prompt": prompt, "max_tokens": 12, "kv_transfer_params": params})


@contextmanager
def reading(site, prompt):
    """The same, held while it reads."""
    params = prefill(site, prompt)
    with site.d.held():
        asking = decode(site, prompt, params)
        site.d.until_reading()
        yield asking


def alone(site, prompt, max_tokens=12):
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return Asking(site.spare.url, body).answer()["choices"][0]["token_ids"]


def streaming(site, prompt, max_tokens):
    """A stream that has begun."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    stream = Asking(site.router.url, body)
    assert stream.began.wait(DEADLINE_S)
    return stream


def failures(site):
    """All transfers that failed at the decode engine."""
    return sum(samples(site.d.url, "kvferry_engine_transfer_failures_total"))


def until_noticed(site, before, since_when):
    eventually(lambda: failures(site) > before, "the failure is counted")
    print(f"\nnoticed after {since(since_when)}; 3 heartbeats are 3 s", end="")


def expect_recomputed(site, asking, prompt, reasons):
    """The right answer; header, report, counters and log agree on why its cache did not come."""
    answer = asking.answer()
    assert answer["choices"][0]["token_ids"] == alone(site, prompt)[: len(answer["choices"][0]["token_ids"])]
    reason = answer["kvferry"]["recomputed"]
    assert reason in reasons
    assert asking.headers["x-kvferry-cache"] == "recomputed"
    assert metric(site.d.url, f'kvferry_engine_transfer_failures_total{{reason="{reason}"}}') >= 1
    assert metric(site.d.url, EVENTS.format(reason)) >= 1
    request_id = answer["id"].removeprefix("cmpl-")
    lines = [line for line in site.d.log.read_text().splitlines() if f"request {request_id}" in line]
    assert len(lines) == 1
    assert f": {reason}: from 'p0' epoch '" in lines[0]
    return reason


def test_the_header_says_how_the_cache_came(site):
    prompt = prompt_of(50, seed=1)
    stream = Asking(site.router.url, {"prompt": prompt, "max_tokens": 5, "stream": True})
    assert stream.token_ids() == alone(site, prompt, 5)
    assert (stream.headers["x-kvferry-cache"], stream.headers["x-kvferry-path"]) == ("received", "disaggregated")
    spent = prefill(site, prompt)
    assert decode(site, prompt, spent).answer()["kvferry"]["recomputed"] == ""
    body = {"prompt": prompt, "max_tokens": 5, "stream": True, "kv_transfer_params": spent}
    stream = Asking(site.d.url, body)
    assert stream.token_ids() == alone(site, prompt, 5)
    assert stream.headers["x-kvferry-cache"] == "recomputed"
    stream = Asking(site.d.url, {"prompt": prompt, "max_tokens": 5})
    stream.answer()
    assert stream.headers["x-kvferry-cache"] == "local"


@pytest.mark.chaos
def test_a_source_that_is_stopped_before_the_read_is_a_deadline(site):
    prompt = prompt_of(60, seed=2)
    params = prefill(site, prompt)
    with site.p.stopped():
        asking = decode(site, prompt, params)
        reason = expect_recomputed(site, asking, prompt, ("peer_lost", "deadline"))
        site.d.until_free()
    print(f"\nanswered after {asking.took_s:.2f} s ({reason})")
    stopped = time.monotonic()
    site.p.until_free()
    print(f"the source's blocks were free {since(stopped)} after it went on")


def test_a_source_that_is_stopped_during_the_read_is_a_deadline(site):
    prompt = prompt_of(2000, seed=3)
    with reading(site, prompt) as asking:
        before, stopped = failures(site), time.monotonic()
        site.p.signal(signal.SIGSTOP)
    try:
        # The gate is open: the read has reached a process that does nothing.
        until_noticed(site, before, stopped)
        reason = expect_recomputed(site, asking, prompt, ("peer_lost", "transport"))
        print(f"; answered after {since(stopped)} ({reason})")
        eventually(lambda: site.d.num_reads == 0, "the read has ended")
        site.d.until_free()
    finally:
        site.p.signal(signal.SIGCONT)


def test_a_source_that_is_killed_during_the_read(site):
    prompt = prompt_of(2000, seed=4)
    with reading(site, prompt) as asking:
        site.p.signal(signal.SIGSTOP)
    # The read reaches it now, so that it dies with a connection open on which bytes are due.
    site.d.until_reading()
    before, killed = failures(site), site.p.kill()
    until_noticed(site, before, killed)
    reason = expect_recomputed(site, asking, prompt, ("peer_lost", "transport"))
    print(f"; answered after {since(killed)} ({reason})")
    site.d.until_free()
    site.p.restart()


@pytest.mark.chaos
def test_a_source_that_is_killed_with_a_held_read_and_before_one(site):
    """Nothing tells of its death but its silence; a second request meets it only then."""
    prompts = [prompt_of(300, seed=5), prompt_of(300, seed=6)]
    params = [prefill(site, prompt) for prompt in prompts]
    with site.d.held():
        asking = decode(site, prompts[0], params[0])
        site.d.until_reading()
        before, killed = failures(site), site.p.kill()
        until_noticed(site, before, killed)
        reason = expect_recomputed(site, asking, prompts[0], ("peer_lost",))
        print(f"; answered after {since(killed)} ({reason})")
        asking = decode(site, prompts[1], params[1])
        reason = expect_recomputed(site, asking, prompts[1], ("deadline", "peer_lost", "unreachable"))
        print(f"a request that came after it: {asking.took_s:.2f} s ({reason}); a handshake may take 5 s")
        site.d.until_free()
    site.p.restart()


@pytest.mark.chaos
def test_a_source_that_is_killed_after_the_read_is_not_missed(site):
    prompt = prompt_of(100, seed=7)
    stream = streaming(site, prompt, 300)
    site.p.kill()
    assert stream.token_ids() == alone(site, prompt, 300)
    assert stream.headers["x-kvferry-cache"] == "received"
    site.p.restart()


def test_a_target_that_is_killed_during_the_read(site):
    """What the router knows of is released at once; the rest when its lease runs out."""
    with site.d.held():
        through = Asking(site.router.url, {"prompt": prompt_of(300, seed=8), "max_tokens": 3})
        site.d.until_reading()
        prompt = prompt_of(300, seed=9)
        decode(site, prompt, prefill(site, prompt))
        site.d.until_reading(2)
        before, releases = site.p.num_granted, metric(site.router.url, RELEASES.format("decode_failed"))
        killed = site.d.kill()
    error = through.answer()["error"]
    assert (through.status, error["code"], error["reason"]) == (502, "upstream_unavailable", "reset")
    assert metric(site.router.url, RELEASES.format("decode_failed")) == releases + 1
    eventually(lambda: site.p.num_granted < before, "the released blocks are free")
    print(f"\nreleased {since(killed)} after the death")
    site.p.until_free()
    print(f"all of the source's blocks were free {since(killed)} after the death; a lease is {LEASE_S} s")
    site.d.restart()


@pytest.mark.chaos
def test_a_target_that_is_stopped_during_the_read_comes_too_late(site):
    """Its lease has run out when it goes on: what it reads then is not believed."""
    prompt = prompt_of(300, seed=21)
    with reading(site, prompt) as asking, site.d.stopped():
        stopped = time.monotonic()
        site.p.until_free()
        print(f"\nthe source's blocks were free after {since(stopped)}; a lease is {LEASE_S} s")
    expect_recomputed(site, asking, prompt, ("expired", "peer_lost"))


@pytest.mark.chaos
def test_a_decode_engine_that_is_stopped_while_it_answers_is_a_deadline(site):
    stream = streaming(site, prompt_of(60, seed=22), 4000)
    with site.d.stopped():
        stopped = time.monotonic()
        error = json.loads(stream.lines()[-1])["error"]
        print(f"\nended after {since(stopped)} of silence; the limit is {STALL_S} s")
    assert (error["code"], error["reason"]) == ("upstream_broke_off", "stall")
    site.d.until_free()


@pytest.mark.chaos
def test_a_prefill_engine_that_is_stopped_while_it_computes_is_a_deadline(site):
    """The router gives it up, and the decode engine does it all."""
    prompt = prompt_of(3000, seed=10)
    asking = Asking(site.router.url, {"prompt": prompt, "max_tokens": 4})
    eventually(lambda: site.p.num_granted > 0, "prefill has begun")
    with site.p.stopped():
        answer = asking.answer()
        print(f"\nanswered after {asking.took_s:.2f} s; a prefill may take {PREFILL_TIMEOUT_S} s")
        assert answer["choices"][0]["token_ids"] == alone(site, prompt, 4)
        assert (asking.headers["x-kvferry-path"], asking.headers["x-kvferry-cache"]) == ("decode-only", "local")
    site.p.until_free()


def expect_both_free(site, left, when):
    for name, engine in (("source", site.p), ("target", site.d)):
        engine.until_free()
        print(f"\nleft {when}: {name} free after {since(left)}", end="")


def test_a_client_that_leaves_during_prefill(site):
    asking = Asking(site.router.url, {"prompt": prompt_of(4000, seed=11), "max_tokens": 3})
    eventually(lambda: site.p.num_granted > 0, "prefill has begun")
    expect_both_free(site, asking.leave(), "during prefill")


def test_a_client_that_leaves_between_prefill_and_decode(site):
    """The cache is computed and nobody has claimed it: the router tells the prefill engine that nobody will."""
    with site.d.stopped():
        answered = 'kvferry_engine_requests_total{role="prefill",status="200"}'
        before = metric(site.p.url, answered)
        releases = metric(site.router.url, RELEASES.format("client_left"))
        asking = Asking(site.router.url, {"prompt": prompt_of(300, seed=12), "max_tokens": 3})
        eventually(lambda: metric(site.p.url, answered) == before + 1, "prefill has answered")
        assert site.p.num_granted > 0
        left = asking.leave()
        site.p.until_free()
        print(f"\nleft between prefill and decode: source free after {since(left)}", end="")
        assert metric(site.router.url, RELEASES.format("client_left")) == releases + 1
    expect_both_free(site, left, "between prefill and decode")


def test_a_client_that_leaves_during_the_transfer(site):
    with site.d.held():
        asking = Asking(site.router.url, {"prompt": prompt_of(300, seed=13), "max_tokens": 3})
        site.d.until_reading()
        expect_both_free(site, asking.leave(), "during the transfer")


def test_a_client_that_leaves_during_decode(site):
    stream = streaming(site, prompt_of(300, seed=14), 3000)
    expect_both_free(site, stream.leave(), "during decode")


def test_a_client_that_leaves_while_it_waits_for_room(site):
    """The decode engine has not begun to fetch: it tells the source that it never will."""
    full = [
        Asking(site.d.url, {"prompt": prompt_of(20, seed=15), "max_tokens": 4700, "stream": True, "ignore_eos": True})
        for _ in range(2)
    ]
    assert all(asking.began.wait(DEADLINE_S) for asking in full)
    prompt = prompt_of(300, seed=16)
    params = prefill(site, prompt)
    asking = Asking(site.d.url, {"prompt": prompt, "max_tokens": 4000, "kv_transfer_params": params})
    waiting = 'kvferry_engine_open_requests{state="waiting"}'
    eventually(lambda: metric(site.d.url, waiting) == 1, "it waits for room")
    left = asking.leave()
    site.p.until_free()
    print(f"\nleft while it waited for room: source free after {since(left)}", end="")
    for one in full:
        one.leave()
    expect_both_free(site, left, "while it waited for room")


def test_a_draining_decode_engine_loses_no_request(site):
    """The only one even: what comes until it ends is answered, what runs is finished."""
    prompt = prompt_of(200, seed=17)
    streams = [streaming(site, prompt, 300) for _ in range(2)]
    site.d.signal(signal.SIGTERM)
    eventually(lambda: site.d.ready()[0] == 503, "it says that it is not ready")
    assert "draining" in site.d.ready()[1]["reason"]
    assert get(f"{site.d.url}/health")[0] == 200
    eventually(lambda: get(f"{site.router.url}/ready")[1]["num_ready_decode"] == 0, "the router knows")
    late = Asking(site.router.url, {"prompt": prompt, "max_tokens": 4})
    assert late.answer()["choices"][0]["token_ids"] == alone(site, prompt, 4)
    expected = alone(site, prompt, 300)
    assert [stream.token_ids() for stream in streams] == [expected, expected]
    assert site.d.ended() == 0
    site.d.restart()


def test_a_draining_prefill_engine_keeps_its_leases_until_they_are_read(site):
    prompt = prompt_of(200, seed=18)
    params = prefill(site, prompt)
    site.p.signal(signal.SIGTERM)
    eventually(lambda: site.p.ready()[0] == 503, "it says that it is not ready")
    eventually(lambda: get(f"{site.router.url}/ready")[1]["num_ready_prefill"] == 0, "the router knows")
    asking = Asking(site.router.url, {"prompt": prompt, "max_tokens": 12})
    assert asking.answer()["choices"][0]["token_ids"] == alone(site, prompt)
    assert asking.headers["x-kvferry-path"] == "decode-only"
    read = decode(site, prompt, params)
    assert read.answer()["kvferry"]["recomputed"] == ""
    assert site.p.ended() == 0
    site.p.restart()


@pytest.mark.chaos
def test_a_router_that_is_told_to_end_finishes_what_it_has(site):
    prompt = prompt_of(60, seed=19)
    stream = streaming(site, prompt, 300)
    site.router.signal(signal.SIGTERM)
    eventually(lambda: get(f"{site.router.url}/ready")[0] == 503, "it says that it is not ready")
    assert stream.token_ids() == alone(site, prompt, 300)
    assert site.router.ended() == 0
    site.router.restart()


@pytest.mark.chaos
def test_a_stream_whose_engine_dies_ends_with_a_reason(site):
    stream = streaming(site, prompt_of(60, seed=20), 4000)
    site.d.kill()
    error = json.loads(stream.lines()[-1])["error"]
    assert (error["code"], error["reason"]) == ("upstream_broke_off", "reset")
    request_id = stream.headers["x-request-id"]
    line = f"request {request_id}: the decode request to {site.d.url} failed: reset"
    assert site.router.log.read_text().count(line) == 1
    site.d.restart()


@pytest.mark.chaos
def test_engines_that_are_replaced_one_after_the_other_lose_no_request(site):
    """With a second decode engine, under load: every answer is right, whoever drains, ends and comes back."""
    prompts = [prompt_of(30 + 7 * i, seed=30 + i) for i in range(3)]
    expected = [alone(site, prompt, 20) for prompt in prompts]
    urls = ("--prefill", site.p.url, "--decode", site.d.url, "--decode", site.spare.url)
    router, over, wrong, num_answers = Process(site.logs / "rolling.log", "route", *urls), threading.Event(), [], [0]

    def ask(i):
        while not over.is_set():
            asking = Asking(router.url, {"prompt": prompts[i], "max_tokens": 20, "ignore_eos": True})
            answer = asking.answer()
            num_answers[0] += 1
            if asking.status != 200 or answer["choices"][0]["token_ids"] != expected[i]:
                wrong.append((asking.status, answer))

    with running(router):
        eventually(lambda: get(f"{router.url}/ready")[1]["num_ready_decode"] == 2, "the router has found both")
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            asking = [pool.submit(ask, i) for i in range(3)]
            try:
                for engine in (site.d, site.p):
                    engine.signal(signal.SIGTERM)
                    assert engine.ended() == 0
                    engine.restart()
            finally:
                over.set()
            for each in asking:
                each.result(DEADLINE_S)
    print(f"\n{num_answers[0]} answers")
    assert not wrong


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["p", "d"])
def test_the_other_side_outlives_three_restarts(site, name):
    restarted, other = getattr(site, name), site.d if name == "p" else site.p
    works(site)
    before = usage_of(other.pid)
    for _ in range(3):
        restarted.kill()
        restarted.restart()
        works(site)
    after = usage_of(other.pid)
    print(f"\nbefore {before}\nafter  {after}")
    # Threads of pools come and go with requests; what would grow with every peer is looked at over a hundred restarts.
    assert after["fds"] <= before["fds"] + 2
    assert after["threads"] <= before["threads"] + 2
    assert after["memory_bytes"] <= before["memory_bytes"] + MAX_GROWTH_BYTES
