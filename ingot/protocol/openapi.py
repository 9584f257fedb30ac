"""The OpenAPI 3.1 document, made from the table of operations and from the kinds that read the bodies."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec
from msgspec import Struct

from ingot.media.audio_encoding import AUDIO_MEDIA_TYPES
from ingot.observe.prometheus import MEDIA_TYPE
from ingot.protocol.anthropic.answers import MESSAGE_EVENTS, MessageBody
from ingot.protocol.anthropic.request import COUNT_TOKENS_BODY, MESSAGES_BODY, MessageTokenCount
from ingot.protocol.errors import AnthropicError, ErrorBody, OllamaError
from ingot.protocol.infill import INFILL_BODY, InfillAnswer
from ingot.protocol.ingot_api.cache import (
    CACHE_FILE_MEDIA_TYPE,
    EXPLAIN_BODY,
    CacheBody,
    CacheTreeBody,
    ClearedBody,
    ExplainedBody,
    ImportedBody,
)
from ingot.protocol.ingot_api.health import HealthBody, VersionBody
from ingot.protocol.ingot_api.metrics import LoadsBody
from ingot.protocol.ingot_api.requests import CancelledRequestBody, LiveBody, RequestStatusBody, RunningRequestList
from ingot.protocol.ingot_api.tokenize import DETOKENIZE_BODY, TOKENIZE_BODY, DetokenizeAnswer, TokenizeAnswer
from ingot.protocol.lora_adapters import LOAD_LORA_BODY, UNLOAD_LORA_BODY, LoraChanged
from ingot.protocol.model_listings import (
    OLLAMA_SHOW_BODY,
    ModelBody,
    ModelList,
    OllamaRunning,
    OllamaShown,
    OllamaTags,
    OllamaVersion,
)
from ingot.protocol.ollama.answers import OllamaChatAnswer, OllamaCompletionAnswer
from ingot.protocol.ollama.request import OLLAMA_CHAT_BODY, OLLAMA_GENERATE_BODY
from ingot.protocol.openai.chat import CHAT_BODY
from ingot.protocol.openai.chat_answers import ChatChunk, ChatCompletion
from ingot.protocol.openai.completions import COMPLETION_BODY, Completion
from ingot.protocol.openai.speech import SPEECH_BODY, SpeechChunk, VoiceList
from ingot.protocol.openai.transcriptions import TRANSCRIPTION_FORM, TRANSLATION_FORM, TranscriptChunk, Transcription
from ingot.protocol.operations import OPERATIONS, Operation
from ingot.protocol.pooling import (
    EMBEDDING_BODY,
    OLLAMA_EMBED_BODY,
    OLLAMA_OLD_EMBEDDING_BODY,
    RERANK_BODY,
    EmbeddingList,
    OllamaEmbedded,
    OllamaOldEmbedding,
    RerankAnswer,
)
from ingot.protocol.responses.answers import DeletedResponse, InputItemList, ResponseBody, ResponseEvent, ResponseTokens
from ingot.protocol.responses.request import ITEMS_QUERY, RESPONSE_QUERY, RESPONSES_BODY
from ingot.protocol.schema.fields import FieldKind, Refused, Schema
from ingot.protocol.schema.objects import ObjectOf, field_specs
from ingot.protocol.terms import Terms
from ingot.version import __version__

SCHEMA_REFS = "#/components/schemas/{name}"
COMMON_STATUSES = (403, 500)
# What the document calls the statuses that the standard library does not.
STATUS_PHRASES = {499: "Cancelled"}
REQUEST_ID = "^(?:chatcmpl-|cmpl-|msg_|resp_|req-)[0-9a-f]{24}$"
FILE_CONTENT = {CACHE_FILE_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
RESPONSE_ID = "^resp_[0-9a-f]{24}$"
KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@dataclass(frozen=True, slots=True)
class OperationShape:
    """What an operation is given and answers."""

    answer: type[Struct] | None  # None: a file, or text of another `media` type
    body: FieldKind | None = None  # JSON, or a form with a file
    other_answers: tuple[int, ...] = ()  # statuses besides 200 with the same body
    chunk: type[Struct] | None = None  # of the answer where it is streamed
    events: tuple[type[Struct], ...] = ()  # of the answer where it is streamed as named events
    line: type[Struct] | None = None  # of the answer where it is streamed line by line
    failure: type[Struct] = ErrorBody  # what errors look like
    query: ObjectOf | None = None  # what may follow the path
    texts: tuple[str, ...] = ()  # media types of texts that the answer may be instead
    media: str = CACHE_FILE_MEDIA_TYPE  # of an answer that is no JSON


def transcript_shape(form: FieldKind) -> OperationShape:
    texts = ("text/plain", "application/x-subrip", "text/vtt")
    return OperationShape(Transcription, form, chunk=TranscriptChunk, texts=texts)


PROBE_SHAPE = OperationShape(HealthBody, other_answers=(503,))
RERANK_SHAPE = OperationShape(RerankAnswer, RERANK_BODY)
CHANGED_SHAPE = OperationShape(ModelBody)

OPERATION_SHAPES: Final = {
    "createChatCompletion": OperationShape(ChatCompletion, CHAT_BODY, chunk=ChatChunk),
    "createCompletion": OperationShape(Completion, COMPLETION_BODY, chunk=Completion),
    "infill": OperationShape(InfillAnswer, INFILL_BODY, chunk=InfillAnswer),
    "createMessage": OperationShape(MessageBody, MESSAGES_BODY, events=MESSAGE_EVENTS, failure=AnthropicError),
    "countMessageTokens": OperationShape(MessageTokenCount, COUNT_TOKENS_BODY, failure=AnthropicError),
    "createEmbedding": OperationShape(EmbeddingList, EMBEDDING_BODY),
    "rerank": RERANK_SHAPE,
    "rerankV2": RERANK_SHAPE,
    "createResponse": OperationShape(ResponseBody, RESPONSES_BODY, events=(ResponseEvent,)),
    "countResponseTokens": OperationShape(ResponseTokens, RESPONSES_BODY),
    "retrieveResponse": OperationShape(ResponseBody, query=RESPONSE_QUERY),
    "deleteResponse": OperationShape(DeletedResponse),
    "cancelResponse": OperationShape(ResponseBody),
    "listInputItems": OperationShape(InputItemList, query=ITEMS_QUERY),
    "createTranscription": transcript_shape(TRANSCRIPTION_FORM),
    "createTranslation": transcript_shape(TRANSLATION_FORM),
    "createSpeech": OperationShape(None, SPEECH_BODY, chunk=SpeechChunk, texts=tuple(AUDIO_MEDIA_TYPES.values())),
    "listVoices": OperationShape(VoiceList),
    "listModels": OperationShape(ModelList),
    "retrieveModel": OperationShape(ModelBody),
    "loadModel": CHANGED_SHAPE,
    "unloadModel": CHANGED_SHAPE,
    "swapModel": CHANGED_SHAPE,
    "tokenize": OperationShape(TokenizeAnswer, TOKENIZE_BODY),
    "detokenize": OperationShape(DetokenizeAnswer, DETOKENIZE_BODY),
    "ollamaChat": OperationShape(OllamaChatAnswer, OLLAMA_CHAT_BODY, line=OllamaChatAnswer, failure=OllamaError),
    "ollamaGenerate": OperationShape(
        OllamaCompletionAnswer, OLLAMA_GENERATE_BODY, line=OllamaCompletionAnswer, failure=OllamaError
    ),
    "ollamaEmbed": OperationShape(OllamaEmbedded, OLLAMA_EMBED_BODY, failure=OllamaError),
    "ollamaEmbeddings": OperationShape(OllamaOldEmbedding, OLLAMA_OLD_EMBEDDING_BODY, failure=OllamaError),
    "ollamaShow": OperationShape(OllamaShown, OLLAMA_SHOW_BODY, failure=OllamaError),
    "ollamaTags": OperationShape(OllamaTags, failure=OllamaError),
    "ollamaRunning": OperationShape(OllamaRunning, failure=OllamaError),
    "ollamaVersion": OperationShape(OllamaVersion, failure=OllamaError),
    "listRequests": OperationShape(RunningRequestList),
    "retrieveRequest": OperationShape(RequestStatusBody),
    "cancelRequest": OperationShape(CancelledRequestBody),
    "showLive": OperationShape(LiveBody),
    "showCacheTree": OperationShape(CacheTreeBody),
    "showCache": OperationShape(CacheBody),
    "clearCache": OperationShape(ClearedBody),
    "explainCache": OperationShape(ExplainedBody, EXPLAIN_BODY),
    "exportCache": OperationShape(None),
    "importCache": OperationShape(ImportedBody),
    "loadLora": OperationShape(LoraChanged, LOAD_LORA_BODY),
    "unloadLora": OperationShape(LoraChanged, UNLOAD_LORA_BODY),
    "health": PROBE_SHAPE,
    "live": PROBE_SHAPE,
    "ready": PROBE_SHAPE,
    "metrics": OperationShape(None, media=MEDIA_TYPE),
    "loads": OperationShape(LoadsBody),
    "version": OperationShape(VersionBody),
}
"""By the names of the operations."""


def openapi_document(terms: Terms, *, keyed: bool) -> dict[str, Any]:
    """The OpenAPI document of a server with these terms; `keyed` where it asks for an API key."""
    shapes = OPERATION_SHAPES.values()
    answers = [shape.answer for shape in shapes if shape.answer is not None]
    chunks = [shape.chunk for shape in shapes if shape.chunk is not None]
    events = [event for shape in shapes for event in shape.events]
    failures = [shape.failure for shape in shapes]
    _, components = msgspec.json.schema_components([*answers, *chunks, *events, *failures], ref_template=SCHEMA_REFS)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        told = describe_operation(operation, OPERATION_SHAPES[operation.name], terms, keyed)
        paths.setdefault(operation.path, {})[operation.method.lower()] = told
    return {
        "openapi": "3.1.0",
        "info": {"title": "ingot", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": KEY_SCHEMES},
    }


def describe_operation(operation: Operation, shape: OperationShape, terms: Terms, keyed: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": operation_responses(operation, shape, keyed),
    }
    if operation.takes is not None:
        entry["requestBody"] = {"required": True, "content": request_body_content(operation, shape, terms)}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [path_parameter(name, terms) for name in names]
    if shape.query is not None:
        parameters += query_parameters(shape.query, terms)
    if parameters:
        entry["parameters"] = parameters
    if keyed and not operation.public:
        entry["security"] = [{"bearer": []}, {"key": []}]
    return entry


def request_body_content(operation: Operation, shape: OperationShape, terms: Terms) -> dict[str, Any]:
    if shape.body is None:
        return FILE_CONTENT
    media = "multipart/form-data" if operation.takes == "form" else "application/json"
    return {media: {"schema": shape.body.schema(terms)}}


def operation_responses(operation: Operation, shape: OperationShape, keyed: bool) -> dict[str, Any]:
    content: dict[str, Any] = (
        {**FILE_CONTENT} if shape.media == CACHE_FILE_MEDIA_TYPE else {shape.media: {"schema": {"type": "string"}}}
    )
    if shape.answer is not None:
        content = {"application/json": {"schema": schema_reference(shape.answer)}}
    content |= {media: {"schema": {"type": "string"}} for media in shape.texts}
    if shape.chunk is not None:
        content["text/event-stream"] = {"schema": event_schema(shape.chunk)}
    if shape.line is not None:
        content["application/x-ndjson"] = {
            "schema": {"anyOf": [schema_reference(shape.line), schema_reference(OllamaError)]}
        }
    if shape.events:
        content["text/event-stream"] = {"schema": named_event_schema(shape)}
    answers = {
        str(status): {"description": status_phrase(status), "content": content}
        for status in (200, *shape.other_answers)
    }
    statuses = COMMON_STATUSES + operation.errors + ((401,) if keyed and not operation.public else ())
    failure = {"application/json": {"schema": schema_reference(shape.failure)}}
    return answers | {
        str(status): {"description": status_phrase(status), "content": failure} for status in sorted(statuses)
    }


def path_parameter(name: str, terms: Terms) -> Schema:
    names = {"type": "string", "enum": list(terms.all_model_names)}
    pattern = RESPONSE_ID if name == "response_id" else REQUEST_ID
    schema = names if name == "model" else {"type": "string", "pattern": pattern}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def query_parameters(query: ObjectOf, terms: Terms) -> list[Schema]:
    """None of them is required. A query has no null."""
    return [
        {"name": spec.name, "in": "query", "schema": spec.metadata["kind"].schema(terms)}
        for spec in field_specs(query.cls).values()
        if not isinstance(spec.metadata["kind"], Refused)
    ]


def event_schema(chunk: type[Struct]) -> Schema:
    """One server-sent event: its data is a chunk, or the error that ends the stream, or `[DONE]`."""
    told = {"anyOf": [schema_reference(chunk), schema_reference(ErrorBody)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": told}
    return {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}, "required": ["data"]}


def named_event_schema(shape: OperationShape) -> Schema:
    """One server-sent event, named as the type in its data is."""
    told = {"anyOf": [schema_reference(event) for event in (*shape.events, shape.failure)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": told}
    properties = {"event": {"type": "string"}, "data": data}
    return {"type": "object", "properties": properties, "required": ["event", "data"]}


def schema_reference(answer: type[Struct]) -> Schema:
    return {"$ref": SCHEMA_REFS.format(name=answer.__name__)}


def status_phrase(status: int) -> str:
    return STATUS_PHRASES[status] if status in STATUS_PHRASES else HTTPStatus(status).phrase
