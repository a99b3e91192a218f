"""Spans for OpenTelemetry, an extra: `kvferry.request`, its requests to engines, and the phases of a cache's way."""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvferry.router.policy.records import Instance
from kvferry.router.request.headers import Headers
from kvferry.router.telemetry.access_log import ANSWERED, LEFT
from kvferry.router.telemetry.tracing import RequestTrace, Tracing, UpstreamTrace

NS_PER_S = 1_000_000_000


def exporting() -> OtelTracing:
    """Sends spans over OTLP/HTTP; where to, and everything else, is in OpenTelemetry's own OTEL_* variables."""
    provider = TracerProvider(resource=Resource.create({"service.name": "kvferry-router"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtelTracing(provider)


class OtelTracing(Tracing):
    """Spans of one provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvferry.router")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Headers, request_id: str) -> RequestTrace:
        carrier = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
        context = self._propagator.extract(carrier)
        attributes = {"kvferry.request_id": request_id}
        span = self._tracer.start_span("kvferry.request", context, SpanKind.SERVER, attributes)
        return _OtelRequest(self._tracer, self._propagator, span)

    def close(self) -> None:
        self._provider.shutdown()


class _OtelRequest(RequestTrace):
    def __init__(self, tracer: trace.Tracer, propagator: TraceContextTextMapPropagator, span: Span) -> None:
        self._tracer, self._propagator, self._span = tracer, propagator, span
        self._upstreams: list[_OtelUpstream] = []

    def upstream_began(self, instance: Instance) -> UpstreamTrace:
        context = trace.set_span_in_context(self._span)
        attributes = {"server.address": instance.url, "gen_ai.operation.name": str(instance.role)}
        began_ns = time.time_ns()
        name = f"kvferry.{instance.role}"
        span = self._tracer.start_span(name, context, SpanKind.CLIENT, attributes, start_time=began_ns)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, trace.set_span_in_context(span))
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in carrier.items()]
        self._upstreams.append(_OtelUpstream(self._tracer, span, began_ns, headers))
        return self._upstreams[-1]

    def ended(self, facts: Mapping[str, str | float]) -> None:
        for name, value in facts.items():
            self._span.set_attribute(name, value)
        status = facts.get("http.response.status_code", 0)
        if isinstance(status, int) and status >= 500:
            self._span.set_status(StatusCode.ERROR)
        for upstream in self._upstreams:
            upstream.ended("unknown")
        self._span.end()


class _OtelUpstream(UpstreamTrace):
    def __init__(self, tracer: trace.Tracer, span: Span, began_ns: int, headers: Headers) -> None:
        self._tracer, self._span, self._began_ns = tracer, span, began_ns
        self.headers = headers

    def answered(self, phases: Mapping[str, float]) -> None:
        self._span.add_event("answered")
        context, at_ns = trace.set_span_in_context(self._span), self._began_ns
        for name, seconds in phases.items():
            phase = self._tracer.start_span(f"kvferry.{name}", context, start_time=at_ns)
            at_ns += int(seconds * NS_PER_S)
            phase.end(at_ns)

    def ended(self, outcome: str) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attribute("kvferry.outcome", outcome)
        if outcome not in (ANSWERED, LEFT):
            self._span.set_status(StatusCode.ERROR, outcome)
        self._span.end()
