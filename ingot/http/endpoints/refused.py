"""Addresses of Ollama's that would change what is served, which nothing here does."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ingot.errors import Unsupported

FIXED: Final = "the models are those that the server was started with. Use `ingot pull` and `ingot serve`."
REFUSED: Final = {
    "/api/pull": ("POST",),
    "/api/push": ("POST",),
    "/api/create": ("POST",),
    "/api/copy": ("POST",),
    "/api/delete": ("DELETE",),
    "/api/blobs/{digest}": ("HEAD", "POST"),
}


def refused_routes() -> list[Route]:
    """Paths that are known and not honoured, so that a client is told why rather than that there is nothing."""

    async def refuse(request: Request) -> Response:
        raise Unsupported(f"{request.url.path[:200]} is not supported: {FIXED}")

    return [Route(path, refuse, methods=list(methods)) for path, methods in REFUSED.items()]
