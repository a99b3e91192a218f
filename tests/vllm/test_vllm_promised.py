"""Early prefills in the scheduler's half, on vLLM's requests and steps: what is promised, told, kept or taken back."""

import importlib
import warnings
from dataclasses import replace

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

import torch
from test_vllm_scheduler import RANKS, declined, end, full, request, sliding, state
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import RequestStatus

from kvferry.connectors.early_lease import Promise, new_promise, sealed, unsealed
from kvferry.connectors.vllm.description.groups import may_grow
from kvferry.connectors.vllm.metadata import EndOrder, GrowthOrder, PromiseOrder
from kvferry.connectors.vllm.scheduler.prompts import Prompts
from kvferry.connectors.vllm.scheduler.scheduler import Scheduler
from kvferry.plan.description.prompt import Prompt

KEY, PROMPT, NUM_BLOCKS = "k" * 64, 40, 64
PROMISE = Promise("early-1", "lease-1")
ID = "cmpl-here"
BLOCKS = ([3, 4, 5],)


def config(*specs):
    groups = [KVCacheGroupSpec([f"model.layers.{i}.attn"], spec) for i, spec in enumerate(specs or (full(),))]
    return KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def scheduler(*specs, key=KEY):
    made = Scheduler("ours", config(*specs), Prompts())
    made.set_ranks(tuple(replace(rank, key=key) for rank in RANKS))
    return made


def early(promise=PROMISE, request_id=ID, key=KEY, prompt_logprobs=None, **more):
    params = {"do_remote_decode": True, "kvferry": sealed(promise, key), **more}
    return request(params, request_id, PROMPT, prompt_logprobs)


def step(computes=(), preempted=(), blocks=BLOCKS, is_first=False):
    """A step that computes tokens of requests: for each its id, how many are there before, and how many it computes."""
    new, cached = [], CachedRequestData.make_empty()
    for request_id, first, _ in computes:
        if is_first:
            new.append(NewRequestData(request_id, None, [], None, None, blocks, first, None))
        else:
            cached.req_ids.append(request_id)
            cached.num_computed_tokens.append(first)
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs, output.scheduled_cached_reqs = new, cached
    output.num_scheduled_tokens = {request_id: num for request_id, _, num in computes}
    output.preempted_req_ids = set(preempted)
    names = set(output.num_scheduled_tokens)
    # vLLM 0.29 lists what later ones look up.
    is_asked = hasattr(KVConnectorBlockState, "get_block_ids")
    told = (names, lambda _: blocks, {}) if is_asked else (dict.fromkeys(names, blocks), {})
    output.kv_connector_block_state = KVConnectorBlockState(*told)
    return output


def orders(made, output=None):
    if output is not None:
        made.scheduled(output)
    return made.take_orders(is_idle=False)


def promised(*specs, **more):
    made, asked = scheduler(*specs), early(**more)
    made.on_new_request(asked)
    assert [order.name for order in orders(made).promises] == ["early-1"]
    return made, asked


def test_a_promise_is_made_when_the_request_arrives_and_told_as_it_is_computed():
    made, asked = scheduler(), early()
    made.on_new_request(asked)
    assert orders(made).promises == [PromiseOrder("early-1", "lease-1", PROMPT, Prompt.of(range(PROMPT)))]
    told = orders(made, step([(ID, 0, 16), ("other", 0, 7)], is_first=True)).growths
    told += orders(made, step([("other", 7, 1)])).growths
    told += orders(made, step([(ID, 16, 16)], blocks=([3, 4],))).growths
    told += orders(made, step([(ID, 32, 8)])).growths
    assert told == [
        GrowthOrder("early-1", (tables,), num_tokens)
        for num_tokens, tables in ((16, (3, 4, 5)), (32, (3, 4)), (40, (3, 4, 5)))
    ]


def test_that_a_prompt_is_begun_is_told_once():
    made, _ = promised()
    assert orders(made, step([("other", 0, 7)], is_first=True)).begun == []
    assert orders(made, step([(ID, 0, 16)], is_first=True)).begun == ["early-1"]
    assert orders(made, step([(ID, 16, 16)])).begun == []


def test_what_is_cached_counts_and_what_is_generated_does_not():
    made, _ = promised()
    assert [order.num_tokens for order in orders(made, step([(ID, 16, 16)], is_first=True)).growths] == [32]
    assert [order.num_tokens for order in orders(made, step([(ID, 32, 9)])).growths] == [40]
    assert orders(made, step([(ID, 41, 1)])).growths == []


def test_a_promise_that_is_kept_keeps_its_blocks_and_nothing_is_offered_anew():
    made, asked = promised()
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert made.finished(asked, BLOCKS) == (True, None)
    told = orders(made)
    assert told.ended == [EndOrder(ID, "early-1", ((3, 4, 5),), PROMPT, True)]
    assert (told.leases, told.withdrawn) == ([], [])
    assert orders(made, step(preempted=[ID])).withdrawn == []


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_any_other_end_takes_the_promise_back_and_waits_for_the_last_look_at_its_blocks(status):
    made, asked = promised()
    end(asked, status)
    assert made.finished(asked, BLOCKS) == (True, None)
    assert orders(made).ended == [EndOrder(ID, "early-1", ((3, 4, 5),), PROMPT, False)]


