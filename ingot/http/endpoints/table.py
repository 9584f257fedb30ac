"""Which endpoint answers which operation: those of a loaded model, by its kind, and those that list all models or
change which are loaded.

Heavy to import: `http/app.py` does so in a thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from ingot.engine.status import Health, ModelStatus
from ingot.errors import BadRequest, Forbidden
from ingot.http.edge import JsonResponse, reply_of
from ingot.http.endpoints.cache import cache_endpoints
from ingot.http.endpoints.generation import reading_endpoint
from ingot.http.endpoints.monitoring import live_endpoints, metrics_endpoints, request_endpoints
from ingot.http.endpoints.responses import CreateResponseEndpoint, ModelResponses, StoredResponseEndpoints
from ingot.http.model_registry import EndpointTable, ModelRegistry
from ingot.http.service import GenerationService, ModelService
from ingot.protocol.lora_adapters import LoraChanged, read_load_lora, read_unload_lora
from ingot.protocol.model_listings import (
    ADD_MODEL_BODY,
    ModelBody,
    RecommendedList,
    RecommendedModel,
    fleet_model_body,
    list_models,
    ollama_running,
    ollama_tags,
    ollama_version_body,
    retrieve_model,
)
from ingot.protocol.openai.speech import list_voices
from ingot.protocol.schema.fields import BodyReading
from ingot.protocol.served import AnyServedModel, ServedModel
from ingot.protocol.terms import NO_TERMS, matches_model_name


def own_endpoints(service: ModelService) -> EndpointTable:
    """Those of a model that are not like others."""

    async def voices(request: Request) -> Response:
        return JsonResponse(list_voices(service.served))

    if not isinstance(service, GenerationService):
        return {"listVoices": voices}
    responses = ModelResponses(service)
    return {
        "listVoices": voices,
        "createResponse": CreateResponseEndpoint(responses),
        "countResponseTokens": reading_endpoint(service, responses.count),
        **cache_endpoints(service, responses.around),
        **lora_endpoints(service),
    }


def fleet_endpoints(models: ModelRegistry) -> dict[str, Any]:
    """By the names of their operations."""
    shared_state = models.shared_state

    def visible(request: Request) -> list[tuple[ModelStatus, AnyServedModel | None]]:
        served = {service.served.card.name: service.served for service in models.services()}
        key = shared_state.tenants.key_of(reply_of(request.scope).tenant)
        return [(status, served.get(status.name)) for status in models.model_statuses(key)]

    def listing(
        make_body: Callable[[list[tuple[ModelStatus, AnyServedModel | None]]], Any],
    ) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return JsonResponse(make_body(visible(request)))

        return endpoint

    def body_of(name: str, request: Request) -> ModelBody:
        entry = models.named(name)
        status, served = next(each for each in visible(request) if each[0].name == entry.name)
        if status.resident and isinstance(served, ServedModel):
            return retrieve_model(name, served, models.names())  # or an adapter of it
        return fleet_model_body(status, served)

    async def one(request: Request) -> Response:
        models.allow(models.named(request.path_params["model"]), reply_of(request.scope))
        return JsonResponse(body_of(request.path_params["model"], request))

    async def ollama_version(request: Request) -> Response:
        return JsonResponse(ollama_version_body())

    def health() -> Health:
        return shared_state.health(models.health())

    return {
        "listModels": listing(list_models),
        "retrieveModel": one,
        **_admin_endpoints(models, body_of, one),
        "ollamaTags": listing(ollama_tags),
        "ollamaRunning": listing(ollama_running),
        "ollamaVersion": ollama_version,
        **request_endpoints(models, shared_state.ended),
        **StoredResponseEndpoints(shared_state).endpoints(),
        **live_endpoints(shared_state, models.generating, health),
        **metrics_endpoints(models.services, shared_state),
    }


def read_added_model(value: Any) -> str:
    name: str = ADD_MODEL_BODY.parse(value, "", BodyReading(NO_TERMS)).model
    return name


def lora_endpoints(service: GenerationService) -> dict[str, Any]:
    async def load(value: Any) -> LoraChanged:
        body, note = read_load_lora(value, service.served, service.shared_state.served_names())
        made = await anyio.to_thread.run_sync(service.engine.load_lora, body.lora_name, Path(body.lora_path))
        return LoraChanged(id=made.name, status="loaded", parent=service.engine.card.name, rank=made.rank, ingot=note)

    async def unload(value: Any) -> LoraChanged:
        body, note = read_unload_lora(value, service.served)
        await anyio.to_thread.run_sync(service.engine.unload_lora, body.lora_name)
        return LoraChanged(id=body.lora_name, status="unloaded", parent=service.engine.card.name, ingot=note)

    return {"loadLora": _lora_change_endpoint(service, load), "unloadLora": _lora_change_endpoint(service, unload)}


def _lora_change_endpoint(
    service: GenerationService, change: Callable[[Any], Awaitable[LoraChanged]]
) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        answer = reply_of(request.scope)
        answer.require_admin("load adapters")
        if not service.shared_state.settings.allow_runtime_lora_updating:
            raise Forbidden("Adapters cannot be changed here: start the server with --allow-runtime-lora-updating.")
        async with service.shared_state.bodies.reading(request.scope, request.receive) as body:
            value = await service.read(body.raw, lambda value: value, answer.tenant)
        changed = await change(value)
        service.refresh_loras()
        return JsonResponse(changed)

    return endpoint


def _admin_endpoints(
    models: ModelRegistry, body_of: Callable[[str, Request], ModelBody], one: Callable[[Request], Any]
) -> dict[str, Any]:
    """What changes which models are loaded or served; `one` describes a model."""
    shared_state = models.shared_state

    def changing(change: Callable[[str], Awaitable[None]]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            reply_of(request.scope).require_admin("load and unload models")
            name = models.named(request.path_params["model"]).name
            await shared_state.attended(request.receive, lambda: change(name))
            return JsonResponse(body_of(name, request))

        return endpoint

    async def load(name: str) -> None:
        async with models.fleet.lease(name):
            pass

    async def add(request: Request) -> Response:
        reply_of(request.scope).require_admin("add models")
        if models.is_resident:
            raise Forbidden("This server stays with its models: start it with --lazy, or with [models].")
        async with shared_state.bodies.reading(request.scope, request.receive) as body:
            name = await shared_state.read(body.raw, read_added_model, reply_of(request.scope).tenant)
        entry = await anyio.to_thread.run_sync(models.fleet.new_entry, name)
        for other in models.fleet.entries:
            if matches_model_name(entry.name, other.names):
                raise BadRequest(f"model: '{entry.name}' is served already.", param="model")
        await shared_state.attended(request.receive, lambda: models.fleet.add(entry))
        return JsonResponse(body_of(entry.name, request))

    async def recommended(request: Request) -> Response:
        reply_of(request.scope).require_admin("add models")
        found = [] if models.is_resident else await anyio.to_thread.run_sync(models.fleet.recommended)
        return JsonResponse(
            RecommendedList(
                [
                    RecommendedModel(
                        *(each.name, each.task, each.hub_id, each.parameters),
                        *(each.download_bytes, each.weight_bytes, each.context),
                    )
                    for each in found
                ]
            )
        )

    async def stays(request: Request) -> Response:
        await one(request)
        raise Forbidden("The models of this server stay loaded: start it with --lazy, or with [models].")

    return {
        "addModel": add,
        "listRecommended": recommended,
        "loadModel": changing(load) if not models.is_resident else one,
        "unloadModel": changing(models.fleet.unload) if not models.is_resident else stays,
        "swapModel": changing(models.fleet.swap) if not models.is_resident else stays,
    }
