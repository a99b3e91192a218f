"""What one answer cost, and the counters over all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry import Reason
from kvferry.connectors.peer_labels import PeerLabels
from kvferry.embedded.engine.async_engine import Engine
from kvferry.embedded.transfer.agent_transfer import ReceivedCache
from kvferry.http.histogram_buckets import BYTES_BUCKETS, PHASE_BUCKETS_S, ROWS_BUCKETS


@dataclass(frozen=True, slots=True)
class Report:
    """Goes with an answer under the key `kvferry` when that is asked for.

    `tokens_computed` prompt tokens went through this engine's model, measured; `tokens_received` came from another
    engine, in `bytes` bytes and `descriptors` rows; `verified` says by what digest they were found right. `recomputed`
    is the reason of a transfer that failed and was made good by computing the prompt here, or empty.
    """

    tokens_computed: int = 0
    tokens_received: int = 0
    bytes: int = 0
    descriptors: int = 0
    transport: str = ""
    strategy: str = ""
    phases_s: dict[str, float] = field(default_factory=dict)
    verified: str = ""
    recomputed: str = ""


def summed(reports: Sequence[Report]) -> Report:
    """The report of an answer from those of its choices. Nothing was received for an answer with several choices."""
    return replace(reports[0], tokens_computed=sum(report.tokens_computed for report in reports))


class Metrics:
    """Everything that `/metrics` shows, in a registry of its own."""

    def __init__(self, engine: Engine, is_ready: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests by role and HTTP status.", "role", "status")
        self._computed = self._counter("tokens_computed", "Prompt tokens computed here.")
        self._received = self._counter("tokens_received", "Prompt tokens whose cache came from another engine.")
        self._generated = self._counter("tokens_generated", "Generated tokens.")
        self._bytes = self._counter("received_bytes", "Bytes of cache that came from other engines.")
        self._failures = self._counter("transfer_failures", "Transfers that failed, by reason.", "reason")
        # An alarm looks at what the counter grows by: a series that is not there before would hide the first failure.
        self._failures.labels(Reason.DIGEST)
        self._peers = PeerLabels()
        # These have the labels peer and transport, as those of vLLM's connector have.
        whose = ("peer", "transport")
        text = "Time of each phase of fetching a request's cache."
        self._phases = self._histogram("kvferry_engine_phase_seconds", text, PHASE_BUCKETS_S, "phase", *whose)
        text = "Bytes of each cache that came."
        self._transfer_bytes = self._histogram("kvferry_engine_transfer_bytes", text, BYTES_BUCKETS, *whose)
        text = "Descriptors of each cache that came: rows of adjacent bytes."
        self._rows = self._histogram("kvferry_engine_transfer_descriptors", text, ROWS_BUCKETS, *whose)
        text = "Time until a cache that did not come was given up."
        self._failed = self._histogram("kvferry_engine_failed_transfer_seconds", text, PHASE_BUCKETS_S, "reason")
        self._show_engine(engine)
        ready = Gauge("kvferry_engine_ready", "1 if the engine accepts requests.", registry=self.registry)
        ready.set_function(is_ready)

    def count_request(self, role: str, status: int) -> None:
        self._requests.labels(role, str(status)).inc()

    def count_failure(self, reason: str, seconds: float) -> None:
        """Count a transfer that was given up after so many seconds, its time in the queue included. No label names the
        peer: only a client said which one it was."""
        self._failures.labels(reason).inc()
        self._failed.labels(reason).observe(seconds)

    def observe_transfer(self, received: ReceivedCache, queue_s: float) -> None:
        """Count one cache that has come. It waited `queue_s` for blocks to come into."""
        peer, report = self._peers.label(received.peer), received.report
        for phase, seconds in {"queue": queue_s, **report.phases_s}.items():
            self._phases.labels(phase, peer, report.transport).observe(seconds)
        self._transfer_bytes.labels(peer, report.transport).observe(report.num_bytes)
        self._rows.labels(peer, report.transport).observe(report.num_rows)

    def count_answer(self, report: Report, num_tokens: int) -> None:
        self._computed.inc(report.tokens_computed)
        self._received.inc(report.tokens_received)
        self._bytes.inc(report.bytes)
        self._generated.inc(num_tokens)

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvferry_engine_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def _show_engine(self, engine: Engine) -> None:
        blocks = Gauge("kvferry_engine_blocks", "Blocks of all cache groups.", ("state",), registry=self.registry)
        blocks.labels("capacity").set_function(lambda: sum(engine.block_usage().capacity))
        blocks.labels("granted").set_function(lambda: sum(engine.block_usage().granted))
        blocks.labels("allocated").set_function(lambda: sum(engine.block_usage().allocated))
        requests = Gauge("kvferry_engine_open_requests", "Requests by state.", ("state",), registry=self.registry)
        requests.labels("waiting").set_function(lambda: engine.block_usage().num_waiting)
        requests.labels("lent").set_function(lambda: engine.block_usage().num_leased)
