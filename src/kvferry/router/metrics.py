"""The router's counters. A registry per app, so that two routers in one process do not mix."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.router.events import Count, Counted, Path
from kvferry.router.policy import Instance

__all__ = ["Metrics"]

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class Metrics:
    """Everything that `/metrics` shows."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        path_words = "Requests by endpoint, path (disaggregated, decode-only, none) and status; 499: the client left."
        self._requests = self._counter("kvferry_router_requests", path_words, "endpoint", "path", "status")
        self._retries = self._counter(
            "kvferry_router_retries", "Legs tried again on another instance.", "role", "reason"
        )
        self._fallbacks = self._counter("kvferry_router_fallbacks", "Requests served by decode alone.", "reason")
        self._upstream_errors = self._counter("kvferry_router_upstream_errors", "Legs that failed.", "role", "reason")
        release_words = "Computed caches that nobody will read; their prefill instance was told. By why nobody will."
        self._releases = self._counter("kvferry_router_releases", release_words, "reason")
        self._in_flight = self._gauge(
            "kvferry_router_in_flight_requests", "Requests assigned to an instance and not finished."
        )
        self._healthy = self._gauge("kvferry_router_instance_healthy", "1 while an instance answers.")
        self._ready = self._gauge("kvferry_router_instance_ready", "1 while an instance wants requests.")
        self._time_to_first_token = Histogram(
            "kvferry_router_time_to_first_token_seconds",
            "From a streamed request's arrival to the first byte of its answer.",
            ("path",),
            buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        )

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

    def count_release(self, reason: str) -> None:
        self._releases.labels(reason).inc()

    def observe_first_token(self, path: Path, seconds: float) -> None:
        self._time_to_first_token.labels(path).observe(seconds)

    def show_in_flight(self, instance: Instance, num_requests: int) -> None:
        self._in_flight.labels(instance.role, instance.url).set(num_requests)

    def show_health(self, instance: Instance, healthy: bool, ready: bool) -> None:
        self._healthy.labels(instance.role, instance.url).set(1 if healthy else 0)
        self._ready.labels(instance.role, instance.url).set(1 if ready else 0)

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("role", "instance"), registry=self._registry)
