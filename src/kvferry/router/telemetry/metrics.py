"""The router's metrics: one attribute of `Metrics` each. A registry per app, so that two routers in one process do not
mix."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvferry.http.histogram_buckets import PHASE_BUCKETS_S
from kvferry.router.commands import Count, Counted
from kvferry.router.policy.records import Instance
from kvferry.router.telemetry.series_by_url import SeriesByUrl
from kvferry.wire.messages import Reason

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
INSTANCE = ("role", "instance")
MAX_LABELS = 1024
# So many samples are written in one go, which takes a millisecond or two of a core. Then comes the pause.
PIECE, PAUSE_S = 100, 0.002

_Family = TypeVar("_Family", bound=MetricWrapperBase)


class Metrics:
    """Everything that `/metrics` shows. Attributes without a label are used as they are, the others by `labels`."""

    def __init__(self, max_labels: int = MAX_LABELS) -> None:
        self._registry = CollectorRegistry()
        self._by_url = SeriesByUrl(max_labels)
        self._add_requests()
        self._add_instances()
        self._add_times()

    def _add_requests(self) -> None:
        self.requests = self._counter(
            "kvferry_router_requests",
            "Requests by endpoint, path (disaggregated, decode-only, none) and status; 499: the client disconnected.",
            *("endpoint", "path", "status"),
        )
        self._counted = {
            Counted.RETRY: self._counter(
                "kvferry_router_retries", "Upstream requests retried on another instance.", "role", "reason"
            ),
            Counted.UPSTREAM_ERROR: self._counter(
                "kvferry_router_upstream_errors", "Failed upstream requests.", "role", "reason"
            ),
            Counted.FALLBACK: self._counter(
                "kvferry_router_fallbacks", "Requests served by a decode engine alone.", "reason"
            ),
            Counted.TURNED_AWAY: self._counter("kvferry_router_turned_away", "Requests answered with 429.", "reason"),
            Counted.REFUSED: self._counter(
                "kvferry_router_refused",
                "Requests refused, since no prefill instance could compute them, and no decode instance may, or can.",
                "reason",
            ),
        }
        self.releases = self._counter(
            "kvferry_router_releases", "Computed caches that were released unread, by reason.", "reason"
        )
        self.early_decodes = self._counter(
            "kvferry_router_early_decodes", "Decode requests that started before their prefill had finished."
        )

    def _add_instances(self) -> None:
        self._lost_caches = self._counter(
            "kvferry_router_lost_caches", "Failed cache transfers between instances.", "prefill", "decode", "reason"
        )
        # By pair, a series begins with its first failure, so nothing that looks at what a counter grows by sees that.
        self._transfer_failures = self._counter(
            "kvferry_router_transfer_failures", "Failed cache transfers, by reason alone.", "reason"
        )
        for reason in Reason:
            self._transfer_failures.labels(reason)
        self.broken_pairs = self._gauge(
            "kvferry_router_broken_pairs", "Pairs of healthy instances between which transfers keep failing."
        )
        self._errors = self._counter(
            "kvferry_router_instance_errors", "Failed requests to an instance.", *INSTANCE, "reason"
        )
        self.refused_registrations = self._counter(
            "kvferry_router_refused_registrations", "Rejected registrations.", "reason"
        )
        self._in_flight = self._gauge(
            "kvferry_router_in_flight_requests", "Requests in flight per instance.", *INSTANCE
        )
        self._in_flight_tokens = self._gauge(
            "kvferry_router_in_flight_tokens", "Tokens in flight per instance: to prefill or to generate.", *INSTANCE
        )
        self._healthy = self._gauge("kvferry_router_instance_healthy", "1 if the instance is healthy.", *INSTANCE)
        self._ready = self._gauge("kvferry_router_instance_ready", "1 if the instance accepts requests.", *INSTANCE)
        self._failing = self._gauge(
            "kvferry_router_instance_failing", "1 while the circuit breaker of the instance is not closed.", *INSTANCE
        )
        self.skip_threshold = self._gauge(
            "kvferry_router_skip_threshold_tokens", "Prompts with fewer uncached tokens skip prefill."
        )
        self.router_ready = self._gauge("kvferry_router_ready", "1 if the router can serve requests, as in /ready.")

    def _add_times(self) -> None:
        self.time_to_first_token = self._histogram(
            "kvferry_router_time_to_first_token_seconds",
            "From a streamed request's arrival to the first byte of its answer.",
            TTFT_BUCKETS_S,
            "path",
        )
        self._phases = self._histogram(
            "kvferry_router_phase_seconds",
            "Parts of the time to the first byte of answers, by pair; prefill is empty where decode was alone.",
            PHASE_BUCKETS_S,
            *("phase", "prefill", "decode"),
        )
        self._inter_token = self._histogram(
            "kvferry_router_inter_token_seconds", "Time between two tokens of a stream.", ITL_BUCKETS_S, "instance"
        )

    def count(self, count: Count) -> None:
        by_role = count.what in (Counted.RETRY, Counted.UPSTREAM_ERROR)
        self._counted[count.what].labels(*(count.role,) if by_role else (), count.reason).inc()

    def observe_phases(self, phases: Mapping[str, float], prefill_url: str, decode_url: str) -> None:
        pair = self._by_url.names(prefill_url, decode_url)
        for name, seconds in phases.items():
            self._of(self._phases, name, *pair).observe(seconds)

    def observer_of_gaps(self, url: str) -> Callable[[float], None]:
        """The function that takes the times between two tokens of an answer of this instance."""
        return self._of(self._inter_token, self._by_url.name(url)).observe

    def lost_cache(self, prefill_url: str, decode_url: str, reason: str) -> None:
        self._transfer_failures.labels(reason).inc()
        self._of(self._lost_caches, *self._by_url.names(prefill_url, decode_url), reason).inc()

    def instance_error(self, instance: Instance, reason: str) -> None:
        """Count a failed request to an instance, with its reason."""
        self._of(self._errors, instance.role, self._by_url.name(instance.url), reason).inc()

    def show_failing(self, instance: Instance, failing: bool) -> None:
        self._show(instance, (self._failing, failing))

    def show_load(self, instance: Instance, num_requests: int, num_tokens: int) -> None:
        self._show(instance, (self._in_flight, num_requests), (self._in_flight_tokens, num_tokens))

    def show_health(self, instance: Instance, healthy: bool, ready: bool) -> None:
        self._show(instance, (self._healthy, healthy), (self._ready, ready))

    def _show(self, instance: Instance, *values: tuple[Gauge, float]) -> None:
        """Set gauges of an instance that has series of its own. Shared ones would show the last instance's value."""
        if self._by_url.join(instance):
            for gauge, value in values:
                gauge.labels(instance.role, instance.url).set(value)

    def _of(self, family: _Family, *labels: str) -> _Family:
        self._by_url.note(family, labels)
        return family.labels(*labels)

    def forget(self, instance: Instance) -> None:
        """Forget the series of an instance that has left, or memory would grow with every restart."""
        for gauge in (self._in_flight, self._in_flight_tokens, self._healthy, self._ready, self._failing):
            _remove(gauge, (instance.role, instance.url))
        for family, labels in self._by_url.leave(instance):
            _remove(family, labels)

    def render(self) -> bytes:
        """The text format of Prometheus; with thousands of instances it takes a while, so in a thread of its own."""
        return generate_latest(_Paced(self._registry))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)


class _Paced(Collector):
    """A registry whose samples come in pieces: in the pauses between them the event loop has Python's lock, and in a
    piece it waits for the lock no longer than it would for another request."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = _Pieces(metric.samples)
            yield metric


class _Pieces(list[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        for number, sample in enumerate(super().__iter__(), start=1):
            yield sample
            if not number % PIECE:
                time.sleep(PAUSE_S)


def _remove(family: MetricWrapperBase, labels: tuple[str, ...]) -> None:
    with suppress(KeyError):
        family.remove(*labels)
