"""Instances that answer but want no requests: they drain, or their transfers fail."""

from __future__ import annotations

from router_harness import cluster, decode_engine, prefill_engine

from kvferry.router.policy.least_work import choose
from kvferry.router.policy.records import Instance, Load, Role

READY = 'kvferry_router_instance_ready{instance="%s",role="%s"}'


def load(name: str, role: Role, ready: bool, num_outstanding: int = 0) -> Load:
    return Load(Instance(name, role), True, num_outstanding, 0, ready)


def test_the_ready_one_is_chosen_however_busy_it_is():
    busy, idle = load("busy", Role.DECODE, True, 9), load("idle", Role.DECODE, False)
    assert choose([idle, busy]) == busy.instance


def test_a_decode_instance_that_is_not_ready_is_better_than_none_and_a_prefill_instance_is_not():
    assert choose([load("d", Role.DECODE, False)]) == Instance("d", Role.DECODE)
    assert choose([load("p", Role.PREFILL, False)]) is None


async def test_requests_go_where_they_are_wanted():
    prefill = [prefill_engine("p0"), prefill_engine("p1")]
    decode = [decode_engine("d0"), decode_engine("d1")]
    prefill[0].ready_status, decode[0].ready_status = 503, 503
    decode[1].ready_status = 200
    async with cluster(prefill, decode) as c:
        for _ in range(3):
            assert (await c.complete()).headers["x-kvferry-path"] == "disaggregated"
        assert [len(engine.seen) for engine in (*prefill, *decode)] == [0, 3, 0, 3]
        assert await c.metric(READY % (decode[0].url, "decode")) == 0
        async with c.session.get(c.url + "/ready") as response:
            told = await response.json()
        assert response.status == 200
        assert (told["num_healthy_decode"], told["num_ready_decode"]) == (2, 1)
        assert (told["num_healthy_prefill"], told["num_ready_prefill"]) == (2, 1)


async def test_where_nobody_is_ready_decode_serves_alone():
    prefill, decode = prefill_engine("p0"), decode_engine("d0")
    prefill.ready_status, decode.ready_status = 503, 503
    async with cluster([prefill], [decode]) as c:
        response = await c.complete()
        assert (response.status, response.headers["x-kvferry-path"]) == (200, "decode-only")
        assert not prefill.seen


async def test_an_instance_is_found_ready_again():
    decode = [decode_engine("d0"), decode_engine("d1")]
    decode[0].ready_status = 503
    async with cluster([prefill_engine()], decode, probe_interval_s=0.05) as c:
        await c.complete()
        decode[0].ready_status = 200
        await c.until_health_changes()
        for _ in range(2):
            await c.complete()
        assert len(decode[0].seen) >= 1


async def test_a_draining_router_says_so_and_goes_on():
    async with cluster([prefill_engine()], [decode_engine()]) as c:
        c.app.state.pool.drain()
        async with c.session.get(c.url + "/ready") as response:
            assert "draining" in (await response.json())["status"]
        assert response.status == 503
        assert (await c.complete()).status == 200