def test_an_end_that_came_too_soon_is_none_that_is_kept():
    made, asked = promised()
    end(asked, RequestStatus.FINISHED_STOPPED)
    asked.num_computed_tokens = PROMPT - 1
    made.finished(asked, BLOCKS)
    assert [order.is_kept for order in orders(made).ended] == [False]


@pytest.mark.parametrize(("specs", "is_kept"), [((), True), ((full(), state()), False)], ids=["attention", "state"])
def test_a_state_that_has_gone_on_with_the_answer_is_not_that_of_the_prompt(specs, is_kept):
    made, asked = promised(*specs, prompt_logprobs=1)
    asked.append_output_token_ids([7] * 8)
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    asked.num_computed_tokens = PROMPT + 7
    made.finished(asked, ([3, 4, 5], [6])[: len(specs) or 1])
    assert [(order.num_tokens, order.is_kept) for order in orders(made).ended] == [(PROMPT, is_kept)]
    assert declined(made)[0] == ([] if is_kept else [["source", "past_prompt"]])


def test_a_request_that_ends_in_its_queue_has_no_blocks_to_wait_for():
    made, asked = promised()
    end(asked, RequestStatus.FINISHED_ABORTED)
    assert made.finished(asked, ([],)) == (False, None)
    told = orders(made)
    assert (told.withdrawn, told.ended) == (["early-1"], [])


def test_a_preempted_request_has_nothing_promised_any_more_and_offers_nothing():
    """Not even where it is resumed in the same step. Nobody would hear of what it offered at its end."""
    made, asked = promised()
    orders(made, step([(ID, 0, 16)], is_first=True))
    told = orders(made, step([(ID, 0, 16)], preempted=[ID, "other"]))
    assert (told.withdrawn, told.growths) == (["early-1"], [])
    told = orders(made, step([(ID, 16, 24)], preempted=[ID]))
    assert (told.withdrawn, told.growths) == ([], [])
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert made.finished(asked, BLOCKS) == (False, None)
    told = orders(made)
    assert (told.ended, told.leases, told.withdrawn) == ([], [], [])
    # The id is another request's then.
    plain = request({"do_remote_decode": True}, ID, PROMPT)
    made.on_new_request(plain)
    end(plain, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert made.finished(plain, BLOCKS)[0]
    assert len(orders(made).leases) == 1


NOT_PROMISED = {
    "by the client": {"kvferry": {"early": True}},
    "named by the client": {"kvferry": {"early": True, "name": "early-1", "lease_id": "lease-1"}},
    "sealed by the client": {"kvferry": {**sealed(PROMISE, "guess")}},
    "sealed for another lease": {"kvferry": {**sealed(PROMISE, KEY), "lease_id": "lease-2"}},
    "sealed with half a character": {"kvferry": {**sealed(PROMISE, KEY), "seal": "\ud800"}},
    "of another type": {"kvferry": ["early"]},
}


@pytest.mark.parametrize("name", NOT_PROMISED)
def test_only_our_front_end_can_promise_anything(name):
    made, asked = scheduler(), request({"do_remote_decode": True, **NOT_PROMISED[name]}, ID, PROMPT)
    made.on_new_request(asked)
    assert orders(made, step([(ID, 0, 16)], is_first=True)).promises == []
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    stays, params = made.finished(asked, BLOCKS)
    (lease,) = orders(made).leases
    assert (stays, params["kvferry"]["lease_id"]) == (True, lease.lease_id)
    assert lease.lease_id != "lease-1"


@pytest.mark.parametrize("key", ["", KEY])
def test_without_a_key_nothing_is_promised(key):
    made, asked = scheduler(key=key), early(key=key)
    made.on_new_request(asked)
    assert len(orders(made).promises) == len(key) // 64


def test_one_promise_is_one_requests():
    """vLLM makes several requests of one where a client asks for several answers."""
    made, _ = promised()
    made.on_new_request(early(request_id="cmpl-here-1"))
    assert orders(made).promises == []
    made.on_new_request(early(new_promise(), "cmpl-there"))
    assert len(orders(made).promises) == 1


def test_a_promise_that_was_kept_is_not_made_again():
    """Its lease and its name are those of the first request, however late the second one comes."""
    made, asked = promised()
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert made.finished(asked, BLOCKS) == (True, None)
    made.on_new_request(early(request_id="cmpl-here-1"))
    assert orders(made).promises == []


def test_what_is_fetched_or_continued_is_not_promised():
    made = scheduler()
    made.on_new_request(early(do_remote_prefill=True))
    resumable = early(request_id="session")
    resumable.resumable = True
    made.on_new_request(resumable)
    assert orders(made).promises == []


def mamba():
    return MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("specs", "grows"),
    [
        ((full(),), True),
        ((UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full(), "b": full()}),), True),
        ((UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": sliding(), "b": sliding()}),), False),
        (
            (
                UniformTypeKVCacheSpecs(
                    block_size=16, kv_cache_specs={"a": full(), "b": replace(full(), dtype=torch.bfloat16)}
                ),
            ),
            False,
        ),
        ((sliding(),), False),
        ((full(), sliding()), False),
        ((mamba(),), False),
        ((full(), mamba()), False),
    ],
    ids=["full", "alike", "windows alike", "mixed precision", "window", "hybrid", "state", "hybrid state"],
)
def test_what_is_written_over_later_is_told_at_the_end_only(specs, grows):
    assert may_grow(config(*specs)) == grows
    made, asked = promised(*specs)
    blocks = tuple([3, 4, 5] for _ in specs)
    assert len(orders(made, step([(ID, 0, 16)], blocks=blocks, is_first=True)).growths) == grows
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert made.finished(asked, blocks) == (True, None)
    assert [order.num_tokens for order in orders(made).ended] == [asked.num_prompt_tokens]


