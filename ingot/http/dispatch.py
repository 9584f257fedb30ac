"""From a request to the endpoint of the model that it names, which is loaded for it where it is not there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Final

import anyio.to_thread
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ingot.config import ModelEntry
from ingot.http.body import JSON, Body
from ingot.http.edge import ClientGone, answer_of, as_ingot_error
from ingot.http.fleet.begun import BegunStream
from ingot.http.fleet.wanted import Wanted
from ingot.http.model_registry import CHAT, Models
from ingot.protocol.model_names import DEFAULT_NAME

KINDS: Final = {
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
ANY_KIND: Final = frozenset({"ollamaShow"})
"""Operations that tell of any model."""
STREAMS: Final = frozenset({"createChatCompletion", "createCompletion", "createMessage", "createResponse"})
STREAMS_BY_DEFAULT: Final = frozenset({"ollamaChat", "ollamaGenerate"})


class ByBody:
    """One ASGI endpoint: an operation whose body, JSON or a form, names its model."""

    def __init__(self, models: Models, operation: str, media_type: str = JSON) -> None:
        self._models, self._operation, self._media_type = models, operation, media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._models.hall.bodies.reading(scope, receive, self._media_type) as body:
            wanted = await self._wanted(body, scope)
            entry = self._find(wanted.named)
            self._models.allow(entry, answer_of(scope))
            scope["state"]["body"] = body
            run = Leased(self._models, self._operation, entry, wanted)
            if self._streams(wanted) and not self._models.fleet.is_loaded(entry.name):
                await self._begin(run, scope, receive, send)
            else:
                await run(scope, receive, send)

    async def _wanted(self, body: Body, scope: Scope) -> Wanted:
        if self._media_type == JSON:
            return Wanted.of(body.raw)
        # A form holds a file, which takes a moment to look through.
        content_type = Headers(scope=scope).get("content-type", "")
        return await anyio.to_thread.run_sync(Wanted.of_form, body.raw, content_type)

    def _find(self, named: str | None) -> ModelEntry:
        if self._operation in ANY_KIND and named not in (None, DEFAULT_NAME):
            return self._models.named(named)
        return self._models.find(named, KINDS.get(self._operation, CHAT))

    def _streams(self, wanted: Wanted) -> bool:
        if self._operation in STREAMS_BY_DEFAULT:
            return wanted.stream is not False
        return self._operation in STREAMS and wanted.stream is True

    async def _begin(self, run: Leased, scope: Scope, receive: Receive, send: Send) -> None:
        answer = answer_of(scope)
        begun = BegunStream(answer, send, self._models.settings)
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


class ByQuery:
    """One ASGI endpoint: an operation whose address may name its model, as `?model=`. Work loads it; to look at a model
    is no reason to."""

    def __init__(self, models: Models, operation: str, *, works: bool) -> None:
        self._models, self._operation, self._works = models, operation, works

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = Request(scope).query_params.get("model")
        entry = self._models.find(named, CHAT) if self._works else self._models.loaded(named)
        self._models.allow(entry, answer_of(scope))
        await Leased(self._models, self._operation, entry)(scope, receive, send)


class Leased:
    """One request at one model: takes the lease, answers, ends it."""

    def __init__(self, models: Models, operation: str, entry: ModelEntry, wanted: Wanted | None = None) -> None:
        self._models, self._operation, self._entry, self._wanted = models, operation, entry, wanted or Wanted()
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
        lease = self._models.lease(self._entry, self._wanted.kept_s, self._wanted.within_s)
        if self._models.fleet.is_loaded(self._entry.name):
            _, endpoints = await self._stack.enter_async_context(lease)
        else:
            _, endpoints = await self._models.hall.attended(receive, lambda: self._stack.enter_async_context(lease))
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
