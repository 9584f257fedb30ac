"""Routes a request to the endpoint of the model that it names, which is loaded first if necessary.

The body's model fields are decoded before the rest of it, which depends on the model. A stream may begin before its
model is loaded: its headers and keep-alives are sent meanwhile. Light to import.
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
from ingot.http.body import FORM_TYPE, JSON_TYPE, RequestBody, read_form
from ingot.http.edge import ClientGone, Reply, as_ingot_error, reply_of
from ingot.http.model_registry import CHAT_KIND, ModelRegistry
from ingot.http.request_lifetime import background_task
from ingot.http.streaming import FRAMINGS, StreamedResponse
from ingot.protocol.errors import error_event
from ingot.protocol.operations import Operation
from ingot.protocol.terms import DEFAULT_NAME


class DispatchByBody:
    """One ASGI endpoint: an operation whose body, JSON or a form, names its model."""

    def __init__(self, models: ModelRegistry, operation: Operation) -> None:
        self._models, self._operation = models, operation
        self._media_type = FORM_TYPE if operation.takes == "form" else JSON_TYPE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._models.is_resident and self._operation.kind != "any":  # whatever the body names
            only = self._models.find(None, self._operation.kind)
            await LeasedRequest(self._models, self._operation, only)(scope, receive, send)
            return
        async with self._models.shared_state.bodies.reading(scope, receive, self._media_type) as body:
            selection = await self._select(body, scope)
            entry = self._find(selection.model_name)
            self._models.allow(entry, reply_of(scope))
            scope["state"]["body"] = body
            run = LeasedRequest(self._models, self._operation, entry, selection)
            if self._streams(selection) and not self._models.fleet.is_loaded(entry.name):
                await self._stream_early(run, scope, receive, send)
            else:
                await run(scope, receive, send)

    async def _select(self, body: RequestBody, scope: Scope) -> ModelSelection:
        if self._media_type == JSON_TYPE:
            return ModelSelection.of(body.raw)
        # A form holds a file, which takes a moment to parse.
        content_type = Headers(scope=scope).get("content-type", "")
        return await anyio.to_thread.run_sync(ModelSelection.of_form, body.raw, content_type)

    def _find(self, name: str | None) -> ModelEntry:
        if self._operation.kind != "any":
            return self._models.find(name, self._operation.kind)
        return self._models.find(name, CHAT_KIND) if name in (None, DEFAULT_NAME) else self._models.named(name)

    def _streams(self, selection: ModelSelection) -> bool:
        if self._operation.begins == "unless refused":
            return selection.stream is not False
        return self._operation.begins is not None and selection.stream is True

    async def _stream_early(self, run: LeasedRequest, scope: Scope, receive: Receive, send: Send) -> None:
        reply = reply_of(scope)
        out = EarlyStream(self._operation, reply, send, self._models.settings)
        try:
            async with out.waiting():
                await run.take(receive)
            await run.answer(scope, receive, out.send)
        except ClientGone:
            raise
        except Exception as error:  # the headers are sent: the error goes into the stream
            await out.fail(as_ingot_error(error, reply.id))
        finally:
            await run.end()


class DispatchByQuery:
    """One ASGI endpoint: an operation whose URL may name its model, as `?model=`. Only one that runs the engine loads
    the model."""

    def __init__(self, models: ModelRegistry, operation: Operation) -> None:
        self._models, self._operation = models, operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, kind = Request(scope).query_params.get("model"), self._operation.kind
        entry = self._models.find(name, kind) if self._operation.runs else self._models.loaded(name, kind)
        self._models.allow(entry, reply_of(scope))
        await LeasedRequest(self._models, self._operation, entry)(scope, receive, send)


class LeasedRequest:
    """One request to one model: takes the lease, answers, ends it."""

    def __init__(
        self, models: ModelRegistry, operation: Operation, entry: ModelEntry, selection: ModelSelection | None = None
    ) -> None:
        self._models, self._operation, self._entry = models, operation, entry
        self._selection = selection or ModelSelection()
        self._stack = AsyncExitStack()
        self._endpoint: Callable[..., Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.take(receive)
            await self.answer(scope, receive, send)
        finally:
            await self.end()

    async def take(self, receive: Receive) -> None:
        """Wait for the model, as long as the client is connected."""
        lease = self._models.lease(self._entry, self._selection.unload_after_s, self._selection.within_s)
        if self._models.fleet.is_loaded(self._entry.name):
            _, endpoints = await self._stack.enter_async_context(lease)
        else:
            _, endpoints = await self._models.shared_state.attended(
                receive, lambda: self._stack.enter_async_context(lease)
            )
        self._endpoint = await endpoints.find(self._operation.name)

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
    """The body's fields about its model, of any type: the reader of the whole body refuses invalid ones."""

    model: Any = None
    name: Any = None  # Ollama's older name of `model`
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
        fields: dict[str, Any] = {name: form[name] for name in cls.__struct_fields__ if name in form}
        for name in ("ttl", "timeout"):
            with suppress(TypeError, ValueError):
                fields[name] = float(fields.get(name, ""))
        return cls(**fields)

    @property
    def model_name(self) -> str | None:
        name = self.model if self.model is not None else self.name
        return name.removesuffix(OLLAMA_LATEST) if isinstance(name, str) else None

    @property
    def within_s(self) -> float | None:
        """How long the request may take in all; None where it is not set, or invalid."""
        return float(self.timeout) if _is_number(self.timeout) and self.timeout > 0 else None

    @property
    def unload_after_s(self) -> float | None:
        """How long the model stays loaded after the request, which may be infinite; None where it is not set."""
        if _is_number(self.ttl):
            return float(max(0, self.ttl))
        seconds = _parse_duration(self.keep_alive)
        return math.inf if seconds is not None and seconds < 0 else seconds


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _parse_duration(value: Any) -> float | None:
    """Seconds, or a duration in Go's notation: `5m`, `1h30m`, `-1s`."""
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


class EarlyStream:
    """A stream whose headers are sent before its endpoint runs. `send` drops the endpoint's own headers."""

    def __init__(self, operation: Operation, reply: Reply, send: Send, settings: Settings) -> None:
        self._reply, self._send = reply, send
        self._out = StreamedResponse(send, FRAMINGS[operation.framing], settings)

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Sends the headers, and keep-alives for as long as the block lasts."""
        await self._out.start()
        async with background_task(self._out.keep_alive(list)):
            yield

    async def send(self, message: Message) -> None:
        if message["type"] != "http.response.start":
            await self._send(message)

    async def fail(self, error: IngotError) -> None:
        """Ends the stream with the protocol's error event."""
        last = error_event(error, self._reply.scope["path"], self._reply.id)
        await self._out.end(self._out.framing.framed([last]))
