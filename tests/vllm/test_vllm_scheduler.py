"""The scheduler's half on vLLM's own requests and cache configurations: no server, no worker."""

import importlib
import warnings
from types import SimpleNamespace

import pytest
from packaging.version import Version

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

import torch
import vllm
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from kvferry.connectors.vllm.features import num_recomputed
from kvferry.connectors.vllm.metadata import MAX_NAME_LENGTH, RankAddress, agent_name
from kvferry.connectors.vllm.scheduler.prompts import Prompts
from kvferry.connectors.vllm.scheduler.scheduler import Scheduler, Terms
from kvferry.plan.description.prompt import Prompt
from kvferry.plan.description.tokens import TokenRange

BLOCK, NUM_BLOCKS, PROMPT = 16, 64, 40
RANKS = (RankAddress("tcp://127.0.0.1:7001", "epoch"), RankAddress("tcp://127.0.0.1:7002", "epoch"))
PULL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill",
    "remote_request_id": "cmpl-there",
    "kvferry": {"epoch": "epoch", "lease_id": "lease", "addresses": ["tcp://127.0.0.1:7001"]},
}
TABLES = ([3, 4, 5],)


def full():
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)


def sliding():
    return SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=32)


def state(num_speculative_blocks=0):
    return MambaSpec(BLOCK, shapes=((3, 8),), dtypes=(torch.float32,), num_speculative_blocks=num_speculative_blocks)


def scheduler(*specs, num_recomputed=1, context_parallel=1, may_fetch=True):
    groups = [KVCacheGroupSpec([f"model.layers.{i}.attn"], spec) for i, spec in enumerate(specs or (full(),))]
    caches = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    terms = Terms(num_recomputed=num_recomputed, context_parallel=context_parallel, may_fetch=may_fetch)
    made = Scheduler("ours", caches, Prompts(), terms)
    made.set_ranks(RANKS)
    return made


def request(params, request_id="cmpl-here", size=PROMPT, prompt_logprobs=None, **more):
    sampling = SamplingParams(max_tokens=8, prompt_logprobs=prompt_logprobs, extra_args={"kv_transfer_params": params})
    return Request(request_id, list(range(size)), sampling, None, **more)


def end(request, status):
    request.status = status
    request.num_computed_tokens = request.num_prompt_tokens


def begun(made, asked):
    """As vLLM does for a request that waits for its cache: asks, allocates, and says so again when it is there."""
    made.on_new_request(asked)
    num_tokens = made.num_new_tokens(asked, 0)
    made.allocated(asked, TABLES, num_tokens)
    return num_tokens


def test_all_but_the_last_token_is_fetched_once():
    made, asked = scheduler(), request(dict(PULL))
    assert begun(made, asked) == PROMPT - 1
    made.allocated(asked, TABLES, 0)
    (fetch,) = made.take_orders(is_idle=False).fetches
    assert (fetch.request_id, fetch.ranges, fetch.is_waited_for) == ("cmpl-here", (TokenRange(0, PROMPT - 1),), True)
    assert made.take_orders(is_idle=False).fetches == []


@pytest.mark.parametrize("params", ["x", ["do_remote_prefill"], 5])
def test_what_are_no_parameters_at_all_are_none(params):
    """A client can put them there as `vllm_xargs`. What a hook raises would end the engine."""
    made, asked = scheduler(), request(params)
    assert begun(made, asked) == 0
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert made.finished(asked, TABLES) == (False, None)
    assert declined(made) == ([["target", "malformed"]], [("cmpl-here", "malformed")])


@pytest.mark.parametrize(("num_read_ahead", "found"), [(0, 1), (1, 1), (2, 1), (3, 2), (5, 4)])
def test_what_a_drafter_of_several_modules_reads_ahead_is_computed_here(num_read_ahead, found):
    # By its source: no model with several modules runs on CPUs.
    assert hasattr(VllmConfig, "num_prefill_lookahead_tokens") == (Version(vllm.__version__) >= Version("0.32"))
    assert num_recomputed(SimpleNamespace(num_prefill_lookahead_tokens=num_read_ahead)) == found
    assert num_recomputed(SimpleNamespace()) == 1


