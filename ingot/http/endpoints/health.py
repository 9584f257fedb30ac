"""The probes, and the program's version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ingot.engine.health import Health
from ingot.http.edge import Json, answer_of
from ingot.protocol.ingot_api.health import HealthBody, VersionBody
from ingot.version import __version__


def health_endpoints(health_now: Callable[[], Health]) -> dict[str, Any]:
    async def version(request: Request) -> Response:
        return Json(VersionBody(__version__))

    def probe(is_ok: Callable[[Health], bool]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            health = health_now()
            ok = is_ok(health)
            return Json(HealthBody.of(health, ok=ok, known=answer_of(request.scope).known), 200 if ok else 503)

        return endpoint

    return {
        "live": probe(lambda health: health.alive),
        "ready": probe(lambda health: health.ready),
        "health": probe(lambda health: health.ready),
        "version": version,
    }
