"""Instances that come, go, expire, differ, and lose caches: the pool on a virtual clock, and real sockets."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from router_harness import DONE, answer, cluster, decode_engine, decoding, prefill_engine, serving, streaming

from kvferry.cli.options import context_of, record_of
from kvferry.cli.route.command import RouteOptions, route
from kvferry.cli.route.server import config_of
from kvferry.embedded.http.router_registration import Registrar, RegistrarConfig
from kvferry.errors import ConfigurationError, RequestError
from kvferry.http.registration import MEMBERS_PATH, SIGNATURE, Side, decode_announcement, reason_to_refuse, sign
from kvferry.router.config import PolicySettings, Registration, RouterConfig
from kvferry.router.discovery.members_file import MembersFile
from kvferry.router.discovery.registry import Registry
from kvferry.router.fleet.engine_info import EngineInfo
from kvferry.router.fleet.instance import INSTANCE_BREAKER, InstanceRequest, Origin, ProbeResult, Reservation
from kvferry.router.fleet.instance_pool import PAIR_BREAKER, InstancePool
from kvferry.router.http.app import create_app
from kvferry.router.http.status import readiness
from kvferry.router.policy.records import Instance, Limits, NoInstance, RequestCost, Role, SkipPrefill, UseInstance
from kvferry.router.telemetry.metrics import Metrics
from kvferry.wire.messages import Reason

P0, P1 = (Instance(f"http://p{i}", Role.PREFILL) for i in range(2))
D0, D1 = (Instance(f"http://d{i}", Role.DECODE) for i in range(2))
KEY = b"k" * 32


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pool_of(*instances) -> tuple[InstancePool, Clock]:
    clock = Clock()
    pool = InstancePool(instances, Metrics(), PolicySettings(clock=clock))
    for instance in instances:
        pool.probed(instance, ProbeResult.READY, "")
    return pool, clock


def taken(pool, role, *partners, task=RequestCost()) -> Instance | None:  # noqa: B008
    found = pool.reserve(InstanceRequest(role, task, partners=partners))
    if not isinstance(found, Reservation):
        return None
    found.release()
    return found.instance


def test_one_missed_probe_is_not_the_end_and_a_refused_one_is():
    pool, _ = pool_of(D0)
    pool.probed(D0, ProbeResult.SILENT, "slow")
    assert pool.healthy(Role.DECODE) == [D0]
    pool.probed(D0, ProbeResult.SILENT, "slow")
    assert pool.healthy(Role.DECODE) == []
    pool.probed(D0, ProbeResult.READY, "")
    pool.probed(D0, ProbeResult.SILENT, "slow")
    pool.probed(D0, ProbeResult.READY, "")
    pool.probed(D0, ProbeResult.SILENT, "slow")
    assert pool.healthy(Role.DECODE) == [D0]
    pool.probed(D0, ProbeResult.DOWN, "refused")
    assert pool.healthy(Role.DECODE) == []


def test_an_instance_that_fails_requests_is_out_and_gets_one_trial():
    pool, clock = pool_of(D0)
    for _ in range(INSTANCE_BREAKER.num_failures):
        reservation = pool.reserve(InstanceRequest(Role.DECODE))
        reservation.failed()
        reservation.release()
    assert pool.reserve(InstanceRequest(Role.DECODE)) == NoInstance()
    assert readiness(pool, False)[1]["status"] == "every decode instance keeps failing"
    clock.now += INSTANCE_BREAKER.open_s
    trial = pool.reserve(InstanceRequest(Role.DECODE))
    assert pool.reserve(InstanceRequest(Role.DECODE)) == NoInstance()
    trial.release()
    trial = pool.reserve(InstanceRequest(Role.DECODE))
    trial.succeeded()
    trial.release()
    assert taken(pool, Role.DECODE) == D0


def test_a_pair_that_loses_caches_is_out_and_the_fleet_is_not():
    pool, clock = pool_of(P0, P1, D0, D1)
    for _ in range(PAIR_BREAKER.num_failures):
        pool.lost((P0, D0), "peer_lost", None)
    assert {taken(pool, Role.PREFILL, D0) for _ in range(4)} == {P1}
    assert {taken(pool, Role.PREFILL, D1) for _ in range(4)} == {P0, P1}
    assert pool.num_usable_pairs() == 3
    clock.now += PAIR_BREAKER.open_s
    assert {taken(pool, Role.PREFILL, D0) for _ in range(4)} >= {P0}


def test_a_decode_instance_that_can_work_with_nobody_is_the_last_choice():
    pool, _ = pool_of(P0, D0, D1)
    for _ in range(PAIR_BREAKER.num_failures):
        pool.lost((P0, D0), "digest", None)
    assert {taken(pool, Role.DECODE) for _ in range(4)} == {D1}
    whole = RequestCost(is_divisible=False)
    assert {taken(pool, Role.DECODE, task=whole) for _ in range(4)} == {D0, D1}


def test_the_first_word_about_an_instance_is_news_and_the_same_again_is_none(caplog):
    pool = InstancePool((P0,), Metrics(), PolicySettings(clock=Clock()))
    caplog.set_level(logging.INFO)
    for result in (ProbeResult.DOWN, ProbeResult.DOWN, ProbeResult.READY, ProbeResult.READY):
        pool.probed(P0, result, "its probe failed (refused)")
    words = [record.getMessage().split(": ")[0].rsplit(" ", 1)[-1] for record in caplog.records]
    assert words == ["down", "up"]


def test_incompatible_sides_are_never_paired():
    pool, _ = pool_of(P0, P1, D0)
    pool.introduce(D0, EngineInfo("kvferry", "1", "1", "e0", ("m",), "cache-a"))
    pool.introduce(P0, EngineInfo("kvferry", "1", "1", "e1", ("m",), "cache-b"))
    pool.introduce(P1, EngineInfo("kvferry", "1", "1", "e2", ("m",), "cache-a"))
    assert {taken(pool, Role.PREFILL, D0) for _ in range(4)} == {P1}
    assert pool.num_usable_pairs() == 1
    pool.introduce(P1, EngineInfo("kvferry", "1", "2", "e3", ("m",), "cache-a"))
    assert taken(pool, Role.PREFILL, D0) is None
    assert readiness(pool, False)[0] == 200
    assert readiness(pool, True) == (503, readiness(pool, True)[1])
    pool.introduce(P1, EngineInfo("kvferry", "1", "1", "e4", ("m",), "cache-a"))
    assert readiness(pool, True)[0] == 200


def test_a_request_goes_where_its_model_is():
    pool, _ = pool_of(P0, D0, D1)
    pool.introduce(D0, EngineInfo("vllm", models=("a",)))
    pool.introduce(D1, EngineInfo("vllm", models=("b", "c")))
    pool.introduce(P0, EngineInfo("vllm", models=("a",)))
    assert {taken(pool, Role.DECODE, task=RequestCost(model="c")) for _ in range(4)} == {D1}
    assert taken(pool, Role.PREFILL, D1, task=RequestCost(model="c")) is None
    # Nobody has it: the one that can be paired says so.
    assert taken(pool, Role.DECODE, task=RequestCost(model="z")) == D0


def test_a_model_that_nobody_has_is_no_sign_of_missing_prefill_instances():
    """A client has written a wrong name: nobody is to be woken for it."""
    pool, _ = pool_of(P0, D0, D1)
    pool.introduce(P0, EngineInfo("vllm", models=("a",)))
    pool.introduce(D0, EngineInfo("vllm", models=("a", "b")))

    def prefill_for(model):
        return pool.reserve(InstanceRequest(Role.PREFILL, RequestCost(model=model), partners=(D0,)))

    # Whoever tells nothing of its models, as here, may have any.
    assert prefill_for("z") == prefill_for("b") == NoInstance()
    pool.introduce(D1, EngineInfo("vllm", models=("a",)))
    assert prefill_for("z") == NoInstance("unknown_model")
    assert prefill_for("b") == NoInstance()
    # A decode instance that computes nothing would not say so.
    pool.introduce(D0, EngineInfo("vllm", models=("a",), computes_prompts=False))
    pool.probed(P0, ProbeResult.DOWN, "")
    assert prefill_for("z") == NoInstance()
    pool.probed(P0, ProbeResult.READY, "")
    assert isinstance(prefill_for("a"), Reservation)


def asked(pool, role, task, *partners):
    """What the policy is told of the candidates of a role."""
    seen = []

    def policy(question):
        seen.append(question)
        return NoInstance()

    pool._policy_settings = PolicySettings(policy, clock=pool._policy_settings.clock)
    assert pool.reserve(InstanceRequest(role, task, partners=partners)) == NoInstance()
    return seen[0].candidates


def test_what_was_sent_before_counts_where_there_is_a_prefix_cache():
    pool, _ = pool_of(P0, P1)
    task = RequestCost(prompt_tokens=600, prefixes=(7, 8), prefix_tokens=256)
    for instance in (P0, P1):
        pool.prefixes.remember(instance, task.prefixes)
    pool.introduce(P1, EngineInfo("kvferry", "1", "1", "", ("m",), "c", prefix_cache=False))
    assert [load.cached_tokens for load in asked(pool, Role.PREFILL, task)] == [512, 0]


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (UseInstance(D1), "was not offered"),
        (None, "returned None"),
        (D0, "returned Instance"),
        (SkipPrefill("short"), "returned SkipPrefill"),
    ],
)
def test_a_policy_that_chooses_what_is_not_there_or_nothing_has_chosen_nobody(decision, words, caplog):
    pool = InstancePool((D0,), Metrics(), PolicySettings(lambda question: decision, clock=Clock()))
    pool.probed(D0, ProbeResult.READY, "")
    assert pool.reserve(InstanceRequest(Role.DECODE)) == NoInstance()
    assert words in caplog.text


def test_registrations_expire_unless_they_are_renewed():
    pool, clock = pool_of(D0)
    assert pool.add(P0, Origin.REGISTERED, 15.0)
    clock.now += 10
    assert not pool.add(P0, Origin.REGISTERED, 15.0)
    clock.now += 14
    pool.expire()
    assert P0 in pool.instances
    clock.now += 1
    pool.expire()
    assert pool.instances == (D0,)


def test_only_who_brought_an_instance_takes_it_out_and_its_requests_go_on():
    pool, _ = pool_of(D0)
    running = pool.reserve(InstanceRequest(Role.DECODE))
    assert not pool.add(D0, Origin.REGISTERED, 1.0)
    assert not pool.remove(D0, Origin.REGISTERED)
    assert pool.remove(D0, Origin.COMMAND_LINE)
    running.succeeded()
    running.release()
    assert pool.reserve(InstanceRequest(Role.DECODE)) == NoInstance()


def test_what_left_is_not_measured_any_more():
    metrics = Metrics()
    pool = InstancePool((P0, D0), metrics)
    pool.lost((P0, D0), "digest", None)
    metrics.observe_phases({"wire": 0.1}, P0.url, D0.url)
    metrics.observer_of_gaps(D0.url)(0.1)
    pool.remove(D0, Origin.COMMAND_LINE)
    shown = metrics.render().decode()
    assert D0.url not in shown
    assert P0.url in shown


def test_pairs_that_keep_failing_are_counted_while_both_of_them_answer():
    metrics = Metrics()
    pool = InstancePool((P0, P1, D0), metrics)
    for instance in (P0, P1, D0):
        pool.probed(instance, ProbeResult.READY, "")

    def num_broken():
        pool.show()
        (line,) = [line for line in metrics.render().decode().splitlines() if line.startswith("kvferry_router_broken")]
        return float(line.split()[1])

    pool.lost((P1, D0), "transport", None)
    assert num_broken() == 0
    for _ in range(PAIR_BREAKER.num_failures):
        pool.lost((P0, D0), "transport", None)
    assert num_broken() == 1
    pool.probed(P0, ProbeResult.DOWN, "")
    assert num_broken() == 0
    pool.probed(P0, ProbeResult.READY, "")
    assert num_broken() == 1
    pool.arrived((P0, D0))
    assert num_broken() == 0


def test_no_failed_transfer_is_the_first_of_its_series():
    """An alarm looks at what a counter grows by."""
    shown = Metrics().render().decode()
    for reason in Reason:
        assert f'kvferry_router_transfer_failures_total{{reason="{reason}"}} 0.0' in shown


def test_so_many_instances_and_pairs_have_metrics_of_their_own():
    metrics = Metrics(max_labels=4)
    instances = [Instance(f"http://{role}{number}", role) for number in range(3) for role in Role]
    pool = InstancePool(instances, metrics)
    for prefill, decode in ((0, 1), (2, 1), (2, 3), (4, 5), (4, 1)):
        pool.lost((instances[prefill], instances[decode]), "digest", None)
        metrics.observe_phases({"wire": 0.5}, instances[prefill].url, instances[decode].url)
        metrics.observer_of_gaps(instances[decode].url)(0.1)
    shown = metrics.render().decode()
    own = 'kvferry_router_lost_caches_total{decode="http://decode0",prefill="http://prefill0",reason="digest"} 1.0'
    assert own in shown
    assert 'kvferry_router_lost_caches_total{decode="other",prefill="other",reason="digest"} 4.0' in shown
    assert 'kvferry_router_phase_seconds_count{decode="other",phase="wire",prefill="other"} 4.0' in shown
    # The first four instances of all, of which two write answers.
    assert 'kvferry_router_inter_token_seconds_count{instance="http://decode0"} 3.0' in shown
    assert 'kvferry_router_inter_token_seconds_count{instance="http://decode1"} 1.0' in shown
    assert 'kvferry_router_inter_token_seconds_count{instance="other"} 1.0' in shown
    assert shown.count("kvferry_router_instance_healthy{") == 4
    assert 'kvferry_router_instance_healthy{instance="other"' not in shown


def test_who_comes_when_another_has_left_has_metrics_of_its_own():
    metrics = Metrics(max_labels=1)
    pool = InstancePool((D0,), metrics)
    pool.add(D1, Origin.FILE)
    pool.probed(D1, ProbeResult.READY, "")
    assert D1.url not in metrics.render().decode()
    pool.show()
    metrics.instance_error(D0, "status_500")
    assert metrics.render().decode().count(D0.url) > 5
    pool.remove(D0, Origin.COMMAND_LINE)
    pool.show()
    shown = metrics.render().decode()
    assert D0.url not in shown
    assert f'kvferry_router_in_flight_requests{{instance="{D1.url}",role="decode"}} 0.0' in shown
    assert f'kvferry_router_instance_ready{{instance="{D1.url}",role="decode"}} 1.0' in shown


def test_what_is_heard_of_an_instance_that_has_left_takes_nobodys_place():
    metrics = Metrics(max_labels=4)
    pool = InstancePool((P0, D0), metrics)
    pool.remove(D0, Origin.COMMAND_LINE)
    for observe in (metrics.observer_of_gaps(D0.url), lambda _: metrics.observe_phases({"wire": 0.1}, P0.url, D0.url)):
        observe(0.1)
    pool.lost((P0, D0), "digest", None)
    shown = metrics.render().decode()
    assert D0.url not in shown
    assert 'kvferry_router_inter_token_seconds_count{instance="other"} 1.0' in shown
    for number in range(3):
        pool.add(Instance(f"http://new{number}", Role.DECODE), Origin.FILE)
    assert metrics.render().decode().count("kvferry_router_instance_healthy{") == 4
    # And there is room for a pair.
    metrics.observe_phases({"wire": 0.1}, P0.url, "http://new0")
    assert 'decode="http://new0",phase="wire"' in metrics.render().decode()


def test_what_an_instance_that_has_left_was_given_is_nobodys():
    pool = InstancePool((D0,), Metrics())
    pool.probed(D0, ProbeResult.READY, "")
    reservation = pool.reserve(InstanceRequest(Role.DECODE))
    pool.remember(reservation, (1, 2))
    assert pool.prefixes.num_known(D0, (1, 2)) == 2
    pool.remove(D0, Origin.COMMAND_LINE)
    pool.remember(reservation, (1, 2))
    assert list(pool.prefixes.holders((1, 2))) == []
    # Who comes at its address has not been given it either.
    pool.add(D0, Origin.FILE)
    pool.remember(reservation, (1, 2))
    assert pool.prefixes.num_known(D0, (1, 2)) == 0


def test_one_role_of_two_at_an_address_leaves_and_the_other_is_still_shown():
    metrics = Metrics()
    both = [Instance("http://a", role) for role in Role]
    pool = InstancePool(both, metrics)
    metrics.observe_phases({"wire": 0.1}, "http://a", "http://a")
    pool.remove(both[0], Origin.COMMAND_LINE)
    shown = metrics.render().decode()
    assert 'kvferry_router_instance_healthy{instance="http://a",role="decode"}' in shown
    assert 'kvferry_router_instance_healthy{instance="http://a",role="prefill"}' not in shown
    assert 'phase="wire"' in shown
    pool.remove(both[1], Origin.COMMAND_LINE)
    assert "http://a" not in metrics.render().decode()


async def test_an_operator_says_how_many_instances_metrics_name():
    found = []
    for limit in (8, 0):
        async with cluster([prefill_engine("p0")], [decode_engine()], max_metric_labels=limit) as c:
            await c.complete()
            found.append(c.decode[0].url in await c.metrics())
    assert found == [True, False]


def test_the_option_of_the_command_says_so_too():
    record = record_of(RouteOptions, context_of(("--decode", D0.url, "--max-metric-labels", "3"), route))
    assert config_of(record).max_metric_labels == 3


def test_tokens_in_flight_fall_as_they_are_written():
    pool, _ = pool_of(D0)
    task = RequestCost(prompt_tokens=80, new_tokens=10)
    running = pool.reserve(InstanceRequest(Role.DECODE, task))
    (member,) = pool.states
    assert member.outstanding_tokens == 20
    running.progress(5)
    assert member.outstanding_tokens == 15
    running.progress(100)
    assert member.outstanding_tokens == 0
    running.release()
    running.release()
    assert (member.outstanding_tokens, member.num_outstanding) == (0, 0)


def test_a_members_file_is_followed_and_nonsense_is_not(tmp_path):
    pool, _ = pool_of(D0)
    path = tmp_path / "fleet.json"
    file = MembersFile(str(path), pool, 1.0)
    with pytest.raises(ConfigurationError, match="members file"):
        file.look()
    path.write_text('{"prefill": ["http://p0/"], "decode": ["http://d1"]}')
    file.look()
    assert set(pool.instances) == {D0, P0, D1}
    path.write_text('{"prefill": ["http://p1"], "decode": ["http://d0", "http://d1"]}')
    file.look()
    assert set(pool.instances) == {D0, P1, D1}
    # The last two take everything out at once, as a template does that has found nothing.
    for nonsense in ("{", '{"prefil": []}', '{"decode": ["no url"]}', '{"prefill": [], "decode": []}', "{}"):
        path.write_text(nonsense)
        with pytest.raises(ConfigurationError):
            file.look()
        file.look()
        assert set(pool.instances) == {D0, P1, D1}


def test_a_members_file_that_could_not_be_read_once_is_read_again(tmp_path, monkeypatch):
    pool, _ = pool_of()
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps({"decode": [D0.url]}))
    file = MembersFile(str(path), pool, 1.0)

    def refused(_self):
        raise OSError(errno.EMFILE, "too many")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refused)
        with pytest.raises(ConfigurationError, match="members file"):
            file.look()
    file.look()
    assert pool.instances == (D0,)


def test_an_instance_of_a_members_file_stays_when_it_had_registered_as_well_and_leaves(tmp_path):
    path = tmp_path / "members.json"
    path.write_text(json.dumps({"decode": [D0.url]}))
    pool = InstancePool((), Metrics(), PolicySettings(clock=Clock()))
    pool.add(D0, Origin.REGISTERED, 15.0)
    file = MembersFile(str(path), pool, 1.0)
    file.follow()
    pool.remove(D0, Origin.REGISTERED)
    file.follow()
    assert pool.instances == (D0,)


def test_a_members_file_that_is_gone_is_logged_each_time_that_it_goes(tmp_path, caplog):
    path = tmp_path / "fleet.json"
    file = MembersFile(str(path), pool_of()[0], 1.0)
    for _ in range(2):
        path.write_text("{}")
        file.follow()
        path.unlink()
        file.follow()
        file.follow()
    assert [record.getMessage()[:26] for record in caplog.records] == ["the members file is not ap"] * 2


def test_an_announcement_is_believed_from_who_knows_the_key_and_in_time():
    body = b'{"url": "http://e:1", "role": "decode"}'
    signature = sign(KEY, body, 1000.4)
    assert reason_to_refuse([KEY], body, signature, 1050.0) == ""
    assert reason_to_refuse([KEY], body, signature, 1061.0) == "clock"
    assert reason_to_refuse([KEY], body, signature, 939.0) == "clock"
    assert reason_to_refuse([KEY], body + b" ", signature, 1000.0) == "signature"
    assert reason_to_refuse([b"x" * 32], body, signature, 1000.0) == "signature"
    assert reason_to_refuse([b"x" * 32, KEY], body, signature, 1000.0) == ""
    assert reason_to_refuse([KEY], body, "", 1000.0) == "unsigned"
    for made_up in ("1000", "x.y", ".", "1000." + "0" * 64, "\N{SUPERSCRIPT TWO}.0", "1000.\N{SNOWMAN}"):
        assert reason_to_refuse([KEY], body, made_up, 1000.0) == "signature"


@pytest.mark.parametrize("body", [b"", b"[]", b'{"url": 3}', b'{"url": "x", "role": "chief"}', b'{"a": 1}', b"\xff"])
def test_what_is_no_announcement_is_refused(body):
    with pytest.raises(RequestError, match="invalid registration"):
        decode_announcement(body)


@pytest.mark.parametrize("url", ["http://[", "http://127.0.0.1:x", "ftp://127.0.0.1", "nowhere"])
async def test_an_engine_that_registers_at_no_url_is_refused(url):
    async with cluster([], [decode_engine()], registration=Registration(True, ())) as c:
        async with c.session.post(c.url + "/kvferry/members", json={"url": url, "role": "decode"}) as response:
            error = (await response.json())["error"]
        assert (response.status, "invalid URL" in error["message"]) == (400, True)


@pytest.mark.parametrize("key", [b"", KEY], ids=["this host", "token"])
async def test_an_engine_registers_serves_and_leaves_again(key):
    engine, prefill = decode_engine(), prefill_engine()
    await engine.start()
    async with cluster([prefill], [], registration=Registration(True, (key,) if key else ())) as c:
        assert (await c.complete()).status == 503
        registrar = Registrar(RegistrarConfig((c.url,), engine.url, (Side.DECODE,), key))
        running = asyncio.create_task(registrar.run())
        await c.until_health_changes()
        assert (await c.complete()).headers["x-kvferry-path"] == "disaggregated"
        registrar.leave()
        await running
        assert (await c.complete()).status == 503
        assert [member["role"] for member in (await c.members())["members"]] == ["prefill"]
    await engine.stop()


async def test_whoever_does_not_know_the_token_is_not_let_in():
    async with cluster([], [decode_engine()], registration=Registration(True, (KEY,))) as c:
        body = json.dumps({"url": "http://127.0.0.1:1", "role": "prefill"}).encode()
        for headers in ({}, {SIGNATURE: sign(b"x" * 32, body, time.time())}):
            async with c.session.post(c.url + MEMBERS_PATH, data=body, headers=headers) as response:
                assert response.status == 403
        nonsense = sign(KEY, b"{", time.time())
        async with c.session.post(c.url + MEMBERS_PATH, data=b"{", headers={SIGNATURE: nonsense}) as response:
            assert response.status == 400
        assert len((await c.members())["members"]) == 1
        assert await c.metric('kvferry_router_refused_registrations_total{reason="signature"}') == 1


@pytest.mark.parametrize(
    ("registration", "url", "status"),
    [(Registration(), "http://127.0.0.1:1", 404), (Registration(True), "http://10.0.0.1:1", 403)],
    ids=["closed", "another host"],
)
async def test_registrations_are_for_those_who_opened_them_and_without_a_token_for_this_host(registration, url, status):
    body = {"url": url, "role": "prefill"}
    async with (
        cluster([], [decode_engine()], registration=registration) as c,
        c.session.post(c.url + MEMBERS_PATH, json=body) as response,
    ):
        assert response.status == status


async def test_no_web_page_registers_an_engine():
    body = json.dumps({"url": "http://127.0.0.1:1", "role": "decode"})
    headers = {"content-type": "text/plain", "origin": "https://pages.example"}
    async with cluster([], [decode_engine()], registration=Registration(True)) as c:
        async with c.session.post(c.url + MEMBERS_PATH, data=body, headers=headers) as response:
            assert response.status == 403
        async with c.session.post(c.url + MEMBERS_PATH, data=body) as response:
            assert response.status == 200


async def test_an_engine_without_a_router_goes_on():
    registrar = Registrar(RegistrarConfig(("http://127.0.0.1:1",), "http://e", (Side.PREFILL,), b""))
    running = asyncio.create_task(registrar.run())
    registrar.leave()
    await running
    await Registrar(RegistrarConfig((), "http://e", (Side.PREFILL,), b"")).run()


@pytest.mark.parametrize(
    ("url", "router", "is_told"),
    [
        ("http://127.0.0.1:8100", "http://10.0.0.9:8000", True),
        ("http://localhost:8100", "http://router:8000", True),
        ("http://0.0.0.0:8100", "http://10.0.0.9:8000", True),
        ("http://0.0.0.0:8100", "http://127.0.0.1:8000", False),
        ("http://[::1]:8100", "http://localhost:8000", False),
        ("http://10.0.0.5:8100", "http://10.0.0.9:8000", False),
        ("http://engine:8100", "http://router:8000", False),
        ("http://127.0.0.1:8100", "http://[10.0.0.9:8000", True),
    ],
)
async def test_an_address_that_means_nothing_elsewhere_is_warned_about(url, router, is_told, caplog):
    registrar = Registrar(RegistrarConfig((router,), url, (), b""))
    registrar.leave()
    await registrar.run()
    assert any("--advertise-url" in record.message for record in caplog.records) == is_told


def losing(reason: str):
    async def behave(request, seen):
        body = json.loads(seen.raw)
        lost = "kv_transfer_params" in body and body["kv_transfer_params"]["remote_engine_id"] == "p0"
        headers = {"x-kvferry-cache": "recomputed", "x-kvferry-cache-reason": reason} if lost else {}
        return aiohttp.web.json_response(answer("one"), headers=headers)

    return behave


async def test_the_pair_whose_caches_do_not_arrive_is_taken_out_by_traffic():
    prefill = [prefill_engine("p0"), prefill_engine("p1")]
    async with cluster(prefill, [decode_engine("d0", losing("transport"))]) as c:
        for _ in range(12):
            assert (await c.complete()).status == 200
        assert len(prefill[0].seen) == PAIR_BREAKER.num_failures
        (pair,) = (await c.members())["broken_pairs"]
        assert (pair["prefill"], pair["breaker"]) == (prefill[0].url, "open")
        async with c.session.get(c.url + "/ready") as response:
            assert (await response.json())["num_usable_pairs"] == 1
        assert 'reason="transport"' in await c.metrics()


async def counts_lost(c, reason):
    """Every prompt was computed twice: the counters say so, though no pair is to blame."""
    named = f'prefill="{c.prefill[0].url}",reason="{reason}"'
    for labels in (f'failures_total{{reason="{reason}"', f'lost_caches_total{{decode="{c.decode[0].url}",{named}'):
        (line,) = [line for line in (await c.metrics()).splitlines() if labels in line]
        assert line.endswith(f"}} {PAIR_BREAKER.num_failures + 1:.1f}"), line


@pytest.mark.parametrize("is_told_by", ["header", "error"])
async def test_prompts_that_are_read_differently_take_out_no_pair(is_told_by):
    async def refusing(request, seen):
        if "kv_transfer_params" not in json.loads(seen.raw):
            return aiohttp.web.json_response(answer("one"))
        return aiohttp.web.json_response({"error": {"message": "x", "code": "wrong_prompt"}}, status=502)

    behave = losing("wrong_prompt") if is_told_by == "header" else refusing
    async with cluster([prefill_engine("p0")], [decode_engine("d0", behave)]) as c:
        for _ in range(PAIR_BREAKER.num_failures + 1):
            assert (await c.complete()).status == 200
        assert len(c.prefill[0].seen) == PAIR_BREAKER.num_failures + 1
        assert (await c.members())["broken_pairs"] == []
        await counts_lost(c, "wrong_prompt")


@pytest.mark.parametrize("reason", ["unnamed_prompt", "prompt_logprobs"])
async def test_prompts_that_a_decode_engine_computes_on_purpose_take_out_no_pair(reason):
    async with cluster([prefill_engine("p0")], [decode_engine("d0", losing(reason))]) as c:
        for _ in range(PAIR_BREAKER.num_failures + 1):
            assert (await c.complete()).status == 200
        assert len(c.prefill[0].seen) == PAIR_BREAKER.num_failures + 1
        assert (await c.members())["broken_pairs"] == []
        await counts_lost(c, reason)


async def test_too_much_to_do_is_429_with_a_time_to_come_back():
    limits = Limits(max_requests=1)
    release = asyncio.Event()

    async def slow(request, seen):
        await release.wait()
        return await decoding(request, seen)

    engine = decode_engine("d0", slow)
    async with cluster([], [engine], policy_settings=PolicySettings(limits=limits)) as c:
        first = asyncio.create_task(c.complete())
        await engine.arrived.wait()
        second = await c.complete()
        assert (second.status, second.headers["retry-after"]) == (429, "1")
        assert second.error["code"] == "overloaded"
        release.set()
        assert (await first).status == 200


async def test_a_short_prompt_is_left_to_decode_and_the_answer_says_so():
    limits = Limits(skip_below_tokens=4)
    async with cluster([prefill_engine()], [decode_engine()], policy_settings=PolicySettings(limits=limits)) as c:
        short = await c.complete({"prompt": [1, 2, 3]})
        assert short.headers["x-kvferry-path"] == "decode-only"
        assert short.headers["x-kvferry-reason"] == "short_prompt; tokens=3; threshold=4"
        long = await c.complete({"prompt": [1, 2, 3, 4]})
        assert long.headers["x-kvferry-path"] == "disaggregated"
        assert "x-kvferry-reason" not in long.headers
        assert await c.metric("kvferry_router_skip_threshold_tokens") == 4


@pytest.mark.parametrize(
    ("client", "status"),
    [("127.0.0.1", 200), ("::1", 200), ("::ffff:127.0.0.1", 200), ("::ffff:192.0.2.7", 403), ("", 403)],
)
def test_without_a_key_only_this_host_may_register(client, status):
    """A router that listens on `::` sees clients of IPv4 as addresses of IPv6."""
    pool = SimpleNamespace(add=lambda *_: True)
    metrics = Metrics()
    config = RouterConfig((), (), registration=Registration(True))
    registry = Registry(config, pool, metrics)
    body = json.dumps({"url": "http://127.0.0.1:8100", "role": "decode"}).encode()
    assert registry.take(body, {}, client)[0] == status


async def test_the_phases_of_an_engine_reach_the_client_and_the_metrics():
    timing = "queue;dur=1.000, handshake;dur=2.000, wire;dur=0.500"
    behave = streaming(b'data: {"a": 1}\n\n', DONE, **{"server-timing": timing})
    async with cluster([prefill_engine()], [decode_engine("d0", behave)]) as c:
        told = await c.complete({"prompt": "x", "stream": True})
        names = [entry.partition(";")[0] for entry in told.headers["server-timing"].split(", ")]
        assert names == ["queue", "prefill", "decode_queue", "handshake", "wire", "first_decode"]
        labels = f'decode="{c.decode[0].url}",phase="wire",prefill="{c.prefill[0].url}"'
        assert await c.metric(f"kvferry_router_phase_seconds_sum{{{labels}}}") == pytest.approx(0.0005)


async def test_answers_that_are_not_streamed_have_phases_too_and_do_not_spoil_those_of_first_tokens():
    async with cluster([prefill_engine()], [decode_engine()]) as c:
        assert (await c.complete({"prompt": "x"})).status == 200
        pair = f'prefill="{c.prefill[0].url}"'
        for phase, count in (("prefill", 1), ("decode", 1), ("first_decode", 0)):
            labels = f'decode="{c.decode[0].url}",phase="{phase}",{pair}'
            assert await c.metric(f"kvferry_router_phase_seconds_count{{{labels}}}") == count
        assert await c.metric('kvferry_router_time_to_first_token_seconds_count{path="disaggregated"}') == 0


async def test_a_router_without_instances_says_so_until_one_comes():
    app = create_app(RouterConfig((), (), registration=Registration(True)))
    async with serving(app) as url, aiohttp.ClientSession() as session, session.get(url + "/ready") as response:
        assert (response.status, (await response.json())["path"]) == (503, "")
