"""The ranks of an engine that is one process: a worker's half for each device, and one word of all for vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvferry import Reference, new_epoch
from kvferry.connectors.vllm.features import TransferResults
from kvferry.connectors.vllm.metadata import Orders, RankAddress
from kvferry.connectors.vllm.settings import Settings
from kvferry.connectors.vllm.stats import FerryStats
from kvferry.connectors.vllm.worker.rank_cache import RankCache
from kvferry.connectors.vllm.worker.worker import Worker
from kvferry.connectors.vllm_tpu.description import arrays_of, describe_ranks
from kvferry.connectors.vllm_tpu.steps import Steps
from kvferry.jax_caches import JaxCaches


class Ranks:
    """What `FerryConnector` asks of a worker's half, for all devices; and the turns of the runner's steps."""

    def __init__(self, config: VllmConfig, settings: Settings, kv_cache_config: KVCacheConfig) -> None:
        num_ranks = config.sharding_config.total_devices
        self._kv_cache_config = kv_cache_config
        self._workers = [Worker(config, settings, kv_cache_config) for _ in range(num_ranks)]
        self._together = KVOutputAggregator(num_ranks)
        self._steps: list[Steps] = []

    def register(self, runner: Any) -> None:
        """Describe each device's part of the runner's arrays, compile what copies them, and start the agents.

        Raises LayoutError for arrays that cannot be described, ConfigurationError for those that lie elsewhere too.
        """
        described = describe_ranks(arrays_of(runner, self._kv_cache_config))
        caches = JaxCaches(runner.kv_caches, [one.layout for one in described])
        epoch = new_epoch()
        listening = [
            worker.open(RankCache(one, caches.cache(rank), rank, epoch))
            for rank, (worker, one) in enumerate(zip(self._workers, described, strict=True))
        ]
        for worker in self._workers:
            worker.start(listening)
        self._steps.append(Steps(runner, caches))

    def addresses(self) -> list[RankAddress]:
        """Where the agents listen, in the order of the ranks."""
        return [worker.address() for worker in self._workers]

    # --- steps ---

    def look_for_new_arrays(self) -> None:
        """Between two steps. What was leased in arrays that are gone is in the new ones no more."""
        for steps in self._steps:
            if steps.adopt():
                for worker in self._workers:
                    worker.withdraw_all()

    def begin_step(self) -> None:
        """The runner is about to donate its arrays."""
        for steps in self._steps:
            steps.begin()

    def end_step(self) -> None:
        """The runner has new ones."""
        for steps in self._steps:
            steps.end()

    # --- as Worker ---

    def obey(self, orders: Orders) -> None:
        """Only the first waits a moment in an idle step: there is one engine that waits."""
        for rank, worker in enumerate(self._workers):
            worker.obey(replace(orders, is_idle=orders.is_idle and not rank))

    def withdraw(self, names: Sequence[str]) -> None:
        for worker in self._workers:
            worker.withdraw(names)

    def results(self) -> TransferResults:
        """What has ended on all devices, put together as vLLM does it for workers in processes of their own."""
        told = self._together.aggregate([_output(worker.results()) for worker in self._workers])
        output = told.kv_connector_output if told is not None else None
        if output is None:
            return TransferResults()
        return TransferResults(
            output.finished_sending or set(), output.finished_recving or set(), output.failed_recving
        )

    def failed_blocks(self) -> set[int]:
        return set().union(*(worker.failed_blocks() for worker in self._workers))

    def take_stats(self) -> FerryStats:
        return reduce(lambda one, other: one.aggregate(other), [worker.take_stats() for worker in self._workers])

    @property
    def facts(self) -> dict[str, str]:
        return self._workers[0].facts

    def release(self, reference: Reference) -> str:
        first, *_ = [worker.release(reference) for worker in self._workers]
        return first

    def withdraw_leases(self, names: Sequence[str]) -> bool:
        return any([worker.withdraw_leases(names) for worker in self._workers])

    def unregister(self) -> None:
        for worker in self._workers:
            worker.unregister()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def _output(results: TransferResults) -> ModelRunnerOutput:
    """A new one for each rank, also where nothing has ended: vLLM writes what all say together into the first."""
    output = KVConnectorOutput(
        finished_sending=results.finished_sending,
        finished_recving=results.finished_recving,
        failed_recving=results.failed_recving,
    )
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output)
