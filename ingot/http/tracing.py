"""A span for each request, sent to an OpenTelemetry collector: `--otlp-traces-endpoint`, of the extra `otel`.

A span is made when its request has ended, from figures that are there anyway; a thread of its own sends it, and spans
that it cannot keep up with are dropped. Attributes have the names of OpenTelemetry's conventions for generative AI, and
vLLM's names where those have none. Spans contain nothing of prompts and answers.
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

from ingot.engine.request import Ended, Failed, PoolingOutput, Request, Sampling
from ingot.engine.speech_request import SpeechEnded, TranscriptionEnded
from ingot.errors import ConfigError
from ingot.extras import require_extra
from ingot.http.edge import Reply
from ingot.observe.metrics import RequestSpan
from ingot.protocol.operations import operation_at
from ingot.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACE_HEADERS: Final = ("traceparent", "tracestate")  # the W3C trace context
OTLP_PATH: Final = "/v1/traces"
EXPORT_TIMEOUT_S: Final = 5.0  # of one batch
TRACE_CLOSING_S: Final = 3.0  # that a stopping server waits for it
OTLP_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP_HTTP: Final = "http/protobuf"
NANOSECONDS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """The span of a request that has just ended."""

    name: str
    attributes: Mapping[str, Any]
    took_s: float
    events: Mapping[str, float]  # seconds from its beginning
    fault: str | None  # the error it ended in, if any


class TraceExporter:
    """Any thread may call it; only `close` waits."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "ingot"), "service.version": __version__}
        self._provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ingot", __version__)
        self._context = TraceContextTextMapPropagator()

    def send(self, request: TracedRequest, headers: Mapping[str, str]) -> None:
        """`headers` are the request's `TRACE_HEADERS`."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end = time.time_ns()
        began = end - int(request.took_s * NANOSECONDS)
        span = self._tracer.start_span(
            request.name,
            context=self._context.extract(headers),
            kind=SpanKind.SERVER,
            attributes=dict(request.attributes),
            start_time=began,
        )
        for event, after_s in request.events.items():
            span.add_event(event, timestamp=began + int(after_s * NANOSECONDS))
        if request.fault is not None:
            span.set_status(Status(StatusCode.ERROR, request.fault))
        span.end(end)

    def close(self) -> None:
        """Send what is left, for a few seconds at most: the library would retry each batch for its whole timeout."""
        sending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        sending.start()
        sending.join(TRACE_CLOSING_S)


def trace_context(scope: Scope) -> dict[str, str]:
    """The trace headers of a request."""
    headers = Headers(scope=scope)
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}


def open_traces(endpoint: str) -> TraceExporter:
    """Raises ConfigError where spans cannot be sent there."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{endpoint!r} is not the URL of a collector; write it like http://127.0.0.1:4318{OTLP_PATH}",
            param="otlp_traces_endpoint",
        )
    protocol = next((os.environ[name] for name in OTLP_PROTOCOLS if os.environ.get(name)), OTLP_HTTP)
    if protocol != OTLP_HTTP:
        raise ConfigError(f"spans are sent by {OTLP_HTTP}, not by {protocol}", param="otlp_traces_endpoint")
    require_extra("otel", "--otlp-traces-endpoint", param="otlp_traces_endpoint")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    address = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}{OTLP_PATH}"
    return TraceExporter(OTLPSpanExporter(address, timeout=EXPORT_TIMEOUT_S))


OUTPUT_TYPES: Final = {"transcription": "text", "speech": "speech"}
"""The output types of operations, where the conventions have one."""


def generation_span(
    model: str, request: Request, last: Ended | Failed, reasons: tuple[str, ...], span: RequestSpan
) -> TracedRequest:
    found = operation_at(request.via)
    operation = "chat" if found is None else found.span
    events = {"prompt": span.queued_s}
    if last.usage.completion_tokens:
        events["first_token"] = span.queued_s + span.prompt_s
    return TracedRequest(
        f"{operation} {model}",
        {
            **_common_attributes(operation, model, request.id, request.via),
            **_generation_attributes(request, last, reasons, span),
        },
        span.took_s,
        events,
        last.error.code if isinstance(last, Failed) else None,
    )


def task_model_span(
    model: str,
    operation: str,
    answer: Reply,
    last: PoolingOutput | TranscriptionEnded | SpeechEnded | None,
    took_s: float,
    fault: str | None,
) -> TracedRequest:
    """The span of a request to a pooling or speech model. `last` is its last event, if it succeeded; else `fault` is
    its error."""
    found = {**_common_attributes(operation, model, answer.id, answer.scope["path"]), "gen_ai.latency.e2e": took_s}
    if operation in OUTPUT_TYPES:
        found["gen_ai.output.type"] = OUTPUT_TYPES[operation]
    if last is not None:
        found["gen_ai.latency.time_in_queue"] = last.queue_s
        found["gen_ai.latency.time_in_model_inference"] = last.compute_s
    if isinstance(last, PoolingOutput):
        found["gen_ai.usage.input_tokens"] = last.tokens
    if isinstance(last, TranscriptionEnded):
        found["gen_ai.usage.output_tokens"] = last.tokens
    if fault is not None:
        found["error.type"] = fault
    return TracedRequest(f"{operation} {model}", found, took_s, {}, fault)


def _common_attributes(operation: str, model: str, request_id: str, path: str) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "ingot",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request_id,
        "gen_ai.request.id": request_id,
        "url.path": path,
    }


def _generation_attributes(
    request: Request, last: Ended | Failed, reasons: tuple[str, ...], span: RequestSpan
) -> dict[str, Any]:
    found: dict[str, Any] = {
        **_sampling_attributes(request.sampling),
        "gen_ai.usage.input_tokens": last.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": last.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": last.usage.cached_tokens,
        "gen_ai.latency.time_in_queue": span.queued_s,
        "gen_ai.latency.time_in_model_prefill": span.prompt_s,
        "gen_ai.latency.time_in_model_decode": span.answer_s,
        "gen_ai.latency.e2e": span.took_s,
    }
    if request.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = request.max_tokens
    if request.n != 1:
        found["gen_ai.request.choice.count"] = request.n
    if reasons:
        found["gen_ai.response.finish_reasons"] = reasons
    if last.usage.completion_tokens:
        found["gen_ai.latency.time_to_first_token"] = span.queued_s + span.prompt_s
    if isinstance(last, Failed):
        found["error.type"] = last.error.code
    return found


def _sampling_attributes(sampling: Sampling) -> dict[str, Any]:
    names = ("temperature", "top_p", "frequency_penalty", "presence_penalty")
    found: dict[str, Any] = {f"gen_ai.request.{name}": getattr(sampling, name) for name in names}
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed is not None:
        found["gen_ai.request.seed"] = sampling.seed
    return found
