"""Adapters that come and go while the server runs: for the administrator, and only where the settings allow it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from ingot.errors import Forbidden
from ingot.http.edge import Json, answer_of
from ingot.http.service import Service
from ingot.protocol.lora_adapters import LoraChanged, read_load, read_unload


def lora_endpoints(service: Service) -> dict[str, Any]:
    async def load(value: Any) -> LoraChanged:
        body, note = read_load(value, service.served)
        made = await anyio.to_thread.run_sync(service.engine.load_lora, body.lora_name, Path(body.lora_path))
        return LoraChanged(id=made.name, status="loaded", parent=service.engine.card.name, rank=made.rank, ingot=note)

    async def unload(value: Any) -> LoraChanged:
        body, note = read_unload(value, service.served)
        await anyio.to_thread.run_sync(service.engine.unload_lora, body.lora_name)
        return LoraChanged(id=body.lora_name, status="unloaded", parent=service.engine.card.name, ingot=note)

    return {"loadLora": _changes(service, load), "unloadLora": _changes(service, unload)}


def _changes(service: Service, change: Callable[[Any], Awaitable[LoraChanged]]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        answer = answer_of(request.scope)
        if not answer.admin:
            raise Forbidden("Only the administrator may load adapters: send the key given as --admin-api-key.")
        if not service.settings.allow_runtime_lora_updating:
            raise Forbidden("Adapters cannot be changed here: start the server with --allow-runtime-lora-updating.")
        async with service.bodies.reading(request.scope, request.receive) as body:
            value = await service.read(body.raw, lambda value: value, answer.tenant)
        told = await change(value)
        service.look_at_loras()
        return Json(told)

    return endpoint
