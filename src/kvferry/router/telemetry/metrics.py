"""The router's counters. A registry per app, so that two routers in one process do not mix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from kvferry.connectors.buckets import PHASE_BUCKETS_S
from kvferry.router.events import Count, Counted, Path
from kvferry.router.policy.records import Instance, Pair

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
INSTANCE = ("role", "instance")


class Metrics:
    """Everything that `/metrics` shows."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        path_words = (
            "Requests by endpoint, path (disaggregated, decode-only, none) and status; 499: the client disconnected."
        )
        self._requests = self._counter("kvferry_router_requests", path_words, "endpoint", "path", "status")
        self._retries = self._counter(
            "kvferry_router_retries", "Upstream requests retried on another instance.", "role", "reason"
        )
        self._fallbacks = self._counter(
            "kvferry_router_fallbacks", "Requests served by a decode engine alone.", "reason"
        )
        self._upstream_errors = self._counter(
            "kvferry_router_upstream_errors", "Failed upstream requests.", "role", "reason"
        )
        release_words = "Computed caches that were released unread, by reason."
        self._releases = self._counter("kvferry_router_releases", release_words, "reason")
        self._turned_away = self._counter("kvferry_router_turned_away", "Requests answered with 429.", "reason")
        refused_words = (
            "Requests refused with 503, since no prefill instance could compute them (--prefill-fallback refuse)."
        )
        self._refused = self._counter("kvferry_router_refused", refused_words, "reason")
        lost_words = "Failed cache transfers between instances."
        self._lost = self._counter("kvferry_router_lost_caches", lost_words, "prefill", "decode", "reason")
        self._refused_members = self._counter(
            "kvferry_router_refused_registrations", "Rejected registrations.", "reason"
        )
        early_words = "Decode requests that started before their prefill had finished."
        self._early = self._counter("kvferry_router_early_decodes", early_words)
        self._show_members()
        self._time_to_first_token = self._histogram(
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

    def _show_members(self) -> None:
        in_flight_words = "Requests in flight per instance."
        self._in_flight = self._gauge("kvferry_router_in_flight_requests", in_flight_words, *INSTANCE)
        self._in_flight_tokens = self._gauge(
            "kvferry_router_in_flight_tokens", "Tokens in flight per instance: to prefill or to generate.", *INSTANCE
        )
        self._healthy = self._gauge("kvferry_router_instance_healthy", "1 if the instance is healthy.", *INSTANCE)
        self._ready = self._gauge("kvferry_router_instance_ready", "1 if the instance accepts requests.", *INSTANCE)
        self._threshold = self._gauge(
            "kvferry_router_skip_threshold_tokens", "Prompts with fewer uncached tokens skip prefill."
        )
        self._router_ready = self._gauge("kvferry_router_ready", "1 if the router can serve requests, as in /ready.")

    def count_request(self, endpoint: str, path: str, status: int) -> None:
        self._requests.labels(endpoint, path, str(status)).inc()

    def count(self, count: Count) -> None:
        match count.what:
            case Counted.RETRY:
                self._retries.labels(count.role, count.reason).inc()
            case Counted.FALLBACK:
                self._fallbacks.labels(count.reason).inc()
            case Counted.UPSTREAM_ERROR:
                self._upstream_errors.labels(count.role, count.reason).inc()
            case Counted.TURNED_AWAY:
                self._turned_away.labels(count.reason).inc()
            case Counted.REFUSED:
                self._refused.labels(count.reason).inc()

    def count_release(self, reason: str) -> None:
        self._releases.labels(reason).inc()

    def count_early(self) -> None:
        self._early.inc()

    def count_lost(self, pair: Pair, reason: str) -> None:
        self._lost.labels(pair[0].url, pair[1].url, reason).inc()

    def count_refused_registration(self, reason: str) -> None:
        self._refused_members.labels(reason).inc()

    def observe_first_token(self, path: Path, seconds: float) -> None:
        self._time_to_first_token.labels(path).observe(seconds)

    def observe_phases(self, phases: Mapping[str, float], prefill_url: str, decode_url: str) -> None:
        for name, seconds in phases.items():
            self._phases.labels(name, prefill_url, decode_url).observe(seconds)

    def inter_token(self, instance: Instance) -> Histogram:
        """What is told the time between two tokens that this instance has written: one lookup per stream."""
        return self._inter_token.labels(instance.url)

    def show_load(self, instance: Instance, num_requests: int, num_tokens: int) -> None:
        self._in_flight.labels(instance.role, instance.url).set(num_requests)
        self._in_flight_tokens.labels(instance.role, instance.url).set(num_tokens)

    def show_health(self, instance: Instance, healthy: bool, ready: bool) -> None:
        self._healthy.labels(instance.role, instance.url).set(1 if healthy else 0)
        self._ready.labels(instance.role, instance.url).set(1 if ready else 0)

    def show_threshold(self, num_tokens: int) -> None:
        self._threshold.set(num_tokens)

    def show_ready(self, ready: bool) -> None:
        self._router_ready.set(1 if ready else 0)

    def forget(self, instance: Instance) -> None:
        """An instance has left: what was counted by its name goes with it, or memory would grow with every restart."""
        for gauge in (self._in_flight, self._in_flight_tokens, self._healthy, self._ready):
            gauge.remove(instance.role, instance.url)
        for family in (self._lost, self._phases, self._inter_token):
            _forget(family, instance.url)

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)


def _forget(family: MetricWrapperBase, url: str) -> None:
    found = {tuple(s.labels.items()) for metric in family.collect() for s in metric.samples if url in s.labels.values()}
    kept = {tuple(pair for pair in labels if pair[0] != "le") for labels in found}
    for labels in kept:
        family.remove_by_labels(dict(labels))
