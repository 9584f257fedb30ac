"""The endpoints about kept prompts. Each tenant sees, asks about, clears and moves its own.

The engine answers between two steps; waiting for that must not hold up the streams, so it is done in threads.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from ingot.engine.request import CacheReport
from ingot.http.body import check_media_type, pieces_of, read_json_bytes
from ingot.http.edge import Json, answer_of
from ingot.http.service import Service
from ingot.protocol.answers import Job
from ingot.protocol.cache import FILE, AdoptedBody, CacheBody, ClearedBody, ExplainedBody, read_question


def cache_endpoints(service: Service) -> dict[str, Any]:
    engine = service.engine

    async def show(request: Request) -> Response:
        return Json(CacheBody.of(await asyncio.to_thread(engine.kept.status, answer_of(request.scope).tenant)))

    async def clear(request: Request) -> Response:
        return Json(ClearedBody(await asyncio.to_thread(engine.kept.clear, answer_of(request.scope).tenant)))

    async def explain(request: Request) -> Response:
        answer = answer_of(request.scope)
        served = service.served_to(answer.tenant)
        raw = await read_json_bytes(request.scope, request.receive)
        job = await service.read(raw, lambda value: read_question(value, served, answer.id))
        return Json(ExplainedBody.of(job, await asyncio.to_thread(explained, job, answer.tenant)))

    def explained(job: Job, tenant: str) -> list[CacheReport]:
        request = replace(job.request, tenant=tenant)
        return [engine.kept.explain(request, number) for number in range(len(request.prompts))]

    async def adopt(request: Request) -> Response:
        check_media_type(request.headers, FILE)
        async with desk.file() as path:
            with path.open("wb") as file:
                async for piece in pieces_of(request.receive):
                    file.write(piece)
            tenant = answer_of(request.scope).tenant
            return Json(AdoptedBody(await asyncio.to_thread(engine.kept.adopt, tenant, path)))

    desk = Desk()
    return {
        "showCache": show,
        "clearCache": clear,
        "explainCache": explain,
        "exportCache": Export(service, desk),
        "importCache": adopt,
    }


class Desk:
    """Where kept prompts become files. One at a time: each may take as much of the disk as the cache has memory."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def file(self) -> AsyncIterator[Path]:
        async with self._turn:
            with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
                yield Path(folder) / "kept.safetensors"


class Export:
    """One ASGI endpoint, which has its file as long as it takes to send it."""

    def __init__(self, service: Service, desk: Desk) -> None:
        self.service, self.desk = service, desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.desk.file() as path:
            await asyncio.to_thread(self.service.engine.kept.export, answer_of(scope).tenant, path)
            await FileResponse(path, media_type=FILE, filename=path.name)(scope, receive, send)
