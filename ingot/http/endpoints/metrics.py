"""The endpoint for Prometheus. What it tells is of all tenants, and so is told to the administrator."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ingot.errors import Forbidden
from ingot.http.edge import answer_of
from ingot.http.service import Service
from ingot.observe.exposition import CONTENT_TYPE
from ingot.protocol.ours.metrics import metrics


def metrics_endpoint(service: Service) -> Any:
    engine = service.engine

    def told() -> str:
        # The engine answers between two steps, which must not hold up the streams.
        return metrics(engine.card.name, engine.health(), engine.figures(), engine.speculation)

    async def endpoint(request: Request) -> Response:
        if not answer_of(request.scope).admin:
            raise Forbidden(
                "Only the administrator may see the metrics: send the key that the server was started with as "
                "--admin-api-key."
            )
        return Response(await asyncio.to_thread(told), headers={"content-type": CONTENT_TYPE})

    return endpoint
