"""`--prefill-fallback refuse`: a decode instance never computes what a prefill instance should have."""

from __future__ import annotations

import pytest
from aiohttp import web
from router_harness import answer, cluster, decode_engine, failing, prefill_engine, prefilling

from kvferry.router.answers.refusals import PREFILL_UNAVAILABLE
from kvferry.router.config import PolicySettings, PrefillFallback
from kvferry.router.fleet.instance_pool import KIND_BREAKER
from kvferry.router.policy.records import Limits, NoInstance, Role, SkipPrefill, UseInstance

PLAIN = {"prompt": "a"}
REFUSED = 'kvferry_router_refused_total{reason="%s"}'
REFUSE = {"prefill_fallback": PrefillFallback.REFUSE}


async def keeping_nothing(request, seen):
    return web.json_response(answer("x"))


async def losing(request, seen):
    """A decode instance whose prompt has other tokens than that of the prefill instance."""
    return web.json_response({"error": {"message": "x", "type": "t", "code": "wrong_prompt"}}, status=502)


@pytest.mark.parametrize(
    ("prefill", "reason"),
    [
        ([], "no_prefill_instance"),
        ([failing(500, "x")], "prefill_failed"),
        ([failing(500, "x"), failing(503, "x")], "prefill_failed"),
        ([keeping_nothing], "no_kv_transfer_params"),
    ],
)
async def test_what_decode_alone_would_have_served_is_refused(prefill, reason):
    engines = [prefill_engine(f"p{i}", behave) for i, behave in enumerate(prefill)]
    async with cluster(engines, [decode_engine()], **REFUSE) as c:
        reply = await c.complete(PLAIN)
        assert (reply.status, reply.error["code"], reply.error["reason"]) == (503, PREFILL_UNAVAILABLE, reason)
        assert int(reply.headers["retry-after"]) > 0
        assert reply.headers["x-kvferry-reason"] == reason
        assert "x-kvferry-path" not in reply.headers
        assert c.decode[0].seen == []
        assert await c.metric(REFUSED % reason) == 1


async def test_a_kind_that_keeps_failing_is_refused_as_well():
    async with cluster([prefill_engine("p0", failing(500, "x"))], [decode_engine()], **REFUSE) as c:
        reasons = [(await c.complete(PLAIN)).error["reason"] for _ in range(KIND_BREAKER.num_failures + 1)]
        assert reasons == ["prefill_failed"] * KIND_BREAKER.num_failures + ["prefill_keeps_failing"]
        assert c.decode[0].seen == []


async def test_the_refusal_of_prefill_is_the_answer():
    async with cluster([prefill_engine("p0", failing(422, "no"))], [decode_engine()], **REFUSE) as c:
        reply = await c.complete(PLAIN)
        assert (reply.status, reply.error["message"], c.decode[0].seen) == (422, "no", [])


async def test_prompts_that_are_read_differently_are_not_computed_by_decode():
    ds = [decode_engine(f"d{i}", losing) for i in range(2)]
    async with cluster([prefill_engine()], ds, **REFUSE) as c:
        reply = await c.complete(PLAIN)
        assert (reply.status, reply.error["reason"]) == (503, "wrong_prompt")
        assert all("kv_transfer_params" in seen.body for d in ds for seen in d.seen)


async def test_what_cannot_be_divided_is_still_served():
    async with cluster([prefill_engine()], [decode_engine()], **REFUSE) as c:
        reply = await c.complete(PLAIN | {"n": 2})
        assert (reply.status, reply.headers["x-kvferry-reason"]) == (200, "several_sequences")
        assert (await c.complete(PLAIN)).headers["x-kvferry-path"] == "disaggregated"


async def test_what_the_operator_leaves_to_decode_is_served_by_it():
    policy_settings = PolicySettings(limits=Limits(skip_below_tokens=100))
    async with cluster([prefill_engine()], [decode_engine()], policy_settings=policy_settings, **REFUSE) as c:
        reply = await c.complete(PLAIN)
        assert (reply.status, reply.headers["x-kvferry-path"]) == (200, "decode-only")


async def test_whatever_a_policy_says_of_what_it_skips_the_client_is_answered():
    """A header has one line of few characters."""

    def skipping(query):
        if query.role is Role.DECODE:
            return UseInstance(query.candidates[0].instance)
        return SkipPrefill("short", "na\u00efve \u2014 tokens:\r\n3 \n")

    policy_settings = PolicySettings(skipping)
    async with cluster([prefill_engine()], [decode_engine()], policy_settings=policy_settings) as c:
        reply = await c.complete(PLAIN)
        told = reply.headers["x-kvferry-reason"].encode("utf-8", "surrogateescape")
        assert (reply.status, told) == (200, b"short; na\xefve ? tokens:??3 ?")


async def test_decode_does_not_help_out_prefill_instances_that_are_too_slow():
    def policy(question):
        if question.role is Role.PREFILL:
            return SkipPrefill("ttft")
        return UseInstance(question.candidates[0].instance) if question.candidates else NoInstance()

    async with cluster([prefill_engine()], [decode_engine()], policy_settings=PolicySettings(policy), **REFUSE) as c:
        assert (await c.complete(PLAIN)).error["reason"] == "ttft"


@pytest.mark.parametrize("fallback", PrefillFallback)
async def test_a_router_that_refuses_is_not_ready_without_a_pair(fallback):
    async with (
        cluster([], [decode_engine()], prefill_fallback=fallback) as c,
        c.session.get(c.url + "/ready") as response,
    ):
        assert response.status == (503 if fallback is PrefillFallback.REFUSE else 200)


async def test_a_prefill_instance_that_comes_back_is_used_again():
    p = prefill_engine("p0", failing(500, "x"))
    async with cluster([p], [decode_engine()], **REFUSE) as c:
        assert (await c.complete(PLAIN)).status == 503
        p.behave = prefilling("p0")
        assert (await c.complete(PLAIN)).status == 200
