"""Spans of requests, as a collector gets them over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import pytest

from ingot.errors import ConfigError, Overloaded
from ingot.http.tracing import TraceExporter, open_traces
from tests.http.asgi import call
from tests.http.endpoints.test_audio import form
from tests.http.scripted import ScriptedEngine, build_app, failing, settings
from tests.http.scripted_encoders import EncodingEngine
from tests.http.scripted_hearing import HearingEngine
from tests.http.scripted_speaking import SpeakingEngine
from tests.waiting import WAIT_S

otlp = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytestmark = pytest.mark.anyio

SECRET = "the words of the prompt"
MESSAGES = {"messages": [{"role": "user", "content": SECRET}], "temperature": 0.5, "max_tokens": 9}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Takes spans as OpenTelemetry's collector does."""

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.raw.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *answer: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def spans(self) -> list[Any]:
        bodies = [otlp.ExportTraceServiceRequest.FromString(raw) for raw in self.raw]
        return [
            span
            for body in bodies
            for resource in body.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL", raising=False)
    made = Collector()
    yield made
    made.close()


async def spans_of(engine: ScriptedEngine, collector: Collector, **sent: Any) -> list[Any]:
    app = build_app(engine, settings(otlp_traces_endpoint=collector.url))  # type: ignore[arg-type]
    await call(app, **sent)
    await app.state.service.stop()
    return collector.spans()


def values(attributes: Any) -> dict[str, Any]:
    def value(answer: Any) -> Any:
        kind = answer.WhichOneof("value")
        return [value(one) for one in answer.array_value.values] if kind == "array_value" else getattr(answer, kind)

    return {attribute.key: value(attribute.value) for attribute in attributes}


async def test_a_request_is_a_span_in_the_words_of_the_conventions(collector: Collector) -> None:
    [span] = await spans_of(ScriptedEngine(), collector, body=MESSAGES)
    answer = values(span.attributes)
    assert (span.name, span.kind) == ("chat org/toy", 2)
    assert answer["gen_ai.operation.name"] == "chat"
    assert answer["gen_ai.request.model"] == answer["gen_ai.response.model"] == "org/toy"
    assert (answer["gen_ai.request.temperature"], answer["gen_ai.request.max_tokens"]) == (0.5, 9)
    assert answer["gen_ai.response.finish_reasons"] == ["stop"]
    assert answer["gen_ai.usage.output_tokens"] == 3
    assert answer["gen_ai.usage.input_tokens"] > 0
    assert answer["gen_ai.latency.time_in_queue"] == 0.1
    assert answer["gen_ai.latency.time_to_first_token"] == pytest.approx(0.3)
    assert [event.name for event in span.events] == ["prompt", "first_token"]
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(0.6e9, rel=1e-3)
    assert span.events[0].time_unix_nano - span.start_time_unix_nano == pytest.approx(0.1e9, rel=1e-3)


async def test_nothing_of_what_was_asked_or_answered_is_sent(collector: Collector) -> None:
    await spans_of(ScriptedEngine(), collector, body=MESSAGES)
    [raw] = collector.raw
    assert b"org/toy" in raw
    assert SECRET.encode() not in raw and b"Hello" not in raw


async def test_a_request_is_a_part_of_what_its_client_says(collector: Collector) -> None:
    [span] = await spans_of(ScriptedEngine(), collector, body=MESSAGES, headers={"traceparent": PARENT})
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert span.parent_span_id.hex() == "b7ad6b7169203331"


async def test_what_its_client_does_not_want_traced_is_not(collector: Collector) -> None:
    assert await spans_of(ScriptedEngine(), collector, body=MESSAGES, headers={"traceparent": PARENT[:-1] + "0"}) == []


async def test_a_failed_request_is_a_failed_span(collector: Collector) -> None:
    [span] = await spans_of(ScriptedEngine(failing(Overloaded("full"))), collector, body=MESSAGES)
    assert values(span.attributes)["error.type"] == Overloaded.code
    assert (span.status.code, span.status.message) == (2, Overloaded.code)


@pytest.mark.parametrize(
    ("engine", "path", "body", "operation", "answer"),
    [
        (EncodingEngine, "/v1/embeddings", {"input": SECRET}, "embeddings", {"gen_ai.usage.input_tokens": 25}),
        (EncodingEngine, "/v1/rerank", {"query": "q", "documents": [SECRET]}, "rerank", {}),
        (HearingEngine, "/v1/audio/transcriptions", form(), "transcription", {"gen_ai.output.type": "text"}),
        (SpeakingEngine, "/v1/audio/speech", {"input": "A fox."}, "speech", {"gen_ai.output.type": "speech"}),
    ],
)
async def test_a_request_that_generates_nothing_is_a_span_of_its_own_model(
    collector: Collector, engine: type[ScriptedEngine], path: str, body: Any, operation: str, answer: dict[str, Any]
) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"} if isinstance(body, bytes) else {}
    made = engine()
    [span] = await spans_of(made, collector, path=path, body=body, headers=headers)
    found = values(span.attributes)
    [model] = [each.card.name for each in made.alongside if span.name == f"{operation} {each.card.name}"]
    assert found["gen_ai.operation.name"] == operation and found["gen_ai.request.model"] == model
    assert found["gen_ai.latency.time_in_queue"] > 0 and found["gen_ai.latency.time_in_model_inference"] > 0
    assert answer.items() <= found.items()
    assert SECRET.encode() not in collector.raw[0]


async def test_a_refused_one_is_a_failed_span(collector: Collector) -> None:
    engine = EncodingEngine()
    engine.refusal = Overloaded("full")
    [span] = await spans_of(engine, collector, path="/v1/embeddings", body={"input": "a"})
    assert (span.status.code, span.status.message) == (2, Overloaded.code)


async def test_a_collector_that_is_away_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    made = settings(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    app = build_app(ScriptedEngine(), made)  # type: ignore[arg-type]
    for _ in range(3):
        assert (await call(app, body=MESSAGES)).status == 200


async def test_a_collector_that_takes_nothing_does_not_keep_a_server_from_stopping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = threading.Event()

    class Stuck:
        def export(self, spans: Any) -> Any:
            options.wait(WAIT_S)

        def shutdown(self) -> None:
            pass

    monkeypatch.setattr("ingot.http.tracing.TRACE_CLOSING_S", 0.1)
    monkeypatch.setattr("ingot.http.service.open_traces", lambda endpoint: TraceExporter(Stuck()))
    app = build_app(ScriptedEngine(), settings(otlp_traces_endpoint="http://127.0.0.1:9"))  # type: ignore[arg-type]
    assert (await call(app, body=MESSAGES)).status == 200
    with anyio.fail_after(WAIT_S):
        await app.state.service.stop()
    options.set()


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://127.0.0.1:4317", "http://"])
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="collector"):
        open_traces(endpoint)


def test_another_protocol_than_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="grpc"):
        open_traces("http://127.0.0.1:4318")
