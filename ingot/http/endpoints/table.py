"""Which endpoint answers which operation: those of a loaded model, by its kind, and those that tell of all models or
change which are loaded.

Heavy to import: `http/app.py` does so in a thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from ingot.config import ModelEntry
from ingot.engine.status import Health, ModelStatus
from ingot.errors import Forbidden
from ingot.http.edge import JsonResponse, reply_of
from ingot.http.endpoints.audio import SpeechEndpoint, TranscriptionEndpoint
from ingot.http.endpoints.cache import cache_endpoints
from ingot.http.endpoints.generation import GenerationEndpoint, reading_endpoint
from ingot.http.endpoints.monitoring import live_endpoints, metrics_endpoints, request_endpoints
from ingot.http.endpoints.pooling import EncodingEndpoint
from ingot.http.endpoints.responses import CreateResponseEndpoint, ModelResponses, StoredResponseEndpoints
from ingot.http.model_registry import CHAT_KIND, EndpointTable, ExtendLease, ModelRegistry
from ingot.http.service import ModelService, SideService
from ingot.http.shared_state import SharedState
from ingot.protocol.lora_adapters import LoraChanged, read_load_lora, read_unload_lora
from ingot.protocol.model_listings import (
    ModelBody,
    fleet_model_body,
    list_models,
    ollama_running,
    ollama_tags,
    ollama_version_body,
    retrieve_model,
)
from ingot.protocol.openai.speech import list_voices
from ingot.protocol.operations import OPERATIONS, Operation, Work, load
from ingot.protocol.served import ServedModel, ServedSideModel, SideCard

if TYPE_CHECKING:
    from ingot.engine.engine import Engine, ModelEngine


def open_model(
    engine: ModelEngine, entry: ModelEntry, shared_state: SharedState, extend: ExtendLease
) -> tuple[SideService, EndpointTable]:
    """The service of a loaded model and its endpoints. Raises ConfigError."""
    if entry.kind == CHAT_KIND:
        service = ModelService(cast("Engine", engine), entry.settings, shared_state, extend, unloads=not entry.resident)
        return service, shared_endpoints(service) | own_endpoints(service)
    hearing = None if engine.hearing is None else engine.hearing.card
    served = ServedSideModel.alone(
        cast("SideCard", engine.card), entry.settings, engine.encoders, hearing, engine.speaking
    )
    side = SideService(engine, served, entry.settings, shared_state)
    return side, shared_endpoints(side)


def _reading(service: SideService, operation: Operation) -> Callable[[Request], Any]:
    assert operation.reader is not None
    return reading_endpoint(service, load(operation.reader))


WORKS: Final[dict[Work, Callable[[Any, Operation], Any]]] = {
    "generate": GenerationEndpoint,
    "encode": EncodingEndpoint,
    "transcribe": TranscriptionEndpoint,
    "speak": SpeechEndpoint,
    "read": _reading,
}


def shared_endpoints(service: SideService) -> EndpointTable:
    """Those that all protocols share, by the names of their operations: of a model that does not generate, what is not
    for one that does."""

    async def voices(request: Request) -> Response:
        return JsonResponse(list_voices(service.served))

    return {"listVoices": voices} | {
        operation.name: WORKS[operation.work](service, operation)
        for operation in OPERATIONS
        if operation.work in WORKS and (operation.kind != CHAT_KIND or isinstance(service, ModelService))
    }


def own_endpoints(service: ModelService) -> EndpointTable:
    """Those of models that generate which are not like others."""
    responses = ModelResponses(service)
    return {
        "createResponse": CreateResponseEndpoint(responses),
        "countResponseTokens": reading_endpoint(service, responses.count),
        **cache_endpoints(service, responses.around),
        **lora_endpoints(service),
    }


def fleet_endpoints(models: ModelRegistry) -> dict[str, Any]:
    """By the names of their operations."""
    shared_state = models.shared_state

    def standings(request: Request) -> list[tuple[ModelStatus, ServedSideModel | None]]:
        known = {service.served.card.name: service.served for service in models.services()}
        key = shared_state.tenants.key_of(reply_of(request.scope).tenant)
        return [(stands, known.get(stands.name)) for stands in models.standings(key)]

    def telling(tell: Callable[[list[tuple[ModelStatus, ServedSideModel | None]]], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return JsonResponse(tell(standings(request)))

        return endpoint

    def body_of(name: str, request: Request) -> ModelBody:
        entry = models.named(name)
        stands, served = next(each for each in standings(request) if each[0].name == entry.name)
        if stands.resident and isinstance(served, ServedModel):
            return retrieve_model(name, served)  # or whatever else stands beside it under that name
        return fleet_model_body(stands, served)

    async def one(request: Request) -> Response:
        models.allow(models.named(request.path_params["model"]), reply_of(request.scope))
        return JsonResponse(body_of(request.path_params["model"], request))

    def changing(change: Callable[[str], Awaitable[None]]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            if not reply_of(request.scope).admin:
                raise Forbidden(
                    "Only the administrator may load and unload models: send the key that the server was started with "
                    "as --admin-api-key."
                )
            name = models.named(request.path_params["model"]).name
            await shared_state.attended(request.receive, lambda: change(name))
            return JsonResponse(body_of(name, request))

        return endpoint

    async def load(name: str) -> None:
        async with models.fleet.lease(name):
            pass

    async def stays(request: Request) -> Response:
        await one(request)
        raise Forbidden("This server has one model, which stays loaded: start it with --lazy, or with [models].")

    async def ollama_version(request: Request) -> Response:
        return JsonResponse(ollama_version_body())

    def health() -> Health:
        return shared_state.health(models.health())

    return {
        "listModels": telling(list_models),
        "retrieveModel": one,
        "loadModel": changing(load) if models.resident is None else one,
        "unloadModel": changing(models.fleet.unload) if models.resident is None else stays,
        "swapModel": changing(models.fleet.swap) if models.resident is None else stays,
        "ollamaTags": telling(ollama_tags),
        "ollamaRunning": telling(ollama_running),
        "ollamaVersion": ollama_version,
        **request_endpoints(models, shared_state.ended),
        **StoredResponseEndpoints(shared_state).endpoints(),
        **live_endpoints(shared_state, models.generating, health),
        **metrics_endpoints(models.generating, models.services, shared_state),
    }


def lora_endpoints(service: ModelService) -> dict[str, Any]:
    async def load(value: Any) -> LoraChanged:
        body, note = read_load_lora(value, service.served)
        made = await anyio.to_thread.run_sync(service.engine.load_lora, body.lora_name, Path(body.lora_path))
        return LoraChanged(id=made.name, status="loaded", parent=service.engine.card.name, rank=made.rank, ingot=note)

    async def unload(value: Any) -> LoraChanged:
        body, note = read_unload_lora(value, service.served)
        await anyio.to_thread.run_sync(service.engine.unload_lora, body.lora_name)
        return LoraChanged(id=body.lora_name, status="unloaded", parent=service.engine.card.name, ingot=note)

    return {"loadLora": _lora_change_endpoint(service, load), "unloadLora": _lora_change_endpoint(service, unload)}


def _lora_change_endpoint(
    service: ModelService, change: Callable[[Any], Awaitable[LoraChanged]]
) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        answer = reply_of(request.scope)
        if not answer.admin:
            raise Forbidden("Only the administrator may load adapters: send the key given as --admin-api-key.")
        if not service.shared_state.settings.allow_runtime_lora_updating:
            raise Forbidden("Adapters cannot be changed here: start the server with --allow-runtime-lora-updating.")
        async with service.shared_state.bodies.reading(request.scope, request.receive) as body:
            value = await service.read(body.raw, lambda value: value, answer.tenant)
        told = await change(value)
        service.refresh_loras()
        return JsonResponse(told)

    return endpoint
