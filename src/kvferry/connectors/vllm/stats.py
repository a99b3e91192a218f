"""Metrics through vLLM's own interfaces: the stock connector's names where they mean the same, and phases by peer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

from kvferry import Direction, FetchReport
from kvferry.connectors.peer_labels import PeerLabels
from kvferry.connectors.vllm_middleware.worker_reports import FETCH_OUTCOMES, PREFILL_STARTS, FetchOutcome
from kvferry.http.histogram_buckets import PHASE_BUCKETS_S

PHASES, FETCHES, MOVED, BEGUN, DECLINED = "phases", "fetches", "moved", "begun", "declined"


@dataclass
class FerryStats(NixlKVConnectorStats):
    """The stock connector's lists, one record per phase of a fetch (phase, peer, transport, seconds), one per fetch
    that has ended (vLLM's id of the request, and the fields of its `FetchOutcome`), how many bytes the agent has moved
    in each direction, the names of early prefills that have begun, and caches not transferred on purpose (side
    and reason).
    """

    def reset(self) -> None:
        super().reset()
        for name in (PHASES, FETCHES, MOVED, BEGUN, DECLINED):
            self.data[name] = []

    def is_empty(self) -> bool:
        return super().is_empty() and not any(self.data[name] for name in (MOVED, BEGUN, DECLINED))

    def moved(self, direction: str, num_bytes: int) -> None:
        """So many more bytes by the agent's own reads or writes."""
        self.data[MOVED].append([direction, num_bytes])

    def begun(self, names: Sequence[str]) -> None:
        """These prefills are being computed."""
        self.data[BEGUN] += names

    def reduce(self) -> dict[str, int | float]:
        moved = sum(num_bytes for _, num_bytes in self.data[MOVED])
        return {**super().reduce(), "MB moved by this agent": round(moved / 2**20, 3)}

    def fetched(self, request_id: str, report: FetchReport, peer: str) -> None:
        """One finished fetch from an engine."""
        phases = report.phases_s
        self.data["transfer_duration"].append(phases.get("wire", 0.0))
        self.data["post_duration"].append(phases.get("claim", 0.0))
        self.data["bytes_transferred"].append(report.num_bytes)
        self.data["num_descriptors"].append(report.num_rows)
        self.data[PHASES] += [[phase, peer, report.transport, seconds] for phase, seconds in phases.items()]
        self.told(request_id, FetchOutcome(phases_s=dict(phases)))

    def failed(self, request_id: str, outcome: FetchOutcome) -> None:
        """One fetch that has failed."""
        self.count("num_failed_transfers")
        self.told(request_id, outcome)

    def declined(self, side: str, reason: str) -> None:
        """One cache that was not transferred on purpose, as this side has decided."""
        self.data[DECLINED].append([side, reason])

    def told(self, request_id: str, outcome: FetchOutcome) -> None:
        """How the cache of a request came, for its answer."""
        self.data[FETCHES].append([request_id, *astuple(outcome)])

    def count(self, name: str) -> None:
        """One more of what the stock connector counts under this name."""
        self.data[name].append(1)

    def freed(self, reason: str) -> None:
        """The blocks of a finished prefill are free; only a lease that ran out is worth counting."""
        if reason == "expired":
            self.count("num_kv_expired_reqs")

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return self if other.is_empty() else super().aggregate(other)


class Moved:
    """How much of what the agents of a rank have moved is told, by direction. Each agent counts from its start."""

    def __init__(self) -> None:
        self._before: Counter[str] = Counter()
        self._told: Counter[str] = Counter()

    def tell(self, moved_bytes: Mapping[Direction, int], stats: FerryStats) -> None:
        """Put down what is new of the agent that runs, and of those before it."""
        for direction in Direction:
            num_bytes = self._before[direction] + moved_bytes.get(direction, 0)
            if num_bytes > self._told[direction]:
                stats.moved(direction, num_bytes - self._told[direction])
                self._told[direction] = num_bytes

    def agent_ended(self, moved_bytes: Mapping[Direction, int]) -> None:
        """The agent has moved so much, and moves no more: the next one begins at nothing."""
        self._before.update(moved_bytes)


class FerryPromMetrics(NixlPromMetrics):
    """The stock connector's metrics, `vllm:kvferry_phase_seconds` by phase, peer and transport,
    `vllm:kvferry_agent_moved_bytes_total` by direction, and `vllm:kvferry_declined_transfers_total` by side and reason.

    In vLLM's API server, which hears of a fetch before it hears of the request's first token: answers are told of it.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        labelnames = list(arguments[2])
        self._peers = PeerLabels()
        self._phases = self._histogram_cls(
            name="vllm:kvferry_phase_seconds",
            documentation="Time of each phase of fetching a request's cache.",
            buckets=PHASE_BUCKETS_S,
            labelnames=[*labelnames, "phase", "peer", "transport"],
        )
        self._moved = self._counter_cls(
            name="vllm:kvferry_agent_moved_bytes",
            documentation="Bytes that reads and writes of the agents have moved.",
            labelnames=[*labelnames, "direction"],
        )
        self._declined = self._counter_cls(
            name="vllm:kvferry_declined_transfers",
            documentation="Caches that were not offered (source) or not fetched (target) on purpose, by reason.",
            labelnames=[*labelnames, "side", "reason"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        labels = self.per_engine_labelvalues[engine_idx]
        for phase, peer, transport, seconds in transfer_stats_data.get(PHASES, []):
            self._phases.labels(*labels, phase, self._peers.label(peer), transport).observe(seconds)
        for direction, num_bytes in transfer_stats_data.get(MOVED, []):
            self._moved.labels(*labels, direction).inc(num_bytes)
        for side, reason in transfer_stats_data.get(DECLINED, []):
            self._declined.labels(*labels, side, reason).inc()
        for request_id, *outcome in transfer_stats_data.get(FETCHES, []):
            FETCH_OUTCOMES.note(request_id, FetchOutcome(*outcome))
        for name in transfer_stats_data.get(BEGUN, []):
            PREFILL_STARTS.note(name)
