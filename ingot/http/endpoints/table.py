"""Which endpoint answers which operation: those of a loaded model, by its kind, and those that tell of all models or
change which are loaded.

Heavy to import: `http/app.py` does so in a thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from ingot.config import ModelEntry, Settings
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
from ingot.http.routing import health_endpoints, make_application
from ingot.http.service import ModelService, SideService
from ingot.http.shared_state import SharedState
from ingot.http.streaming import BARE_CHUNKS, NDJSON_LINES, named_events
from ingot.protocol.anthropic.answers import MessagePing
from ingot.protocol.anthropic.request import count_message_tokens, read_messages
from ingot.protocol.infill import read_infill
from ingot.protocol.ingot_api.tokenize import answer_detokenize, answer_tokenize
from ingot.protocol.lora_adapters import LoraChanged, read_load_lora, read_unload_lora
from ingot.protocol.model_listings import (
    ModelBody,
    fleet_model_body,
    list_fleet_models,
    list_models,
    ollama_running,
    ollama_running_of_fleet,
    ollama_tags,
    ollama_tags_of_fleet,
    ollama_version_body,
    retrieve_model,
    show_ollama_model,
    show_ollama_side_model,
)
from ingot.protocol.ollama.request import read_ollama_chat, read_ollama_generate
from ingot.protocol.openai.chat import read_chat
from ingot.protocol.openai.completions import read_completion
from ingot.protocol.openai.speech import list_voices
from ingot.protocol.openai.transcriptions import read_transcription, read_translation
from ingot.protocol.pooling import read_embeddings, read_ollama_embed, read_ollama_old_embedding, read_rerank
from ingot.protocol.served import ServedSideModel

if TYPE_CHECKING:
    from ingot.engine.engine import Engine


def build_app(engine: Engine, settings: Settings) -> Starlette:
    """The whole HTTP side of `engine`. Nothing is started; `app.state.service` is what the endpoints share."""
    service = ModelService(engine, settings)
    return make_application(service, model_endpoints(service), service.served.terms)


def side_model_endpoints(service: SideService) -> dict[str, Any]:
    """Those of models that do not generate."""

    async def voices(request: Request) -> Response:
        return JsonResponse(list_voices(service.served))

    return {
        "createEmbedding": EncodingEndpoint(service, read_embeddings),
        "ollamaEmbed": EncodingEndpoint(service, read_ollama_embed),
        "ollamaEmbeddings": EncodingEndpoint(service, read_ollama_old_embedding),
        "rerank": EncodingEndpoint(service, read_rerank),
        "rerankV2": EncodingEndpoint(service, partial(read_rerank, version="2")),
        "createTranscription": TranscriptionEndpoint(service, read_transcription),
        "createTranslation": TranscriptionEndpoint(service, read_translation),
        "createSpeech": SpeechEndpoint(service),
        "listVoices": voices,
        "ollamaShow": reading_endpoint(service, show_ollama_side_model),
    }


def model_endpoints(service: ModelService) -> dict[str, Any]:
    responses = ModelResponses(service)

    async def models(request: Request) -> Response:
        return JsonResponse(list_models(service.served))

    async def model(request: Request) -> Response:
        return JsonResponse(retrieve_model(request.path_params["model"], service.served))

    async def stays(request: Request) -> Response:
        retrieve_model(request.path_params["model"], service.served)
        raise Forbidden("This server has one model, which stays loaded: start it with --lazy, or with [models].")

    return {
        **side_model_endpoints(service),
        "createChatCompletion": GenerationEndpoint(service, read_chat),
        "createCompletion": GenerationEndpoint(service, read_completion),
        "infill": GenerationEndpoint(service, read_infill, BARE_CHUNKS),
        "createMessage": GenerationEndpoint(service, read_messages, named_events(MessagePing())),
        "countMessageTokens": reading_endpoint(service, count_message_tokens),
        "listModels": models,
        "retrieveModel": model,
        "tokenize": reading_endpoint(service, answer_tokenize),
        "detokenize": reading_endpoint(service, answer_detokenize),
        "loadModel": model,
        "unloadModel": stays,
        "swapModel": stays,
        **request_endpoints(service.engine, service.ended),
        **cache_endpoints(service, responses.around),
        "createResponse": CreateResponseEndpoint(responses),
        **responses.endpoints(),
        **ollama_endpoints(service),
        "ollamaShow": reading_endpoint(service, show_ollama_model),
        **health_endpoints(service.health),
        **lora_endpoints(service),
        **metrics_endpoints(lambda: [service.engine], lambda: [service], service.shared_state),
        **live_endpoints(service.shared_state, lambda: [service.engine], service.health),
    }


if TYPE_CHECKING:
    from ingot.engine.engine import Engine, ModelEngine
    from ingot.engine.request import PoolingModelCard
    from ingot.engine.speech_request import SpeechToTextCard, TextToSpeechCard


def open_model(
    engine: ModelEngine, entry: ModelEntry, shared_state: SharedState, extend: ExtendLease
) -> tuple[SideService, EndpointTable]:
    """Its service and its endpoints."""
    if entry.kind == CHAT_KIND:
        service = ModelService(cast("Engine", engine), entry.settings, shared_state, extend)
        return service, model_endpoints(service)
    hearing = None if engine.hearing is None else engine.hearing.card
    card = cast("PoolingModelCard | SpeechToTextCard | TextToSpeechCard", engine.card)
    served = ServedSideModel.alone(card, entry.settings, engine.encoders, hearing, engine.speaking)
    side = SideService(engine, served, entry.settings, shared_state)
    return side, side_model_endpoints(side)


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
        return next(fleet_model_body(*each) for each in standings(request) if each[0].name == entry.name)

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

    async def ollama_version(request: Request) -> Response:
        return JsonResponse(ollama_version_body())

    def health() -> Health:
        return shared_state.health(models.health())

    return {
        "listModels": telling(list_fleet_models),
        "retrieveModel": one,
        "loadModel": changing(load),
        "unloadModel": changing(models.fleet.unload),
        "swapModel": changing(models.fleet.swap),
        "ollamaTags": telling(ollama_tags_of_fleet),
        "ollamaRunning": telling(ollama_running_of_fleet),
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
        if not service.settings.allow_runtime_lora_updating:
            raise Forbidden("Adapters cannot be changed here: start the server with --allow-runtime-lora-updating.")
        async with service.bodies.reading(request.scope, request.receive) as body:
            value = await service.read(body.raw, lambda value: value, answer.tenant)
        told = await change(value)
        service.refresh_loras()
        return JsonResponse(told)

    return endpoint


def ollama_endpoints(service: ModelService) -> dict[str, Any]:
    """Endpoints by the names of their operations."""

    def telling(tell: Callable[[], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return JsonResponse(tell())

        return endpoint

    return {
        "ollamaChat": GenerationEndpoint(service, read_ollama_chat, NDJSON_LINES),
        "ollamaGenerate": GenerationEndpoint(service, read_ollama_generate, NDJSON_LINES),
        "ollamaTags": telling(lambda: ollama_tags(service.served)),
        "ollamaRunning": telling(lambda: ollama_running(service.served)),
        "ollamaVersion": telling(ollama_version_body),
    }