@pytest.mark.parametrize(("size", "num_fetched"), [(PROMPT, PROMPT - 3), (4, 1), (3, 0), (2, 0)])
def test_what_a_drafter_keeps_of_the_last_tokens_is_not_fetched(size, num_fetched):
    made, asked = scheduler(num_recomputed=3), request(dict(PULL), size=size)
    assert begun(made, asked) == num_fetched


@pytest.mark.parametrize(
    ("specs", "size", "num_left"), [((), PROMPT, PROMPT), ((1,), PROMPT, PROMPT - 3), ((1,), 3, 3)]
)
def test_a_prefill_that_forgets_stops_before_what_a_drafter_keeps_of_the_last_tokens(specs, size, num_left):
    made = scheduler(*(sliding() for _ in specs), num_recomputed=3)
    asked = request({"do_remote_decode": True, "do_remote_prefill": False}, size=size)
    made.on_new_request(asked)
    made.on_new_request(asked)
    assert (asked.num_prompt_tokens, len(asked.prompt_token_ids), len(asked._all_token_ids)) == (num_left,) * 3


def test_a_prompt_that_several_requests_share_is_shortened_once_for_each():
    """vLLM's engine in the process that asks it (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) gives the answers to one prompt
    the same list."""
    made, tokens = scheduler(sliding(), num_recomputed=2), list(range(PROMPT))
    sampling = SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    several = [Request(f"{number}_cmpl-here", tokens, sampling, None) for number in range(2)]
    for asked in several:
        made.on_new_request(asked)
    assert [asked.prompt_token_ids for asked in several] == [list(range(PROMPT - 2))] * 2
    assert [list(asked.all_token_ids) for asked in several] == [list(range(PROMPT - 2))] * 2
    assert tokens == list(range(PROMPT))


def test_blocks_may_come_some_steps_after_they_were_asked_for():
    """Since vLLM 0.33: not before the steps that are under way have ended."""
    made, asked, other = scheduler(), request(dict(PULL)), request(dict(PULL, remote_request_id="cmpl-other"), "other")
    made.on_new_request(asked)
    num_tokens = made.num_new_tokens(asked, BLOCK)
    assert made.take_orders(is_idle=False).fetches == []
    begun(made, other)
    assert [fetch.request_id for fetch in made.take_orders(is_idle=False).fetches] == ["other"]
    made.allocated(asked, TABLES, num_tokens)
    (fetch,) = made.take_orders(is_idle=False).fetches
    assert (fetch.request_id, fetch.ranges) == ("cmpl-here", (TokenRange(BLOCK, PROMPT - 1),))


def test_a_request_that_ends_before_its_blocks_come_is_released():
    made, asked = scheduler(), request(dict(PULL))
    made.on_new_request(asked)
    made.num_new_tokens(asked, 0)
    end(asked, RequestStatus.FINISHED_ABORTED)
    assert made.finished(asked, TABLES) == (False, None)
    orders = made.take_orders(is_idle=False)
    assert [fetch.is_waited_for for fetch in orders.fetches] == [False]
    assert orders.aborted == []
    assert made._computed == {}


def test_what_other_connectors_say_of_an_engine_is_passed_over():
    made, asked = scheduler(), request(dict(PULL, remote_registration_generation=2))
    assert begun(made, asked) == PROMPT - 1


def several(made, number, params=PULL):
    """As many requests as answers are wanted, which all have arrived."""
    asked = [request(dict(params), f"{i}_cmpl-here") for i in range(number)]
    for each in asked:
        made.on_new_request(each)
    return asked


def test_of_several_answers_to_one_prompt_one_fetches_and_the_others_find_its_blocks():
    made = scheduler()
    first, second, third = several(made, 3)
    made.allocated(first, TABLES, made.num_new_tokens(first, 0))
    assert [made.num_new_tokens(each, 0) for each in (second, third)] == [None, None]
    # Its blocks are filled: vLLM's prefix cache has the full ones.
    made.allocated(first, TABLES, 0)
    for each in (second, third):
        assert made.num_new_tokens(each, 32) == 0
        made.allocated(each, TABLES, 0)
        end(each, RequestStatus.FINISHED_LENGTH_CAPPED)
        assert made.finished(each, TABLES) == (False, None)
    assert [fetch.request_id for fetch in made.take_orders(is_idle=False).fetches] == ["0_cmpl-here"]
    assert made.take_stats().is_empty()


