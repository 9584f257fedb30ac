"""The endpoints for whoever watches the server. What they tell is of all tenants, and so is told to the administrator.

Figures are read as they stand: nobody waits for the engine, and the engine for nobody.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ingot.errors import Forbidden
from ingot.http.edge import Json, answer_of
from ingot.http.service import Service
from ingot.observe.exposition import CONTENT_TYPE
from ingot.protocol.ours.loads import loads
from ingot.protocol.ours.metrics import metrics


def metrics_endpoints(service: Service) -> dict[str, Any]:
    engine = service.engine

    async def scraped(request: Request) -> Response:
        _refuse_others(request, "the metrics")
        told = metrics(engine.card, engine.health(), engine.figures, engine.speculation, service.statuses)
        return Response(told, headers={"content-type": CONTENT_TYPE})

    async def asked(request: Request) -> Response:
        _refuse_others(request, "how busy the server is")
        return Json(loads(engine.card, engine.status(), engine.figures))

    return {"metrics": scraped, "loads": asked}


def _refuse_others(request: Request, what: str) -> None:
    if not answer_of(request.scope).admin:
        raise Forbidden(
            f"Only the administrator may see {what}: send the key that the server was started with as --admin-api-key."
        )
