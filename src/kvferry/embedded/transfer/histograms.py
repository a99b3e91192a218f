"""What each cache that came cost, as histograms by peer and transport: vLLM's connector has the same."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from kvferry.connectors.buckets import BYTES_BUCKETS, PHASE_BUCKETS_S, ROWS_BUCKETS
from kvferry.connectors.peer_labels import PeerLabels
from kvferry.embedded.transfer.transfer import TransferReport


class TransferHistograms:
    """One observation of each phase, and of bytes and rows, for each transfer; one of the time of each that failed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._peers = PeerLabels()
        self._phases = Histogram(
            "kvferry_engine_phase_seconds",
            "Time of each phase of fetching a request's cache.",
            ("phase", "peer", "transport"),
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )
        self._bytes = Histogram(
            "kvferry_engine_transfer_bytes",
            "Bytes of each cache that came.",
            ("peer", "transport"),
            buckets=BYTES_BUCKETS,
            registry=registry,
        )
        self._rows = Histogram(
            "kvferry_engine_transfer_descriptors",
            "Descriptors of each cache that came: rows of adjacent bytes.",
            ("peer", "transport"),
            buckets=ROWS_BUCKETS,
            registry=registry,
        )

        self._failed = Histogram(
            "kvferry_engine_failed_transfer_seconds",
            "Time until a cache that did not come was given up.",
            ("reason",),
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )

    def observe_failure(self, reason: str, seconds: float) -> None:
        """One cache has not come. Whose it was is what a client said, so no label names it."""
        self._failed.labels(reason).observe(seconds)

    def observe(self, transfer: TransferReport, queue_s: float) -> None:
        """One cache has come; it waited `queue_s` for blocks to come into."""
        peer = self._peers.label(transfer.peer)
        for phase, seconds in {"queue": queue_s, **transfer.phases_s}.items():
            self._phases.labels(phase, peer, transfer.transport).observe(seconds)
        self._bytes.labels(peer, transfer.transport).observe(transfer.bytes)
        self._rows.labels(peer, transfer.transport).observe(transfer.descriptors)