def test_what_the_prefix_cache_has_not_is_computed_and_counted():
    made = scheduler()
    first, second = several(made, 2)
    made.allocated(first, TABLES, made.num_new_tokens(first, 0))
    made.allocated(first, TABLES, 0)
    assert made.num_new_tokens(second, 0) == 0
    made.allocated(second, TABLES, 0)
    assert [fetch.is_waited_for for fetch in made.take_orders(is_idle=False).fetches] == [True]
    assert not made.take_stats().is_empty()
    end(second, RequestStatus.FINISHED_LENGTH_CAPPED)
    made.finished(second, TABLES)
    assert made._readers._missing == {}


def test_where_the_one_that_fetches_fails_another_one_tries():
    made = scheduler()
    first, second = several(made, 2)
    made.allocated(first, TABLES, made.num_new_tokens(first, 0))
    assert made.num_new_tokens(second, 0) is None
    end(first, RequestStatus.FINISHED_ERROR)
    made.finished(first, TABLES)
    assert made.num_new_tokens(second, 0) == PROMPT - 1
    made.allocated(second, TABLES, PROMPT - 1)
    orders = made.take_orders(is_idle=False)
    assert [fetch.request_id for fetch in orders.fetches] == ["0_cmpl-here", "1_cmpl-here"]
    assert orders.aborted == ["0_cmpl-here"]


def test_a_source_is_told_that_nobody_reads_when_the_last_one_does_not():
    made = scheduler()
    first, second, third = several(made, 3)
    for each in (first, second):
        assert made.num_new_tokens(each, PROMPT - 1) == 0
        made.allocated(each, TABLES, 0)
    assert made.take_orders(is_idle=False).fetches == []
    end(third, RequestStatus.FINISHED_ABORTED)
    made.finished(third, ([],))
    (release,) = made.take_orders(is_idle=False).fetches
    assert not release.is_waited_for


def test_one_that_leaves_does_not_take_the_cache_from_the_one_that_fetches():
    made = scheduler()
    first, second = several(made, 2)
    made.allocated(first, TABLES, made.num_new_tokens(first, 0))
    end(second, RequestStatus.FINISHED_ABORTED)
    made.finished(second, ([],))
    assert [fetch.is_waited_for for fetch in made.take_orders(is_idle=False).fetches] == [True]


def test_other_prompts_with_one_reference_each_try_by_themselves():
    made = scheduler()
    first, other = request(dict(PULL), "0_cmpl-here"), request(dict(PULL), "1_cmpl-here", PROMPT + 3)
    for each in (first, other):
        made.on_new_request(each)
    made.allocated(first, TABLES, made.num_new_tokens(first, 0))
    assert made.num_new_tokens(other, 0) == PROMPT + 2
    made.allocated(other, TABLES, PROMPT + 2)
    # Whoever has the prompt of the first one still waits for that one.
    sibling = request(dict(PULL), "2_cmpl-here")
    made.on_new_request(sibling)
    assert made.num_new_tokens(sibling, 0) is None
    made.allocated(other, TABLES, 0)
    assert made.num_new_tokens(sibling, 0) is None


def test_the_blocks_of_a_prompt_are_found_after_another_one_tried_with_the_same_reference():
    made = scheduler()
    own, others = (
        [request(dict(PULL), f"{at}_own") for at in range(2)],
        [request(dict(PULL), f"{at}_other", PROMPT + 3) for at in range(2)],
    )
    for each in (*own, *others):
        made.on_new_request(each)
    made.allocated(own[0], TABLES, made.num_new_tokens(own[0], 0))
    made.allocated(own[0], TABLES, 0)
    made.allocated(others[0], TABLES, made.num_new_tokens(others[0], 0))
    assert made.num_new_tokens(own[1], 0) == 0
    assert made.num_new_tokens(others[1], 0) is None


def test_nothing_is_kept_of_requests_that_have_ended():
    made = scheduler()
    for each in several(made, 3):
        made.num_new_tokens(each, 0)
        end(each, RequestStatus.FINISHED_ABORTED)
        made.finished(each, ([],))
    assert (made._readers._of_cache, made._readers._caches, made._readers._missing) == ({}, {}, {})


