"""From a request to the endpoint of the model that it names, which is loaded for it where it is not there.

What a body says of its model is read before the rest of it, which depends on the model. A stream may begin before its
model is loaded: its head and keep-alives go out meanwhile. Light to import.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final

import anyio.to_thread
import msgspec
from msgspec import Struct
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from ingot.config import ModelEntry, Settings
from ingot.errors import BadRequest, IngotError
from ingot.http.body import JSON_TYPE, HeldBody, read_form
from ingot.http.edge import ClientGone, Reply, as_ingot_error, reply_of
from ingot.http.model_registry import CHAT_KIND, ModelRegistry
from ingot.http.request_lifetime import background_task
from ingot.http.streaming import (
    BARE_EVENTS,
    NDJSON_LINES,
    SSE_KEEP_ALIVE,
    SSE_MEDIA_TYPE,
    StreamedResponse,
    StreamFraming,
)
from ingot.protocol.errors import error_body
from ingot.protocol.terms import DEFAULT_NAME

KIND_OF_OPERATION: Final = {
    "createEmbedding": "embedding",
    "ollamaEmbed": "embedding",
    "ollamaEmbeddings": "embedding",
    "rerank": "rerank",
    "rerankV2": "rerank",
    "createTranscription": "audio",
    "createTranslation": "audio",
    "createSpeech": "speech",
}
"""Operations that are not for models that chat."""
ANY_KIND_OPERATIONS: Final = frozenset({"ollamaShow"})
"""Operations that tell of any model."""
STREAMING_OPERATIONS: Final = frozenset({"createChatCompletion", "createCompletion", "createMessage", "createResponse"})
STREAMING_BY_DEFAULT: Final = frozenset({"ollamaChat", "ollamaGenerate"})


class DispatchByBody:
    """One ASGI endpoint: an operation whose body, JSON or a form, names its model."""

    def __init__(self, models: ModelRegistry, operation: str, media_type: str = JSON_TYPE) -> None:
        self._models, self._operation, self._media_type = models, operation, media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._models.shared_state.bodies.reading(scope, receive, self._media_type) as body:
            wanted = await self._wanted(body, scope)
            entry = self._find(wanted.named)
            self._models.allow(entry, reply_of(scope))
            scope["state"]["body"] = body
            run = LeasedRequest(self._models, self._operation, entry, wanted)
            if self._streams(wanted) and not self._models.fleet.is_loaded(entry.name):
                await self._begin(run, scope, receive, send)
            else:
                await run(scope, receive, send)

    async def _wanted(self, body: HeldBody, scope: Scope) -> ModelSelection:
        if self._media_type == JSON_TYPE:
            return ModelSelection.of(body.raw)
        # A form holds a file, which takes a moment to look through.
        content_type = Headers(scope=scope).get("content-type", "")
        return await anyio.to_thread.run_sync(ModelSelection.of_form, body.raw, content_type)

    def _find(self, named: str | None) -> ModelEntry:
        if self._operation in ANY_KIND_OPERATIONS and named not in (None, DEFAULT_NAME):
            return self._models.named(named)
        return self._models.find(named, KIND_OF_OPERATION.get(self._operation, CHAT_KIND))

    def _streams(self, wanted: ModelSelection) -> bool:
        if self._operation in STREAMING_BY_DEFAULT:
            return wanted.stream is not False
        return self._operation in STREAMING_OPERATIONS and wanted.stream is True

    async def _begin(self, run: LeasedRequest, scope: Scope, receive: Receive, send: Send) -> None:
        answer = reply_of(scope)
        begun = EarlyStream(answer, send, self._models.settings)
        try:
            async with begun.waiting():
                await run.take(receive)
            await run.answer(scope, receive, begun.send)
        except ClientGone:
            raise
        except Exception as error:  # the head is out: what broke it is told in the stream
            await begun.fail(as_ingot_error(error, answer.id))
        finally:
            await run.end()


class DispatchByQuery:
    """One ASGI endpoint: an operation whose address may name its model, as `?model=`. Work loads it; to look at a model
    is no reason to."""

    def __init__(self, models: ModelRegistry, operation: str, *, works: bool) -> None:
        self._models, self._operation, self._works = models, operation, works

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = Request(scope).query_params.get("model")
        entry = self._models.find(named, CHAT_KIND) if self._works else self._models.loaded(named)
        self._models.allow(entry, reply_of(scope))
        await LeasedRequest(self._models, self._operation, entry)(scope, receive, send)


class LeasedRequest:
    """One request at one model: takes the lease, answers, ends it."""

    def __init__(
        self, models: ModelRegistry, operation: str, entry: ModelEntry, wanted: ModelSelection | None = None
    ) -> None:
        self._models, self._operation, self._entry, self._wanted = models, operation, entry, wanted or ModelSelection()
        self._stack = AsyncExitStack()
        self._endpoint: Callable[..., Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.take(receive)
            await self.answer(scope, receive, send)
        finally:
            await self.end()

    async def take(self, receive: Receive) -> None:
        """Wait for the model, as long as the client is there."""
        lease = self._models.lease(self._entry, self._wanted.unload_after_s, self._wanted.within_s)
        if self._models.fleet.is_loaded(self._entry.name):
            _, endpoints = await self._stack.enter_async_context(lease)
        else:
            _, endpoints = await self._models.shared_state.attended(
                receive, lambda: self._stack.enter_async_context(lease)
            )
        self._endpoint = endpoints[self._operation]

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._endpoint is not None
        if inspect.isroutine(self._endpoint):
            response = await self._endpoint(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await self._endpoint(scope, receive, send)

    async def end(self) -> None:
        self._endpoint = None
        await self._stack.aclose()


OLLAMA_LATEST: Final = ":latest"
DURATION_UNITS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(h|ms|us|µs|ns|m|s)")


class ModelSelection(Struct):
    """Whatever types these have: what is wrong with them is said by who reads all of the body."""

    model: Any = None
    name: Any = None  # what Ollama's clients called it once
    stream: Any = None
    keep_alive: Any = None  # Ollama's
    ttl: Any = None  # LM Studio's
    timeout: Any = None

    @classmethod
    def of(cls, raw: bytes) -> ModelSelection:
        try:
            return msgspec.json.decode(raw, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return cls()

    @classmethod
    def of_form(cls, raw: bytes, content_type: str) -> ModelSelection:
        try:
            form = read_form(raw, content_type)
        except BadRequest:
            return cls()
        told: dict[str, Any] = {name: form[name] for name in cls.__struct_fields__ if name in form}
        for name in ("ttl", "timeout"):
            with suppress(TypeError, ValueError):
                told[name] = float(told.get(name, ""))
        return cls(**told)

    @property
    def named(self) -> str | None:
        said = self.model if self.model is not None else self.name
        return said.removesuffix(OLLAMA_LATEST) if isinstance(said, str) else None

    @property
    def within_s(self) -> float | None:
        """How long the request may take in all; None where nothing is said, or nothing that can be."""
        return float(self.timeout) if _is_number(self.timeout) and self.timeout > 0 else None

    @property
    def unload_after_s(self) -> float | None:
        """How long the model is to stay after the request; infinite where it is to stay, None where nothing is said."""
        if _is_number(self.ttl):
            return float(max(0, self.ttl))
        seconds = _parse_duration(self.keep_alive)
        return math.inf if seconds is not None and seconds < 0 else seconds


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _parse_duration(value: Any) -> float | None:
    """Seconds, or Go's way to write them: `5m`, `1h30m`, `-1s`."""
    if _is_number(value):
        return float(value)
    if not isinstance(value, str):
        return None
    sign, text = (-1.0, value[1:]) if value.startswith("-") else (1.0, value.removeprefix("+"))
    if text.isdecimal():
        return sign * float(text)
    parts = DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sign * sum(float(number) * DURATION_UNITS[unit] for number, unit in parts)


