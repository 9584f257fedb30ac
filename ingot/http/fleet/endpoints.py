"""The endpoints that tell of all models, or change which are loaded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ingot.engine.fleet_standing import Standing
from ingot.engine.health import Health
from ingot.errors import Forbidden
from ingot.http.edge import Json, answer_of
from ingot.http.endpoints.live import live_endpoints
from ingot.http.endpoints.monitoring import metrics_endpoints
from ingot.http.endpoints.requests import request_endpoints
from ingot.http.model_registry import Models
from ingot.http.responses.stored import StoredResponses
from ingot.protocol.model_listings import running_of, tags_of, version
from ingot.protocol.openai.models import ModelBody, list_standings, standing_body
from ingot.protocol.side_served import SideServed


def fleet_endpoints(models: Models) -> dict[str, Any]:
    """By the names of their operations."""
    hall = models.hall

    def standings(request: Request) -> list[tuple[Standing, SideServed | None]]:
        known = {service.served.card.name: service.served for service in models.services()}
        key = hall.tenants.key_of(answer_of(request.scope).tenant)
        return [(stands, known.get(stands.name)) for stands in models.standings(key)]

    def telling(tell: Callable[[list[tuple[Standing, SideServed | None]]], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return Json(tell(standings(request)))

        return endpoint

    def body_of(name: str, request: Request) -> ModelBody:
        entry = models.named(name)
        return next(standing_body(*each) for each in standings(request) if each[0].name == entry.name)

    async def one(request: Request) -> Response:
        models.allow(models.named(request.path_params["model"]), answer_of(request.scope))
        return Json(body_of(request.path_params["model"], request))

    def changing(change: Callable[[str], Awaitable[None]]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            if not answer_of(request.scope).admin:
                raise Forbidden(
                    "Only the administrator may load and unload models: send the key that the server was started with "
                    "as --admin-api-key."
                )
            name = models.named(request.path_params["model"]).name
            await hall.attended(request.receive, lambda: change(name))
            return Json(body_of(name, request))

        return endpoint

    async def load(name: str) -> None:
        async with models.fleet.lease(name):
            pass

    async def ollama_version(request: Request) -> Response:
        return Json(version())

    def health() -> Health:
        return hall.health(models.health())

    return {
        "listModels": telling(list_standings),
        "retrieveModel": one,
        "loadModel": changing(load),
        "unloadModel": changing(models.fleet.unload),
        "swapModel": changing(models.fleet.swap),
        "ollamaTags": telling(tags_of),
        "ollamaRunning": telling(running_of),
        "ollamaVersion": ollama_version,
        **request_endpoints(models, hall.ended),
        **StoredResponses(hall).endpoints(),
        **live_endpoints(hall, models.generating, health),
        **metrics_endpoints(models.generating, models.services, hall),
    }