def test_asking_often_changes_nothing():
    made, asked = scheduler(), request(dict(PULL))
    assert [made.num_new_tokens(asked, 16) for _ in range(3)] == [PROMPT - 1 - 16] * 3
    assert made.take_orders(is_idle=False).fetches == []


def test_fewer_tokens_than_offered_are_the_first_ones():
    made, asked = scheduler(), request(dict(PULL))
    assert made.num_new_tokens(asked, 16) == 23
    made.allocated(asked, TABLES, 16)
    (fetch,) = made.take_orders(is_idle=False).fetches
    assert fetch.ranges == (TokenRange(16, 32),)


@pytest.mark.parametrize("offered", [-1, True, 2.5, "7", None, [1], 2**64 - 1])
def test_a_count_that_makes_no_sense_is_not_believed(offered):
    made, asked = scheduler(), request({**PULL, "remote_num_tokens": offered})
    assert begun(made, asked) == PROMPT - 1


def test_marks_that_a_client_writes_mean_nothing():
    made, asked = scheduler(), request({**PULL, "_kvferry_fetched": True, "_kvferry_truncated": True})
    assert begun(made, asked) == PROMPT - 1
    assert [fetch.is_waited_for for fetch in made.take_orders(is_idle=False).fetches] == [True]


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_request_id", "kvferry"])
def test_params_that_cannot_be_read_fail_the_request_and_nothing_else(key):
    made = scheduler()
    asked = request({name: value for name, value in PULL.items() if name != key})
    begun(made, asked)
    (fetch,) = made.take_orders(is_idle=False).fetches
    assert fetch.is_waited_for
    assert key in fetch.error


def test_a_request_that_ends_in_its_queue_is_released_and_never_reported(caplog):
    made, asked = scheduler(), request(dict(PULL))
    made.on_new_request(asked)
    end(asked, RequestStatus.FINISHED_ABORTED)
    assert made.finished(asked, ([],)) == (False, None)
    orders = made.take_orders(is_idle=False)
    assert [fetch.is_waited_for for fetch in orders.fetches] == [False]
    assert orders.aborted == []
    assert caplog.records == []


def test_a_request_that_is_sent_again_to_be_ended_is_released_under_another_name():
    made, names = scheduler(), []
    for _ in range(2):
        asked = request(dict(PULL))
        made.on_new_request(asked)
        end(asked, RequestStatus.FINISHED_ABORTED)
        made.finished(asked, ([],))
        names += [fetch.request_id for fetch in made.take_orders(is_idle=False).fetches]
    assert len(set(names)) == 2
    assert "cmpl-here" not in names


def test_unreadable_params_of_a_request_that_is_only_ended_are_passed_over(caplog):
    made, asked = scheduler(), request({"do_remote_prefill": True})
    end(asked, RequestStatus.FINISHED_ABORTED)
    assert made.finished(asked, ([],)) == (False, None)
    assert made.take_orders(is_idle=False).fetches == []
    assert caplog.records == []


def test_an_abort_while_the_cache_is_awaited_is_passed_on_once():
    made, asked = scheduler(), request(dict(PULL))
    begun(made, asked)
    end(asked, RequestStatus.FINISHED_ABORTED)
    assert made.finished(asked, TABLES) == (False, None)
    orders = made.take_orders(is_idle=False)
    assert (orders.aborted, len(orders.fetches)) == (["cmpl-here"], 1)


def test_a_preempted_request_is_not_fetched_again():
    made, asked = scheduler(), request(dict(PULL))
    begun(made, asked)
    made.take_orders(is_idle=False)
    assert begun(made, asked) == 0
    assert made.take_orders(is_idle=False).fetches == []


def test_an_id_may_be_used_again():
    made = scheduler()
    for _ in range(2):
        asked = request(dict(PULL))
        assert begun(made, asked) == PROMPT - 1
        end(asked, RequestStatus.FINISHED_STOPPED)
        assert made.finished(asked, TABLES) == (False, None)
        assert [fetch.is_waited_for for fetch in made.take_orders(is_idle=False).fetches] == [True]


