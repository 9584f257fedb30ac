"""The endpoints about the prefix cache. Each tenant sees, asks about, clears and moves its own.

The engine answers between two steps; waiting for that must not hold up the streams, so it is done in threads. What
takes long, moving files, ends with its client and with the server.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from ingot.config.keys import ArchiveKey
from ingot.engine.request import CacheReport
from ingot.errors import Forbidden
from ingot.http.body import body_clock, body_pieces, check_media_type, is_too_slow
from ingot.http.edge import ClientGone, JsonResponse, reply_of
from ingot.http.service import GenerationService
from ingot.http.shared_state import FairTurns
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.ingot_api.cache import CacheBody, ClearedBody, ExplainedBody, ImportedBody, read_explainable_body
from ingot.protocol.operations import FILE
from ingot.protocol.responses.request import ResponseContext

T = TypeVar("T")
KeepGoing = Callable[[], bool]
MOST_ARCHIVE_FILES: Final = 8
MOST_WAITING_ARCHIVES: Final = 4
CROSS_SITE: Final = ("cross-site", "same-site")


def cache_endpoints(service: GenerationService, around: Callable[[str], ResponseContext]) -> dict[str, Any]:
    """`around` is what a tenant's bodies of `/v1/responses` are read in the light of."""
    engine = service.engine

    async def show(request: Request) -> Response:
        answer = reply_of(request.scope)
        status = await asyncio.to_thread(engine.kept.status, answer.tenant)
        return JsonResponse(CacheBody.of(status, admin=answer.admin))

    async def clear(request: Request) -> Response:
        return JsonResponse(ClearedBody(await asyncio.to_thread(engine.kept.clear, reply_of(request.scope).tenant)))

    async def explain(request: Request) -> Response:
        answer = reply_of(request.scope)
        served = service.served_for(answer.tenant)
        async with service.shared_state.bodies.reading(request.scope, request.receive) as body:
            job = await service.read(
                body.raw,
                lambda value: read_explainable_body(value, served, answer.id, around(answer.tenant)),
                answer.tenant,
            )
        return JsonResponse(ExplainedBody.of(job, await asyncio.to_thread(explained, job, answer.tenant)))

    def explained(job: GenerationTask, tenant: str) -> list[CacheReport]:
        request = replace(job.request, tenant=tenant)
        return [engine.kept.explain(request, number) for number in range(len(request.prompts))]

    transfers = ArchiveTransfers(service)
    return {
        "showCache": show,
        "clearCache": clear,
        "explainCache": explain,
        "exportCache": CacheExportEndpoint(transfers),
        "importCache": CacheImportEndpoint(transfers),
    }


class ArchiveTransfers:
    """Exports and imports of cached prompts: one file is written or read at a time, by turns of the tenants, while
    others may be sent and received. Each may take twice as much of the disk as the cache has memory, so a
    tenant has one, and there are a few in all."""

    def __init__(self, service: GenerationService) -> None:
        self.engine = service.engine
        self.key = ArchiveKey(service.shared_state.settings.archive_key_file)
        self._service = service
        self._files = FairTurns("archive files", at_once=MOST_ARCHIVE_FILES, each=1, waiting=MOST_WAITING_ARCHIVES)
        self._turns = FairTurns("archive work", at_once=1, each=1, waiting=MOST_WAITING_ARCHIVES)

    @asynccontextmanager
    async def file(self, tenant: str) -> AsyncIterator[Path]:
        async with self._files.turn(tenant):
            with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
                yield Path(folder) / "kept.safetensors"

    async def attended(self, receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
        return await self._service.shared_state.attended(receive, work)

    async def work(self, tenant: str, receive: Receive, work: Callable[[KeepGoing], T]) -> T:
        """What `work` gives, in a thread. It is to stop when the client leaves, time is up, or the server stops."""

        async def in_turn() -> T:
            async with self._turns.turn(tenant):
                return await run_stoppable(work)

        return await self.attended(receive, in_turn)


async def run_stoppable(work: Callable[[KeepGoing], T]) -> T:
    """`work` in a thread, which is to stop when this is cancelled, and is waited for."""
    stopped = threading.Event()
    task = asyncio.create_task(asyncio.to_thread(work, lambda: not stopped.is_set()))
    try:
        return await asyncio.shield(task)
    finally:
        stopped.set()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task])


class CacheExportEndpoint:
    """One ASGI endpoint, which has its file as long as it takes to send it. That is at no less than the slowest pace,
    as files may be awaited by others."""

    def __init__(self, transfers: ArchiveTransfers) -> None:
        self.transfers = transfers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refuse_other_sites(Headers(scope=scope))
        tenant = reply_of(scope).tenant
        async with AsyncExitStack() as stack:
            waits = partial(stack.enter_async_context, self.transfers.file(tenant))
            path = await self.transfers.attended(receive, waits)

            def export(going: KeepGoing) -> int:
                return self.transfers.engine.kept.export(tenant, path, self.transfers.key.secret(), going)

            await self.transfers.work(tenant, receive, export)
            await FileResponse(path, media_type=FILE, filename=path.name)(scope, receive, send_at_pace(send))


class CacheImportEndpoint:
    """One ASGI endpoint, for the administrator: what it imports counts as what a model here computed."""

    def __init__(self, transfers: ArchiveTransfers) -> None:
        self.transfers = transfers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = reply_of(scope)
        answer.require_admin("import cached prompts")
        check_media_type(Headers(scope=scope), FILE)
        async with self.transfers.file(answer.tenant) as path:
            with path.open("wb") as file:
                async for piece in body_pieces(receive):
                    file.write(piece)

            def adopt(going: KeepGoing) -> int:
                return self.transfers.engine.kept.adopt(answer.tenant, path, self.transfers.key.secret(), going)

            added = await self.transfers.work(answer.tenant, receive, adopt)
        await JsonResponse(ImportedBody(added))(scope, receive, send)


def send_at_pace(send: Send) -> Send:
    """`send`, as long as the client reads a body fast enough; its connection is closed then."""
    began, size = body_clock(), 0

    async def paced(message: Message) -> None:
        nonlocal size
        await send(message)
        size += len(message.get("body", b""))
        if message.get("more_body") and is_too_slow(body_clock() - began, size):
            raise ClientGone

    return paced


def refuse_other_sites(headers: Headers) -> None:
    """A page elsewhere can make a browser fetch an address, and so write files, without saying where it comes from.
    Origins that are named were judged by the guard."""
    if "origin" not in headers and headers.get("sec-fetch-site", "").lower() in CROSS_SITE:
        raise Forbidden("Pages of other sites may not fetch the prefix cache.")
