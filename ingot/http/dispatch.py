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
from ingot.http.body import FORM_TYPE, JSON_TYPE, HeldBody, read_form
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
        if self._operation.kind != "any":
            return self._models.find(named, self._operation.kind)
        return self._models.find(named, CHAT_KIND) if named in (None, DEFAULT_NAME) else self._models.named(named)

    def _streams(self, wanted: ModelSelection) -> bool:
        if self._operation.begins == "unless refused":
            return wanted.stream is not False
        return self._operation.begins is not None and wanted.stream is True

    async def _begin(self, run: LeasedRequest, scope: Scope, receive: Receive, send: Send) -> None:
        answer = reply_of(scope)
        begun = EarlyStream(self._operation, answer, send, self._models.settings)
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

    def __init__(self, models: ModelRegistry, operation: Operation) -> None:
        self._models, self._operation = models, operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = Request(scope).query_params.get("model")
        kind = self._operation.kind
        entry = self._models.find(named, kind) if self._operation.runs else self._models.loaded(named, kind)
        self._models.allow(entry, reply_of(scope))
        await LeasedRequest(self._models, self._operation, entry)(scope, receive, send)


class LeasedRequest:
    """One request at one model: takes the lease, answers, ends it."""

    def __init__(
        self, models: ModelRegistry, operation: Operation, entry: ModelEntry, wanted: ModelSelection | None = None
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
        self._endpoint = endpoints[self._operation.name]

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


class EarlyStream:
    """What an endpoint is given to send by, once the head is out: it says the head again, which goes nowhere."""

    def __init__(self, operation: Operation, answer: Reply, send: Send, settings: Settings) -> None:
        self._answer, self._send = answer, send
        self._out = StreamedResponse(send, FRAMINGS[operation.framing], settings)

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
        last = error_event(error, self._answer.scope["path"], self._answer.id)
        await self._out.end(self._out.framing.framed([last]))