def test_a_finished_prefill_is_leased_with_the_addresses_of_all_ranks():
    made, asked = scheduler(), request({"do_remote_decode": True})
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    stays, params = made.finished(asked, TABLES)
    (lease,) = made.take_orders(is_idle=False).leases
    assert stays
    assert params["kvferry"] == {
        "epoch": "epoch",
        "lease_id": lease.lease_id,
        "addresses": [rank.address for rank in RANKS],
    }
    assert (lease.request_id, lease.num_tokens, lease.block_tables) == ("cmpl-here", PROMPT, ((3, 4, 5),))
    assert lease.prompt == Prompt.of(range(PROMPT))


def test_a_fetch_names_the_tokens_that_its_cache_must_be_of():
    made, asked = scheduler(), request(dict(PULL))
    made.allocated(asked, TABLES, made.num_new_tokens(asked, 16))
    (fetch,) = made.take_orders(is_idle=False).fetches
    assert fetch.ranges == (TokenRange(16, PROMPT - 1),)
    assert fetch.prompt == Prompt.of(range(PROMPT - 1)).name("lease")


def test_what_was_answered_is_a_part_of_what_is_kept():
    made, asked = scheduler(), request({"do_remote_decode": True})
    asked.append_output_token_ids([7] * 8)
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    asked.num_computed_tokens = PROMPT + 7
    made.finished(asked, TABLES)
    (lease,) = made.take_orders(is_idle=False).leases
    assert lease.prompt == Prompt.of([*range(PROMPT), *[7] * 7])


@pytest.mark.parametrize(("computed", "under_way"), [(PROMPT + 8, 1), (PROMPT + 11, 4), (PROMPT + 9, 0)])
def test_what_is_not_sure_when_an_answer_ends_is_not_offered(computed, under_way):
    """A step, with guesses or without, that has begun before the last token was known; and guesses beyond the end."""
    made, asked = scheduler(), request({"do_remote_decode": True})
    asked.append_output_token_ids([7] * 8)
    end(asked, RequestStatus.FINISHED_STOPPED)
    asked.num_computed_tokens, asked.num_output_placeholders = computed, under_way
    _, params = made.finished(asked, TABLES)
    (lease,) = made.take_orders(is_idle=False).leases
    assert lease.num_tokens == params["remote_num_tokens"] == lease.prompt.num_tokens
    assert lease.num_tokens == min(PROMPT + 8, computed - under_way)


def test_a_window_that_moves_on_after_the_answer_is_not_offered():
    made, asked = scheduler(sliding()), request({"do_remote_decode": True}, size=1)
    asked.append_output_token_ids([7] * 3)
    end(asked, RequestStatus.FINISHED_STOPPED)
    asked.num_computed_tokens, asked.num_output_placeholders = 4, 1
    assert made.finished(asked, TABLES) == (False, None)
    assert declined(made) == ([["source", "step_under_way"]], [])


@pytest.mark.parametrize(
    ("num_speculative_blocks", "num_answered", "is_offered"), [(0, 8, True), (2, 1, True), (2, 2, False)]
)
def test_beside_a_speculator_a_state_after_the_answer_is_not_offered(num_speculative_blocks, num_answered, is_offered):
    """How many guesses were right decides in which block it lies."""
    made = scheduler(full(), state(num_speculative_blocks))
    asked = request({"do_remote_decode": True}, prompt_logprobs=1)
    made.on_new_request(asked)
    asked.append_output_token_ids([7] * num_answered)
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    asked.num_computed_tokens = PROMPT + num_answered - 1
    assert made.finished(asked, ([3, 4, 5], [6, 7, 8]))[0] is is_offered
    assert declined(made)[0] == ([] if is_offered else [["source", "past_prompt"]])


def test_who_is_set_to_fetch_nothing_fetches_nothing_and_releases_the_source():
    """vLLM does not keep blocks from a fetch there which a step under way still writes to."""
    made, asked = scheduler(may_fetch=False), request(dict(PULL))
    assert begun(made, asked) == 0
    orders = made.take_orders(is_idle=False)
    assert ([fetch.is_waited_for for fetch in orders.fetches], orders.holds) == ([False], [])
    assert declined(made) == ([["target", "not_a_consumer"]], [("cmpl-here", "not_a_consumer")])
    end(asked, RequestStatus.FINISHED_STOPPED)
    assert made.finished(asked, TABLES) == (False, None)
    assert made.take_orders(is_idle=False).fetches == []


