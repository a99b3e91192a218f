"""Decode begins while prefill is still computing: the same answer, from bytes that came meanwhile.

The prefill engine's last step can be kept back, so that "before the prefill is done" is certain.
"""

import json
import random
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from chaos_support import Asking, Process, running
from conftest import BYTES_PER_TOKEN, eventually, metric
from test_main_job import prompt_of

STEP_TOKENS = 256
NUM_STEPS = 14
NUM_TOKENS = NUM_STEPS * STEP_TOKENS + 100
pytestmark = pytest.mark.slow

EARLY = {"do_remote_decode": True, "kvferry": {"early": True}}
WAYS = {
    "push": ("--transfer-direction", "push", "--strategy", "direct"),
    "pack": ("--strategy", "pack"),
    "pull": ("--transfer-direction", "pull"),
}
SENT = {"push": NUM_STEPS * STEP_TOKENS, "pack": NUM_TOKENS // 2}
"""Of fourteen steps, whole stretches: seven of 4 MiB that are pushed, and the first of two slots of one length."""
FIRST_SENT = {"push": STEP_TOKENS, "pack": STEP_TOKENS, "pull": 0}
DONE = 'kvferry_agent_leases_ended_total{how="done"}'
MOVED = 'kvferry_agent_moved_bytes_total{direction="write"}'


@pytest.fixture(scope="module")
def site(tiny_model, tmp_path_factory):
    """A prefill engine with small steps, and a decode engine for each way."""
    logs = tmp_path_factory.mktemp("early")
    common = ("--model", str(tiny_model), "--served-name", "tiny", "--transport", "shm", "--num-blocks", "800")
    words = ("serve", "--engine-id", "p", *common, "--max-batch-tokens", str(STEP_TOKENS))
    p = Process(logs / "p.log", *words, script=Path(__file__).with_name("early_serve.py"))
    targets = {
        way: Process(logs / f"{way}.log", "serve", "--engine-id", way, *common, *options)
        for way, options in WAYS.items()
    }
    with running(p, *targets.values()):
        yield SimpleNamespace(p=p, targets=targets)


@pytest.fixture(scope="module")
def router(site, tmp_path_factory):
    """Before the prefill engine and the one that has everything packed."""
    urls = ("--prefill", site.p.url, "--decode", site.targets["pack"].url)
    process = Process(tmp_path_factory.mktemp("router") / "router.log", "route", *urls, "--early-decode-from", "256")
    with running(process):
        yield process


@pytest.fixture(autouse=True)
def nothing_is_lost(site):
    yield
    for engine in (site.p, *site.targets.values()):
        engine.until_free()


def begun(engine, prompt):
    """The prefill request, under way, and the reference that it began with."""
    prefill = Asking(engine.url, {"prompt": prompt, "max_tokens": 1, "stream": True, "kv_transfer_params": EARLY})
    eventually(lambda: b"\n\n" in prefill.text, "the prefill request has begun")
    return prefill, json.loads(prefill.text.partition(b"\n\n")[0].removeprefix(b"data: "))["kv_transfer_params"]


def decoding(engine, prompt, params):
    return Asking(engine.url, {"prompt": prompt, "max_tokens": 12, "kv_transfer_params": params})


def alone(engine, prompt):
    body = {"prompt": prompt, "max_tokens": 12}
    return Asking(engine.url, body).answer()["choices"][0]["token_ids"]


def tokens_of(answer):
    return answer["choices"][0]["token_ids"]


def until_sent(site, before, num_tokens):
    moved = lambda: metric(site.p.url, MOVED) - before  # noqa: E731
    eventually(lambda: moved() >= num_tokens * BYTES_PER_TOKEN, f"{num_tokens} tokens are sent")


@contextmanager
def moving(site, way, prompt, num_tokens):
    """Both requests for a prompt, with so many of its tokens sent; the prefill engine is held until the end."""
    before = metric(site.p.url, MOVED)
    with site.p.held():
        prefill, params = begun(site.p, prompt)
        asking = decoding(site.targets[way], prompt, params)
        until_sent(site, before, num_tokens)
        yield prefill, asking


@contextmanager
def moving_by_router(site, router, prompt, num_tokens):
    """The same where a router asks both."""
    before = metric(site.p.url, MOVED)
    with site.p.held():
        asking = Asking(router.url, {"prompt": prompt, "max_tokens": 12})
        until_sent(site, before, num_tokens)
        yield asking


def expect_end(prefill, prompt, expected):
    """The prefill request has ended as ever."""
    *_, last, done = prefill.lines()
    assert done == b"[DONE]"
    last = json.loads(last)
    assert tokens_of(last) == expected[:1]
    assert last["kvferry"]["tokens_computed"] == len(prompt)


def expect_moved_twice(source, target, prompt):
    """The answer is that of one engine, from a cache that has come."""
    expected = alone(target, prompt)
    for _ in range(2):
        prefill, params = begun(source, prompt)
        answer = decoding(target, prompt, params).answer()
        assert tokens_of(answer) == expected
        assert (answer["kvferry"]["recomputed"], answer["kvferry"]["tokens_computed"]) == ("", 1)
        expect_end(prefill, prompt, expected)


@pytest.mark.parametrize("way", WAYS)
def test_the_answer_is_that_of_one_engine(site, way):
    """At full speed: nothing is kept back."""
    expect_moved_twice(site.p, site.targets[way], prompt_of(NUM_TOKENS, seed=1))


def test_what_a_layer_has_computed_may_leave_before_its_step_has_ended(site, tiny_model, tmp_path):
    """In steps of 16 MiB, which are worth it."""
    options = ("--model", str(tiny_model), "--served-name", "tiny", "--transport", "shm", "--num-blocks", "800")
    words = ("serve", "--engine-id", "layered", *options, "--max-batch-tokens", "2048", "--layer-wise")
    source = Process(tmp_path / "layered.log", *words)
    with running(source):
        expect_moved_twice(source, site.targets["push"], prompt_of(NUM_TOKENS, seed=10))
        source.until_free()


def test_many_at_the_same_time_do_not_mix(site):
    prompts = [prompt_of(random.Random(seed).randrange(200, 900), seed) for seed in range(9)]
    targets = [site.targets[way] for way in (*WAYS, *WAYS, *WAYS)]
    expected = [alone(target, prompt) for target, prompt in zip(targets, prompts, strict=True)]
    prefills = [begun(site.p, prompt) for prompt in prompts]
    asking = [
        decoding(target, prompt, params) for target, prompt, (_, params) in zip(targets, prompts, prefills, strict=True)
    ]
    answers = [each.answer() for each in asking]
    assert [tokens_of(answer) for answer in answers] == expected
    assert {answer["kvferry"]["recomputed"] for answer in answers} == {""}
    for (prefill, _), prompt, tokens in zip(prefills, prompts, expected, strict=True):
        expect_end(prefill, prompt, tokens)


@pytest.mark.parametrize("way", ["push", "pack"])
def test_what_is_computed_is_sent_while_the_rest_is_not(site, way):
    """Ten steps are made, the last is kept back: all stretches but the last go, and the answer cannot begin."""
    target, prompt = site.targets[way], prompt_of(NUM_TOKENS, seed=2)
    expected, done = alone(target, prompt), metric(site.p.url, DONE)
    with moving(site, way, prompt, SENT[way]) as (prefill, asking):
        assert b"finish_reason" not in prefill.text
        assert asking.status == 0
    answer = asking.answer()
    assert tokens_of(answer) == expected
    report = answer["kvferry"]
    assert (report["tokens_received"], report["tokens_computed"], report["recomputed"]) == (NUM_TOKENS - 1, 1, "")
    assert (report["strategy"], report["verified"]) == ("direct" if way == "push" else way, "sampled")
    expect_end(prefill, prompt, expected)
    eventually(lambda: metric(site.p.url, DONE) == done + 1, "the lease has ended")


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_may_be_done_before_its_prefill_but_the_lease_is_not(site, way):
    """All tokens but the last one are computed: that is all that a decode engine wants."""
    target, prompt = site.targets[way], prompt_of(4 * STEP_TOKENS + 1, seed=3)
    expected, done = alone(target, prompt), metric(site.p.url, DONE)
    with site.p.held():
        prefill, params = begun(site.p, prompt)
        answer = decoding(target, prompt, params).answer()
        assert tokens_of(answer) == expected
        assert answer["kvferry"]["tokens_received"] == 4 * STEP_TOKENS
        target.until_free()
        assert b"finish_reason" not in prefill.text
        assert metric(site.p.url, DONE) == done
        assert site.p.num_granted > 0
    expect_end(prefill, prompt, expected)
    eventually(lambda: metric(site.p.url, DONE) == done + 1, "the lease has ended")


@pytest.mark.parametrize("way", WAYS)
def test_the_prefills_client_leaves_in_the_middle(site, way):
    prompt = prompt_of(NUM_TOKENS, seed=4)
    expected = alone(site.targets[way], prompt)
    with moving(site, way, prompt, FIRST_SENT[way]) as (prefill, asking):
        prefill.leave()
        site.p.until_free()
        answer = asking.answer()
    assert tokens_of(answer) == expected
    assert answer["kvferry"]["recomputed"] in ("expired", "unknown_lease")


@pytest.mark.parametrize("way", WAYS)
def test_the_decodes_client_leaves_in_the_middle(site, way):
    """Nobody will read what is computed: the prefill request ends with an error, and both have their blocks back."""
    target = site.targets[way]
    with moving(site, way, prompt_of(NUM_TOKENS, seed=5), FIRST_SENT[way]) as (prefill, asking):
        eventually(lambda: target.num_granted > 0, "the decode request has begun")
        asking.leave()
        target.until_free()
        site.p.until_free()
        error = json.loads(prefill.lines()[-1])["error"]
    assert error["code"] == "aborted"


def test_a_router_has_the_cache_moved_while_the_rest_is_computed(site, router):
    prompt = prompt_of(NUM_TOKENS, seed=7)
    expected = alone(site.targets["pack"], prompt)
    with moving_by_router(site, router, prompt, SENT["pack"]) as asking:
        assert asking.status == 0
    answer = asking.answer()
    assert tokens_of(answer) == expected
    assert (answer["kvferry"]["recomputed"], answer["kvferry"]["tokens_computed"]) == ("", 1)
    assert asking.headers["x-kvferry-path"] == "disaggregated"
    assert metric(router.url, "kvferry_router_early_decodes_total") == 1


def test_a_client_of_a_router_leaves_in_the_middle(site, router):
    with moving_by_router(site, router, prompt_of(NUM_TOKENS, seed=8), STEP_TOKENS) as asking:
        asking.leave()
        site.targets["pack"].until_free()
        site.p.until_free()


@pytest.mark.parametrize("way", WAYS)
def test_the_prefill_engine_is_killed_in_the_middle(site, way):
    target, prompt = site.targets[way], prompt_of(NUM_TOKENS, seed=6)
    expected = alone(target, prompt)
    with moving(site, way, prompt, FIRST_SENT[way]) as (_, asking):
        site.p.kill()
        answer = asking.answer()
    site.p.restart()
    assert tokens_of(answer) == expected
    assert answer["kvferry"]["recomputed"] in ("peer_lost", "deadline", "unreachable", "transport")
    target.until_free()
    prefill, params = begun(site.p, prompt)
    answer = decoding(target, prompt, params).answer()
    assert (tokens_of(answer), answer["kvferry"]["recomputed"]) == (expected, "")
    expect_end(prefill, prompt, expected)


def test_a_routers_prefill_engine_is_killed_in_the_middle(site, router):
    """The router sees it first: decode is asked again, alone. Its client waits, and sees nothing else of it."""
    target, prompt = site.targets["pack"], prompt_of(NUM_TOKENS, seed=9)
    expected = alone(target, prompt)
    lost = 'kvferry_router_upstream_errors_total{reason="reset",role="prefill"}'
    num_lost = metric(router.url, lost)
    with moving_by_router(site, router, prompt, STEP_TOKENS) as asking:
        site.p.kill()
        answer = asking.answer()
    site.p.restart()
    assert tokens_of(answer) == expected
    assert asking.headers["x-kvferry-path"] == "decode-only"
    assert metric(router.url, lost) == num_lost + 1
    assert metric(router.url, 'kvferry_router_retries_total{reason="prefill_lost",role="decode"}') == 1
    target.until_free()
