"""The application: the table of operations bound to endpoints, inside the guard, inside the edge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from ingot.config import Settings
from ingot.engine.request import Health
from ingot.errors import MethodNotAllowed, NotFound, nearest
from ingot.http.edge import Edge, Json, answer_of
from ingot.http.endpoints.cache import cache_endpoints
from ingot.http.endpoints.encoders import EncodingEndpoint
from ingot.http.endpoints.generation import Generation
from ingot.http.endpoints.metrics import metrics_endpoints
from ingot.http.endpoints.ollama import ollama_endpoints, refused_routes
from ingot.http.endpoints.page import page_routes
from ingot.http.endpoints.reading import reader
from ingot.http.endpoints.requests import request_endpoints
from ingot.http.guard import Guard
from ingot.http.responses.create import CreateResponse
from ingot.http.responses.endpoints import Responses
from ingot.http.service import Service
from ingot.http.streaming.sse import named_events
from ingot.protocol.anthropic.answers import Ping
from ingot.protocol.anthropic.body import count_tokens, read_messages
from ingot.protocol.ollama.models import show
from ingot.protocol.openai.chat import read_chat
from ingot.protocol.openai.completions import read_completion
from ingot.protocol.openai.embeddings import read_embeddings
from ingot.protocol.openai.models import list_models, retrieve_model
from ingot.protocol.openapi import OPERATIONS, document
from ingot.protocol.ours.health import HealthBody, VersionBody
from ingot.protocol.ours.tokenize import detokenize, tokenize
from ingot.protocol.rerank import read_rerank
from ingot.version import __version__

if TYPE_CHECKING:
    from ingot.engine.engine import Engine


def build_app(engine: Engine, settings: Settings) -> Starlette:
    """The whole HTTP side of `engine`. Nothing is started; `app.state.service` is what the endpoints share."""
    service = Service(engine, settings)
    app = Starlette(
        routes=routes(service),
        middleware=[
            Middleware(Edge, statuses=service.statuses),
            Middleware(Guard, service=service),
        ],
        exception_handlers={HTTPException: refuse},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def routes(service: Service) -> list[Route]:
    endpoints = endpoints_of(service)
    described = Json(document(service.served.terms, keyed=service.settings.keyed))

    async def openapi(request: Request) -> Response:
        return described

    return [
        *(Route(route_path(op.path), endpoints[op.name], methods=[op.method]) for op in OPERATIONS),
        *refused_routes(),
        Route("/openapi.json", openapi),
        *page_routes(),
    ]


class ResponseId(StringConvertor):
    """Only what can be a response's id, so that the addresses beside it are taken for themselves."""

    regex = "resp_[^/]*"


register_url_convertor("response", ResponseId())


def route_path(path: str) -> str:
    """Model names may hold slashes."""
    return path.replace("{model}", "{model:path}").replace("{response_id}", "{response_id:response}")


def endpoints_of(service: Service) -> dict[str, Any]:
    engine, served = service.engine, service.served
    responses = Responses(service)

    async def models(request: Request) -> Response:
        return Json(list_models(served))

    async def model(request: Request) -> Response:
        return Json(retrieve_model(request.path_params["model"], served))

    async def version(request: Request) -> Response:
        return Json(VersionBody(__version__))

    def probe(is_ok: Callable[[Health], bool]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            health = engine.health()
            if service.live.draining:
                health = replace(health, ready=False, detail="draining")
            ok = is_ok(health)
            return Json(HealthBody.of(health, ok=ok, known=answer_of(request.scope).known), 200 if ok else 503)

        return endpoint

    return {
        "createChatCompletion": Generation(service, read_chat),
        "createCompletion": Generation(service, read_completion),
        "createMessage": Generation(service, read_messages, named_events(Ping())),
        "countMessageTokens": reader(service, count_tokens),
        "createEmbedding": EncodingEndpoint(service, read_embeddings),
        "rerank": EncodingEndpoint(service, read_rerank),
        "rerankV2": EncodingEndpoint(service, partial(read_rerank, version="2")),
        "listModels": models,
        "retrieveModel": model,
        "tokenize": reader(service, tokenize),
        "detokenize": reader(service, detokenize),
        **request_endpoints(service),
        **cache_endpoints(service, responses.around),
        "createResponse": CreateResponse(responses),
        **responses.endpoints(),
        **ollama_endpoints(service),
        "ollamaShow": reader(service, show),
        "live": probe(lambda health: health.alive),
        "ready": probe(lambda health: health.ready),
        "health": probe(lambda health: health.ready),
        "version": version,
        **metrics_endpoints(service),
    }


async def refuse(request: Request, error: Exception) -> Response:
    """The router's own refusals, in our words."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == 405:
        matching = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        allowed = ", ".join(sorted({method for route in matching for method in route.methods}))
        answer_of(request.scope).headers.append(("allow", allowed))
        raise MethodNotAllowed(f"{path[:200]} takes {allowed}, not {method}.")
    meant = nearest(path[:200], [operation.path for operation in OPERATIONS])
    hint = f" Did you mean {meant}?" if meant else " See /openapi.json for what there is."
    raise NotFound(f"There is no {path[:200]} here.{hint}")