def test_a_seal_is_good_for_what_it_was_made_for():
    params = {"kvferry": sealed(PROMISE, KEY)}
    assert unsealed(params, KEY) == PROMISE
    assert unsealed(params, "") is None
    assert unsealed({}, KEY) is None
    assert new_promise() != new_promise()


def test_who_has_the_reference_of_a_prompt_without_a_name_is_told_so():
    """vLLM takes ids that no other engine could name. The reference has left before anybody could know."""
    made, asked = scheduler(), early()
    asked._all_token_ids[1] = -1
    made.on_new_request(asked)
    (promise,) = orders(made).promises
    assert (promise.name, promise.is_unnamed) == ("early-1", True)
    assert made.take_stats().data["declined"] == [["source", "unnamed_prompt"]]
    assert orders(made, step([(ID, 0, 16)], is_first=True)).begun == ["early-1"]
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert made.finished(asked, BLOCKS) == (True, None)
    assert [order.is_kept for order in orders(made).ended] == [True]


class Reading(Prompts):
    """While the files of an adapter are read."""

    is_read = False

    def is_ready(self, request):
        return self.is_read


def reading():
    prompts = Reading()
    made, asked = Scheduler("ours", config(), prompts), early()
    made.set_ranks(tuple(replace(rank, key=KEY) for rank in RANKS))
    made.on_new_request(asked)
    told = orders(made, step([(ID, 0, 16)], is_first=True))
    assert (told.promises, told.begun, told.growths) == ([], [], [])
    return prompts, made, asked


def test_while_an_adapter_is_read_nothing_is_promised_and_nobody_waits():
    prompts, made, _ = reading()
    prompts.is_read = True
    told = orders(made, step([(ID, 16, 16)]))
    assert ([order.name for order in told.promises], told.begun) == (["early-1"], ["early-1"])
    assert [order.num_tokens for order in told.growths] == [32]
    assert orders(made, step([(ID, 32, 8)])).promises == []


def test_what_ends_before_its_adapter_is_read_is_promised_and_kept_at_once():
    _, made, asked = reading()
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert made.finished(asked, BLOCKS) == (True, None)
    told = orders(made)
    assert [order.name for order in told.promises] == ["early-1"]
    assert told.ended == [EndOrder(ID, "early-1", ((3, 4, 5),), PROMPT, True)]
    assert told.leases == []


def test_what_is_given_up_before_its_adapter_is_read_is_not_waited_for():
    _, made, asked = reading()
    end(asked, RequestStatus.FINISHED_ABORTED)
    assert made.finished(asked, BLOCKS) == (False, None)
    told = orders(made, step([("other", 0, 7)], is_first=True))
    assert (told.promises, told.ended, told.withdrawn) == ([], [], [])


class Replaced(Prompts):
    """The adapter of a request, once it has been promised, becomes another one."""

    is_replaced = False

    def is_certain(self, request):
        return not self.is_replaced


def replaced():
    prompts = Replaced()
    made, asked = Scheduler("ours", config(), prompts), early()
    made.set_ranks(tuple(replace(rank, key=KEY) for rank in RANKS))
    made.on_new_request(asked)
    assert len(orders(made, step([(ID, 0, 16)], is_first=True)).growths) == 1
    prompts.is_replaced = True
    return made, asked


def test_a_prompt_whose_adapter_is_replaced_while_it_is_computed_is_taken_back():
    made, asked = replaced()
    told = orders(made, step([(ID, 16, 16)]))
    assert (told.withdrawn, told.growths) == (["early-1"], [])
    assert made.take_stats().data["declined"] == [["source", "unnamed_prompt"]]
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert made.finished(asked, BLOCKS) == (False, None)


def test_a_prompt_whose_adapter_is_replaced_in_its_last_step_is_not_kept():
    made, asked = replaced()
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert made.finished(asked, BLOCKS) == (True, None)
    assert [order.is_kept for order in orders(made).ended] == [False]
