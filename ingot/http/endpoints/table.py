"""The application of a server with one model: its endpoints, by the names of their operations."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from ingot.config import Settings
from ingot.errors import Forbidden
from ingot.http.edge import Json
from ingot.http.endpoints.audio import TranscriptionEndpoint
from ingot.http.endpoints.cache import cache_endpoints
from ingot.http.endpoints.generation import Generation
from ingot.http.endpoints.health import health_endpoints
from ingot.http.endpoints.live import live_endpoints
from ingot.http.endpoints.loras import lora_endpoints
from ingot.http.endpoints.monitoring import metrics_endpoints
from ingot.http.endpoints.ollama import ollama_endpoints
from ingot.http.endpoints.pooling import EncodingEndpoint
from ingot.http.endpoints.reading import reader
from ingot.http.endpoints.requests import request_endpoints
from ingot.http.endpoints.responses import CreateResponse
from ingot.http.endpoints.speech import SpeechEndpoint
from ingot.http.responses.endpoints import Responses
from ingot.http.routing import app_of
from ingot.http.service import Service
from ingot.http.side_service import SideService
from ingot.http.streaming_sse import CHUNKS_ALONE, named_events
from ingot.protocol.anthropic.answers import Ping
from ingot.protocol.anthropic.request import count_tokens, read_messages
from ingot.protocol.infill import read_infill
from ingot.protocol.ingot_api.tokenize import detokenize, tokenize
from ingot.protocol.model_listings import show, show_side
from ingot.protocol.ollama.embed import read_embed, read_old_embedding
from ingot.protocol.openai.chat import read_chat
from ingot.protocol.openai.completions import read_completion
from ingot.protocol.openai.embeddings import read_embeddings
from ingot.protocol.openai.models import list_models, retrieve_model
from ingot.protocol.openai.speech import list_voices
from ingot.protocol.openai.transcriptions import read_transcription, read_translation
from ingot.protocol.pooling import read_rerank

if TYPE_CHECKING:
    from ingot.engine.engine import Engine


def build_app(engine: Engine, settings: Settings) -> Starlette:
    """The whole HTTP side of `engine`. Nothing is started; `app.state.service` is what the endpoints share."""
    service = Service(engine, settings)
    return app_of(service, endpoints_of(service), service.served.terms)


def side_endpoints(service: SideService) -> dict[str, Any]:
    """Those of models that do not generate."""

    async def voices(request: Request) -> Response:
        return Json(list_voices(service.served))

    return {
        "createEmbedding": EncodingEndpoint(service, read_embeddings),
        "ollamaEmbed": EncodingEndpoint(service, read_embed),
        "ollamaEmbeddings": EncodingEndpoint(service, read_old_embedding),
        "rerank": EncodingEndpoint(service, read_rerank),
        "rerankV2": EncodingEndpoint(service, partial(read_rerank, version="2")),
        "createTranscription": TranscriptionEndpoint(service, read_transcription),
        "createTranslation": TranscriptionEndpoint(service, read_translation),
        "createSpeech": SpeechEndpoint(service),
        "listVoices": voices,
        "ollamaShow": reader(service, show_side),
    }


def endpoints_of(service: Service) -> dict[str, Any]:
    responses = Responses(service)

    async def models(request: Request) -> Response:
        return Json(list_models(service.served))

    async def model(request: Request) -> Response:
        return Json(retrieve_model(request.path_params["model"], service.served))

    async def stays(request: Request) -> Response:
        retrieve_model(request.path_params["model"], service.served)
        raise Forbidden("This server has one model, which stays loaded: start it with --lazy, or with [models].")

    return {
        **side_endpoints(service),
        "createChatCompletion": Generation(service, read_chat),
        "createCompletion": Generation(service, read_completion),
        "infill": Generation(service, read_infill, CHUNKS_ALONE),
        "createMessage": Generation(service, read_messages, named_events(Ping())),
        "countMessageTokens": reader(service, count_tokens),
        "listModels": models,
        "retrieveModel": model,
        "tokenize": reader(service, tokenize),
        "detokenize": reader(service, detokenize),
        "loadModel": model,
        "unloadModel": stays,
        "swapModel": stays,
        **request_endpoints(service.engine, service.ended),
        **cache_endpoints(service, responses.around),
        "createResponse": CreateResponse(responses),
        **responses.endpoints(),
        **ollama_endpoints(service),
        "ollamaShow": reader(service, show),
        **health_endpoints(service.health),
        **lora_endpoints(service),
        **metrics_endpoints(lambda: [service.engine], lambda: [service], service.hall),
        **live_endpoints(service.hall, lambda: [service.engine], service.health),
    }
