"""The endpoints about requests: which run, how one went, how to stop one. Each tenant sees its own and no others."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from ingot.engine.request import RequestStatus
from ingot.errors import NotFound
from ingot.http.edge import Json, answer_of
from ingot.observe.recent import Recent
from ingot.protocol.ours.requests import CancelledBody, RequestBody, list_requests


class Answering(Protocol):
    """An engine, or several."""

    def status(self) -> list[RequestStatus]: ...

    def cancel(self, request_id: str) -> bool: ...


def request_endpoints(engine: Answering, past: Recent[RequestBody]) -> dict[str, Any]:
    """`past` are the requests that ended lately."""

    async def own(request: Request) -> list[RequestStatus]:
        # The engine may have to be asked, which must not hold up the streams.
        statuses = await asyncio.to_thread(engine.status)
        tenant = answer_of(request.scope).tenant
        return [status for status in statuses if status.tenant == tenant]

    async def running(request: Request) -> Response:
        return Json(list_requests(await own(request)))

    async def one(request: Request) -> Response:
        request_id = request.path_params["id"]
        for status in await own(request):
            if status.id == request_id:
                return Json(RequestBody.running(status))
        ended = past.get(answer_of(request.scope).tenant, request_id)
        if ended is None:
            raise NotFound(f"No request '{request_id[:100]}' runs or ended lately.")
        return Json(ended)

    async def cancel(request: Request) -> Response:
        request_id = request.path_params["id"]
        known = any(status.id == request_id for status in await own(request))
        if not known or not await asyncio.to_thread(engine.cancel, request_id):
            raise NotFound(f"No request '{request_id[:100]}' is running.")
        return Json(CancelledBody(request_id))

    return {"listRequests": running, "retrieveRequest": one, "cancelRequest": cancel}
