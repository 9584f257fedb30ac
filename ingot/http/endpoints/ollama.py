"""Ollama's paths: those that tell of models, and those that would change what is served, which nothing here does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ingot.errors import Unsupported
from ingot.http.edge import Json
from ingot.http.endpoints.encoders import EncodingEndpoint
from ingot.http.endpoints.generation import Generation
from ingot.http.service import Service
from ingot.http.streaming.ndjson import LINES
from ingot.protocol.ollama.body import read_ollama_chat, read_ollama_generate
from ingot.protocol.ollama.embed import read_embed, read_old_embedding
from ingot.protocol.ollama.models import running, tags, version

FIXED: Final = "the models are those that the server was started with. Use `ingot pull` and `ingot serve`."
REFUSED: Final = {
    "/api/pull": ("POST",),
    "/api/push": ("POST",),
    "/api/create": ("POST",),
    "/api/copy": ("POST",),
    "/api/delete": ("DELETE",),
    "/api/blobs/{digest}": ("HEAD", "POST"),
}


def ollama_endpoints(service: Service) -> dict[str, Any]:
    """Endpoints by the names of their operations."""
    served = service.served

    def telling(tell: Callable[[], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return Json(tell())

        return endpoint

    return {
        "ollamaChat": Generation(service, read_ollama_chat, LINES),
        "ollamaGenerate": Generation(service, read_ollama_generate, LINES),
        "ollamaEmbed": EncodingEndpoint(service, read_embed),
        "ollamaEmbeddings": EncodingEndpoint(service, read_old_embedding),
        "ollamaTags": telling(lambda: tags(served)),
        "ollamaRunning": telling(lambda: running(served)),
        "ollamaVersion": telling(version),
    }


def refused_routes() -> list[Route]:
    """Paths that are known and not honoured, so that a client is told why rather than that there is nothing."""

    async def refuse(request: Request) -> Response:
        raise Unsupported(f"{request.url.path[:200]} is not supported: {FIXED}")

    return [Route(path, refuse, methods=list(methods)) for path, methods in REFUSED.items()]