def test_a_prompt_that_is_continued_later_keeps_its_last_token():
    made, asked = scheduler(sliding()), request({"do_remote_decode": True}, resumable=True)
    made.on_new_request(asked)
    assert (asked.num_prompt_tokens, asked.max_tokens) == (PROMPT, 8)


def test_a_reset_is_told_once():
    made = scheduler()
    made.reset()
    assert [made.take_orders(is_idle=True).is_reset for _ in range(2)] == [True, False]


def unnamed(params):
    """vLLM takes ids that no other engine could name."""
    asked = request(params)
    asked._all_token_ids[1] = -1
    return asked


def declined(made):
    data = made.take_stats().data
    return data["declined"], [(request_id, reason) for request_id, reason, *_ in data["fetches"]]


def test_a_prompt_without_a_name_is_computed_here_and_its_source_released():
    made, asked = scheduler(), unnamed(dict(PULL))
    assert [begun(made, asked), made.num_new_tokens(asked, 0)] == [0, 0]
    assert [fetch.is_waited_for for fetch in made.take_orders(is_idle=False).fetches] == [False]
    assert declined(made) == ([["target", "unnamed_prompt"]], [("cmpl-here", "unnamed_prompt")])
    assert declined(made) == ([], [])


def test_a_prompt_without_a_name_is_not_offered():
    made, asked = scheduler(), unnamed({"do_remote_decode": True})
    made.on_new_request(asked)
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert made.finished(asked, TABLES) == (False, None)
    assert made.take_orders(is_idle=False).leases == []
    assert declined(made) == ([["source", "unnamed_prompt"]], [])


SCORES = pytest.mark.skipif(not hasattr(SamplingParams, "prompt_logprob_token_ids"), reason="since vLLM 0.31")


@pytest.mark.parametrize(
    "asks", [{"prompt_logprobs": 0}, pytest.param({"prompt_logprob_token_ids": [[1, 2]]}, marks=SCORES)]
)
def test_an_answer_that_tells_of_the_prompts_logits_is_computed_where_they_are(asks):
    made, sampling = scheduler(), SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": dict(PULL)}, **asks)
    asked = Request("cmpl-here", list(range(PROMPT)), sampling, None)
    assert begun(made, asked) == 0
    assert [fetch.is_waited_for for fetch in made.take_orders(is_idle=False).fetches] == [False]
    assert declined(made) == ([["target", "prompt_logprobs"]], [("cmpl-here", "prompt_logprobs")])


def test_a_request_whose_prompt_has_no_name_yet_is_asked_for_again(monkeypatch):
    made, asked = scheduler(), request(dict(PULL))
    monkeypatch.setattr(Prompts, "is_ready", lambda *_: False)
    assert made.num_new_tokens(asked, 0) is None
    monkeypatch.undo()
    assert made.num_new_tokens(asked, 0) == PROMPT - 1


def test_what_is_kept_of_a_request_ends_with_it():
    made, asked = scheduler(), request(dict(PULL))
    made.num_new_tokens(asked, 0)
    end(asked, RequestStatus.FINISHED_ABORTED)
    made.finished(asked, ([],))
    assert made._expected._found == {}


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_prefill_that_did_not_finish_well_keeps_no_blocks(status):
    made, asked = scheduler(), request({"do_remote_decode": True})
    end(asked, status)
    assert made.finished(asked, TABLES) == (False, None)
    assert made.take_orders(is_idle=False).leases == []


def test_ids_too_long_to_travel_travel_under_another_name():
    made, asked = scheduler(), request({"do_remote_decode": True}, request_id="x" * 5000)
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    _, params = made.finished(asked, TABLES)
    assert params["remote_request_id"] == agent_name("x" * 5000)


@pytest.mark.parametrize("request_id", ["", "x" * 5000, "n\xe9e", "\ud800"])
def test_names_for_agents_are_short_and_differ(request_id):
    names = {agent_name(request_id), agent_name(request_id + "1"), agent_name(request_id + "2")}
    assert len(names) == 3
    assert all(0 < len(name) <= MAX_NAME_LENGTH and name.isascii() for name in names)


