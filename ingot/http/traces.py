"""A span for each request, sent to an OpenTelemetry collector: `--otlp-traces-endpoint`, of the extra `otel`.

A span is made when its request has ended, from figures that are there anyway (`spans`); a thread of its own sends it,
and what that does not come to is dropped.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from ingot.errors import ConfigError
from ingot.extras import require
from ingot.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

CARRIED: Final = ("traceparent", "tracestate")  # headers by which a client says what a request is a part of
PATH: Final = "/v1/traces"
SENT_S: Final = 5.0  # that sending some may take
CLOSING_S: Final = 3.0  # that a server which stops waits for that
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP: Final = "http/protobuf"
NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """What is told of a request that ended just now."""

    name: str
    attributes: Mapping[str, Any]
    took_s: float
    events: Mapping[str, float]  # seconds from its beginning
    fault: str | None  # what it ended in, if not well


class Traces:
    """Any thread may call it; nobody waits for it but who closes it."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "ingot"), "service.version": __version__}
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ingot", __version__)
        self._context = TraceContextTextMapPropagator()

    def send(self, told: TracedRequest, headers: Mapping[str, str]) -> None:
        """`headers` are those of `CARRIED` that it came with."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end = time.time_ns()
        began = end - int(told.took_s * NS)
        span = self._tracer.start_span(
            told.name,
            context=self._context.extract(headers),
            kind=SpanKind.SERVER,
            attributes=dict(told.attributes),
            start_time=began,
        )
        for event, after_s in told.events.items():
            span.add_event(event, timestamp=began + int(after_s * NS))
        if told.fault is not None:
            span.set_status(Status(StatusCode.ERROR, told.fault))
        span.end(end)

    def close(self) -> None:
        """Send what is left, for a few seconds at most: the library would try each batch for as long as it may take."""
        sending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        sending.start()
        sending.join(CLOSING_S)


def carried(scope: Scope) -> dict[str, str]:
    """The headers of a request by which it is a part of something."""
    given = Headers(scope=scope)
    return {name: given[name] for name in CARRIED if name in given}


def traces_to(endpoint: str) -> Traces:
    """Raises ConfigError where spans cannot be sent there."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{endpoint!r} is no collector's address; write it like http://127.0.0.1:4318{PATH}",
            param="otlp_traces_endpoint",
        )
    wanted = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), HTTP)
    if wanted != HTTP:
        raise ConfigError(f"spans are sent by {HTTP}, not by {wanted}", param="otlp_traces_endpoint")
    require("otel", "--otlp-traces-endpoint", param="otlp_traces_endpoint")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    address = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}{PATH}"
    return Traces(OTLPSpanExporter(address, timeout=SENT_S))
