"""Our scheduler's half under vLLM's own asynchronous scheduler, which CPUs do not use: it plans a step before it knows
what the last one has sampled."""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM's own environment")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at import
    importlib.import_module("vllm.v1.worker.utils")

import torch
from test_vllm_scheduler import PULL
from tiny_models import model_folder
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.connectors.vllm import features
from kvferry.connectors.vllm.metadata import LeaseOrder, RankAddress
from kvferry.errors import ConfigurationError
from kvferry.plan.description.prompt import Prompt

BLOCK, NUM_BLOCKS, PROMPT = 16, 64, 40
STOP, OTHER = 7, 9


@pytest.fixture
def scheduler() -> AsyncScheduler:
    return scheduler_of("kv_both")


def scheduler_of(role: str) -> AsyncScheduler:
    transfer = KVTransferConfig(
        kv_connector="FerryConnector", kv_connector_module_path="kvferry.connectors.vllm", kv_role=role
    )
    model = {"model": str(model_folder("llama")), "block_size": BLOCK, "max_model_len": 512}
    config = EngineArgs(**model, kv_transfer_config=transfer, enable_prefix_caching=False).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    config.scheduler_config.async_scheduling = True
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=64, dtype=torch.float32)
    caches = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)])
    made = AsyncScheduler(config, caches, StructuredOutputManager(config), BLOCK, BLOCK)
    made.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): RankAddress("tcp://127.0.0.1:7001", "epoch")})
    return made


def prefill(max_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    sampling._all_stop_token_ids = {STOP}
    sampling.stop_token_ids = [STOP]
    return Request("cmpl-here", list(range(100, 100 + PROMPT)), sampling, None)


def sampled(output: SchedulerOutput, token: int) -> ModelRunnerOutput:
    ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(ids, {name: at for at, name in enumerate(ids)}, [[token] for _ in ids])


def test_what_a_step_under_way_would_add_is_not_offered(scheduler):
    """The second token ends the answer; the step that would compute its cache has begun by then."""
    asked = prefill(max_tokens=8)
    scheduler.add_request(asked)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update_from_output(first, sampled(first, OTHER))
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {"cmpl-here": 1}
    scheduler.update_from_output(second, sampled(second, STOP))
    assert (asked.status, asked.num_computed_tokens) == (RequestStatus.FINISHED_STOPPED, PROMPT + 2)
    (lease,) = leases(scheduler)
    assert (lease.num_tokens, lease.prompt) == (PROMPT + 1, Prompt.of([*range(100, 100 + PROMPT), OTHER]))
    assert lease.first_token is not None
    assert lease.first_token.token_id == STOP
    scheduler.update_from_output(third, sampled(third, OTHER))


def test_all_of_a_prompt_is_offered_where_one_token_is_wanted(scheduler):
    scheduler.add_request(prefill(max_tokens=1))
    first = scheduler.schedule()
    assert scheduler.schedule().total_num_scheduled_tokens == 0
    scheduler.update_from_output(first, sampled(first, OTHER))
    (lease,) = leases(scheduler)
    assert lease.num_tokens == PROMPT


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_blocks_that_a_step_under_way_writes_to_are_not_fetched_into(role):
    """vLLM hands them out at once where nothing is to be fetched."""
    made = scheduler_of(role)
    made.add_request(prefill(max_tokens=8))
    first, second = made.schedule(), made.schedule()
    (blocks,) = made.kv_cache_manager.get_block_ids("cmpl-here")
    made.update_from_output(first, sampled(first, STOP))
    assert second.num_scheduled_tokens == {"cmpl-here": 1}
    written: set[int] = set()
    for number in range(4):
        params = {**PULL, "remote_request_id": f"there-{number}"}
        sampling = SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": params})
        made.add_request(Request(f"fetches-{number}", [number] * (NUM_BLOCKS // 4 * BLOCK), sampling, None))
        orders = made.schedule().kv_connector_metadata
        written.update(block for fetch in orders.fetches for table in fetch.block_tables for block in table)
    assert written.isdisjoint(blocks)
    assert bool(written) is (role != "kv_producer")


def test_a_server_whose_connectors_are_to_fetch_nothing_does_not_start_with_one_that_is(monkeypatch):
    whole = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_producer")
    config = SimpleNamespace(kv_transfer_config=whole)
    monkeypatch.setattr(features, "get_current_vllm_config_or_none", lambda: config)
    with pytest.raises(ConfigurationError, match="kv_role kv_both among connectors"):
        scheduler_of("kv_both")


def leases(scheduler: AsyncScheduler) -> list[LeaseOrder]:
    """Those that the next step orders."""
    found: list[LeaseOrder] = scheduler.schedule().kv_connector_metadata.leases
    return found