def test_a_prefill_whose_window_moves_on_stops_before_its_last_token_once():
    made, asked = scheduler(full(), sliding()), request({"do_remote_decode": True})
    made.on_new_request(asked)
    made.on_new_request(asked)
    assert (asked.num_prompt_tokens, asked.max_tokens) == (PROMPT - 1, 1)


def test_blocks_that_a_window_has_given_up_are_refused():
    made, asked = scheduler(full(), sliding()), request({"do_remote_decode": True})
    end(asked, RequestStatus.FINISHED_LENGTH_CAPPED)
    made.finished(asked, ([3, 4, 5], [0, 4, 5]))
    (lease,) = made.take_orders(is_idle=False).leases
    assert lease.block_tables == ((3, 4, 5), (NUM_BLOCKS, 4, 5))


def test_the_lease_of_a_request_that_waits_for_its_turn_is_held_until_its_fetch():
    made, asked = scheduler(), request(dict(PULL))
    made.on_new_request(asked)
    (hold,) = made.take_orders(is_idle=False).holds
    made.num_new_tokens(asked, 0)
    made.allocated(asked, TABLES, PROMPT - 1)
    orders = made.take_orders(is_idle=False)
    assert orders.holds == []
    assert (orders.fetches[0].reference, orders.fetches[0].addresses) == (hold.reference, hold.addresses)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {**PULL, "kvferry": 7}])
def test_nothing_is_held_where_nothing_will_be_fetched(params):
    made = scheduler()
    made.on_new_request(request(params))
    assert made.take_orders(is_idle=False).holds == []


def test_every_request_that_comes_and_goes_is_told_whether_or_not_anything_is_transferred():
    """vLLM may load an adapter for it."""

    class Told(Prompts):
        def begin(self, request):
            told.append(("begin", request.request_id))

        def end(self, request):
            told.append(("end", request.request_id))

    told, made, asked = [], scheduler(), request(None)
    made._prompts = Told()
    made.on_new_request(asked)
    end(asked, RequestStatus.FINISHED_STOPPED)
    assert made.finished(asked, TABLES) == (False, None)
    assert told == [("begin", "cmpl-here"), ("end", "cmpl-here")]


class Evicting:
    """In place of vLLM's cache manager."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def evict_blocks(self, blocks) -> None:
        self.blocks |= blocks


def test_a_block_that_is_not_filled_leaves_the_prefix_cache_while_its_request_waits_for_room():
    made, asked, manager = scheduler(sliding()), request(dict(PULL)), Evicting()
    made.unfilled.bind(manager.evict_blocks)
    begun(made, asked)
    made.unfilled.scheduled()
    assert manager.blocks == set()
    made.unfilled.received(["another", asked.request_id])
    for _ in range(2):
        made.scheduled(SchedulerOutput.make_empty())
        assert manager.blocks == {TABLES[0][0]}
        manager.blocks.clear()
    made.allocated(asked, TABLES, 0)
    manager.blocks.clear()
    made.unfilled.scheduled()
    assert manager.blocks == set()


@pytest.mark.parametrize("how", ["filled", "aborted"])
def test_a_block_that_is_not_filled_leaves_the_prefix_cache_when_vllm_has_put_it_there(how):
    made, asked, manager = scheduler(sliding()), request(dict(PULL)), Evicting()
    made.unfilled.bind(manager.evict_blocks)
    assert begun(made, asked) == PROMPT - 1
    assert manager.blocks == set()
    if how == "filled":
        made.allocated(asked, TABLES, 0)
    else:
        end(asked, RequestStatus.FINISHED_ABORTED)
        made.finished(asked, TABLES)
    # Of 39 tokens the last 31 are seen.
    assert manager.blocks == {TABLES[0][0]}


@pytest.mark.parametrize(("context_parallel", "expected"), [(1, {3, 4, 5}), (2, {3, 4})])
def test_a_block_holds_as_many_tokens_of_each_rank_that_shares_them(context_parallel, expected):
    merged = FullAttentionSpec(BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=32)
    made, asked, manager = (
        scheduler(merged, context_parallel=context_parallel),
        request(dict(PULL), size=80),
        Evicting(),
    )
    made.unfilled.bind(manager.evict_blocks)
    begun(made, asked)
    made.allocated(asked, TABLES, 0)
    # Of 79 tokens the last 31 are seen.
    assert manager.blocks == expected
