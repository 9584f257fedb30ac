"""The endpoints about kept prompts. Each tenant sees, asks about and clears its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ingot.engine.request import CacheReport
from ingot.http.body import read_json_bytes
from ingot.http.edge import Json, answer_of
from ingot.http.service import Service
from ingot.protocol.answers import Job
from ingot.protocol.cache import CacheBody, ClearedBody, ExplainedBody, read_question


def cache_endpoints(service: Service) -> dict[str, Any]:
    engine = service.engine

    # The engine answers between two steps; waiting for that must not hold up the streams.

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

    return {"showCache": show, "clearCache": clear, "explainCache": explain}
