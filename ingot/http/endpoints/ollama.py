"""Ollama's paths: those that answer, and those that tell of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ingot.http.edge import Json
from ingot.http.endpoints.generation import Generation
from ingot.http.service import Service
from ingot.http.streaming_ndjson import LINES
from ingot.protocol.model_listings import running, tags, version
from ingot.protocol.ollama.request import read_ollama_chat, read_ollama_generate


def ollama_endpoints(service: Service) -> dict[str, Any]:
    """Endpoints by the names of their operations."""

    def telling(tell: Callable[[], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return Json(tell())

        return endpoint

    return {
        "ollamaChat": Generation(service, read_ollama_chat, LINES),
        "ollamaGenerate": Generation(service, read_ollama_generate, LINES),
        "ollamaTags": telling(lambda: tags(service.served)),
        "ollamaRunning": telling(lambda: running(service.served)),
        "ollamaVersion": telling(version),
    }
