"""The endpoints for whoever watches the server: requests in progress, the page about the engine, metrics and loads.

Each tenant sees its own requests and no others. Metrics are of all tenants, and so are for the administrator. Figures
are read as they stand: nobody waits for the engine, and the engine for nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ingot.engine.request import RequestStatus
from ingot.engine.status import CacheBranch, Health
from ingot.errors import NotFound, Unavailable
from ingot.http.edge import JsonResponse, reply_of
from ingot.http.model_registry import ModelRegistry
from ingot.http.service import GenerationService, ModelService
from ingot.http.shared_state import SharedState
from ingot.observe.metrics import CONTENT_TYPE, Metric, RecentByTenant
from ingot.protocol.ingot_api.cache import CacheTreeBody
from ingot.protocol.ingot_api.metrics import (
    generating_model_metrics,
    loads_body,
    rank_metrics,
    render_metrics,
    task_model_metrics,
)
from ingot.protocol.ingot_api.requests import (
    PAST_S,
    CancelledRequestBody,
    RequestStatusBody,
    list_requests,
    live_body,
    live_engine_body,
)
from ingot.protocol.lora_adapters import lora_info_metric

if TYPE_CHECKING:
    from ingot.engine.engine import Engine


def request_endpoints(models: ModelRegistry, past: RecentByTenant[RequestStatusBody]) -> dict[str, Any]:
    """`past` are the requests that ended lately."""

    async def own(request: Request) -> list[RequestStatus]:
        # Engines may have to be asked, which must not hold up the streams.
        statuses = await asyncio.to_thread(models.status)
        tenant = reply_of(request.scope).tenant
        return [status for status in statuses if status.tenant == tenant]

    async def running(request: Request) -> Response:
        return JsonResponse(list_requests(await own(request)))

    async def one(request: Request) -> Response:
        request_id = request.path_params["id"]
        for status in await own(request):
            if status.id == request_id:
                return JsonResponse(RequestStatusBody.running(status))
        ended = past.get(reply_of(request.scope).tenant, request_id)
        if ended is None:
            raise NotFound(f"No request '{request_id[:100]}' runs or ended lately.")
        return JsonResponse(ended)

    async def cancel(request: Request) -> Response:
        request_id = request.path_params["id"]
        known = any(status.id == request_id for status in await own(request))
        if not known or not await asyncio.to_thread(models.cancel, request_id):
            raise NotFound(f"No request '{request_id[:100]}' is running.")
        return JsonResponse(CancelledRequestBody(request_id))

    return {"listRequests": running, "retrieveRequest": one, "cancelRequest": cancel}


def live_endpoints(
    shared_state: SharedState, engines: Callable[[], Sequence[Engine]], health: Callable[[], Health]
) -> dict[str, Any]:
    """`engines` gives those of the models that are loaded."""

    async def now(request: Request) -> Response:
        answer, at = reply_of(request.scope), time.monotonic()
        everyone = (status for engine in engines() for status in engine.status())
        statuses = [one for one in everyone if answer.admin or one.tenant == answer.tenant]
        past = (span for span in shared_state.past.since(at - PAST_S) if answer.admin or span.tenant == answer.tenant)
        whole = [live_engine_body(one.card, one.health(), one.figures, one.speculation) for one in engines()]
        return JsonResponse(live_body(health(), statuses, past, at, whole if answer.admin else UNSET))

    async def tree(request: Request) -> Response:
        # Engines are asked between two steps, which must not hold up the streams.
        return JsonResponse(
            CacheTreeBody.of(await asyncio.to_thread(cache_trees, engines(), reply_of(request.scope).tenant))
        )

    return {"showLive": now, "showCacheTree": tree}


def cache_trees(engines: Sequence[Engine], tenant: str) -> list[Sequence[CacheBranch]]:
    """Of each model that is still there."""
    found: list[Sequence[CacheBranch]] = []
    for engine in engines:
        with suppress(Unavailable):
            found.append(engine.kept.tree(tenant))
    return found


def metrics_endpoints(services: Callable[[], Iterable[ModelService]], shared_state: SharedState) -> dict[str, Any]:
    """`services` gives those of the models that are loaded."""

    async def metrics(request: Request) -> Response:
        reply_of(request.scope).require_admin("see the metrics")
        models = [measure_model(service, shared_state) for service in services()]
        return Response(render_metrics(models, shared_state.statuses), headers={"content-type": CONTENT_TYPE})

    async def loads(request: Request) -> Response:
        reply_of(request.scope).require_admin("see how busy the server is")
        engines = [service.engine for service in services() if isinstance(service, GenerationService)]
        return JsonResponse(loads_body([(one.card, one.status(), one.figures) for one in engines]))

    return {"metrics": metrics, "loads": loads}


def measure_model(service: ModelService, shared_state: SharedState) -> Iterator[Metric]:
    name, health = service.served.card.name, service.engine.health()
    if not isinstance(service, GenerationService):
        return task_model_metrics(name, health, service.task_metrics)
    engine = service.engine
    loras = (lora_info_metric(name, engine.status(), shared_state.settings.max_loras),) if engine.loras else ()
    further = (*loras, *rank_metrics(name, shared_state.rank_statuses()))
    return generating_model_metrics(engine.card, health, engine.figures, engine.speculation, further)