class StreamErrorEvent(Struct, tag_field="type", tag="error", kw_only=True):
    """The event by which a stream of `/v1/responses` ends that never became one."""

    code: str
    message: str
    param: str | None
    sequence_number: int = 0


def _frame_error_event(buffer: bytearray, chunk: Struct) -> None:
    buffer += b"event: error\ndata: "
    buffer += msgspec.json.encode(chunk)
    buffer += b"\n\n"


NAMED_ERRORS = StreamFraming(SSE_MEDIA_TYPE, _frame_error_event, alive=SSE_KEEP_ALIVE)


def framing_of_path(path: str) -> StreamFraming:
    if path.startswith("/api/"):
        return NDJSON_LINES
    return NAMED_ERRORS if path.startswith(("/v1/messages", "/v1/responses")) else BARE_EVENTS


class EarlyStream:
    """What an endpoint is given to send by, once the head is out: it says the head again, which goes nowhere."""

    def __init__(self, answer: Reply, send: Send, settings: Settings) -> None:
        self._answer, self._send = answer, send
        self._out = StreamedResponse(send, framing_of_path(answer.scope["path"]), settings)

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """The head goes out, and signs of life for as long as the block lasts."""
        await self._out.start()
        async with background_task(self._out.keep_alive(list)):
            yield

    async def send(self, message: Message) -> None:
        if message["type"] != "http.response.start":
            await self._send(message)

    async def fail(self, error: IngotError) -> None:
        """The stream ends in words, as its protocol has them."""
        path = self._answer.scope["path"]
        body: Struct = error_body(error, path, self._answer.id)
        if path.startswith("/v1/responses"):
            body = StreamErrorEvent(code=error.code or "", message=error.message, param=error.param)
        await self._out.end(self._out.framing.framed([body]))
