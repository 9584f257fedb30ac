"""The OpenAPI 3.1 document, made from the table of operations and from the kinds that read the bodies."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec
from msgspec import Struct

from ingot.media.audio_encoding import MEDIA_TYPES
from ingot.observe.prometheus import MEDIA_TYPE
from ingot.protocol.anthropic.answers import MESSAGE_EVENTS, MessageBody
from ingot.protocol.anthropic.errors import AnthropicError
from ingot.protocol.anthropic.request import COUNT_BODY, MESSAGES_BODY, TokenCount
from ingot.protocol.errors import ErrorBody
from ingot.protocol.infill import INFILL_BODY, InfillAnswer
from ingot.protocol.ingot_api.cache import FILE, AdoptedBody, CacheBody, ClearedBody, ExplainedBody
from ingot.protocol.ingot_api.health import HealthBody, VersionBody
from ingot.protocol.ingot_api.requests import LiveBody
from ingot.protocol.ingot_api.tokenize import DETOKENIZE_BODY, TOKENIZE_BODY, Detokenized, Tokenized
from ingot.protocol.lora_adapters import LOAD_BODY, UNLOAD_BODY, LoraChanged
from ingot.protocol.model_listings import SHOW_BODY, OllamaRunning, OllamaShown, OllamaTags, OllamaVersion
from ingot.protocol.ollama.answers import OllamaChat, OllamaCompletion
from ingot.protocol.ollama.embed import EMBED_BODY, OLD_EMBEDDING_BODY, OldEmbedding, OllamaEmbedded
from ingot.protocol.ollama.errors import OllamaError
from ingot.protocol.ollama.request import CHAT_BODY as OLLAMA_CHAT_BODY
from ingot.protocol.ollama.request import GENERATE_BODY
from ingot.protocol.openai.chat import CHAT_BODY
from ingot.protocol.openai.chat_answers import ChatChunk, ChatCompletion
from ingot.protocol.openai.completion_answers import Completion
from ingot.protocol.openai.completions import COMPLETION_BODY
from ingot.protocol.openai.embeddings import EMBEDDING_BODY, EmbeddingList
from ingot.protocol.openai.models import ModelBody, ModelList
from ingot.protocol.openai.speech import SPEECH_BODY, SpeechChunk, VoiceList
from ingot.protocol.openai.transcription_answers import TranscriptChunk, Transcription
from ingot.protocol.openai.transcriptions import TRANSCRIPTION_FORM, TRANSLATION_FORM
from ingot.protocol.operations import OPERATIONS, Operation
from ingot.protocol.ours.cache_tree import CacheTreeBody
from ingot.protocol.ours.loads import LoadsBody
from ingot.protocol.ours.questions import EXPLAIN_BODY
from ingot.protocol.ours.requests import CancelledBody, RequestBody, RunningList
from ingot.protocol.pooling import RERANK_BODY, Reranked
from ingot.protocol.responses.answers import DeletedResponse, InputItemList, ResponseBody, ResponseEvent, ResponseTokens
from ingot.protocol.responses.body import RESPONSES_BODY
from ingot.protocol.responses.queries import ITEMS_QUERY, RESPONSE_QUERY
from ingot.protocol.schema.fields import Kind, Refused, Schema
from ingot.protocol.schema.objects import ObjectOf, specs_of
from ingot.protocol.terms import Terms
from ingot.version import __version__

REFS = "#/components/schemas/{name}"
ALWAYS = (403, 500)
# What the document calls the statuses that the standard library does not.
PHRASES = {499: "Cancelled"}
REQUEST_ID = "^(?:chatcmpl-|cmpl-|msg_|resp_|req-)[0-9a-f]{24}$"
FILE_CONTENT = {FILE: {"schema": {"type": "string", "format": "binary"}}}
RESPONSE_ID = "^resp_[0-9a-f]{24}$"
KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What an operation is given and answers."""

    answer: type[Struct] | None  # None: a file, or text of another `media` type
    body: Kind | None = None  # JSON, or a form with a file
    other_answers: tuple[int, ...] = ()  # statuses besides 200 with the same body
    chunk: type[Struct] | None = None  # of the answer where it is streamed
    events: tuple[type[Struct], ...] = ()  # of the answer where it is streamed as named events
    line: type[Struct] | None = None  # of the answer where it is streamed line by line
    failure: type[Struct] = ErrorBody  # what errors look like
    query: ObjectOf | None = None  # what may follow the path
    texts: tuple[str, ...] = ()  # media types of texts that the answer may be instead
    media: str = FILE  # of an answer that is no JSON


def transcript(form: Kind) -> Shape:
    texts = ("text/plain", "application/x-subrip", "text/vtt")
    return Shape(Transcription, form, chunk=TranscriptChunk, texts=texts)


PROBE = Shape(HealthBody, other_answers=(503,))
RERANK = Shape(Reranked, RERANK_BODY)
CHANGED = Shape(ModelBody)

SHAPES: Final = {
    "createChatCompletion": Shape(ChatCompletion, CHAT_BODY, chunk=ChatChunk),
    "createCompletion": Shape(Completion, COMPLETION_BODY, chunk=Completion),
    "infill": Shape(InfillAnswer, INFILL_BODY, chunk=InfillAnswer),
    "createMessage": Shape(MessageBody, MESSAGES_BODY, events=MESSAGE_EVENTS, failure=AnthropicError),
    "countMessageTokens": Shape(TokenCount, COUNT_BODY, failure=AnthropicError),
    "createEmbedding": Shape(EmbeddingList, EMBEDDING_BODY),
    "rerank": RERANK,
    "rerankV2": RERANK,
    "createResponse": Shape(ResponseBody, RESPONSES_BODY, events=(ResponseEvent,)),
    "countResponseTokens": Shape(ResponseTokens, RESPONSES_BODY),
    "retrieveResponse": Shape(ResponseBody, query=RESPONSE_QUERY),
    "deleteResponse": Shape(DeletedResponse),
    "cancelResponse": Shape(ResponseBody),
    "listInputItems": Shape(InputItemList, query=ITEMS_QUERY),
    "createTranscription": transcript(TRANSCRIPTION_FORM),
    "createTranslation": transcript(TRANSLATION_FORM),
    "createSpeech": Shape(None, SPEECH_BODY, chunk=SpeechChunk, texts=tuple(MEDIA_TYPES.values())),
    "listVoices": Shape(VoiceList),
    "listModels": Shape(ModelList),
    "retrieveModel": Shape(ModelBody),
    "loadModel": CHANGED,
    "unloadModel": CHANGED,
    "swapModel": CHANGED,
    "tokenize": Shape(Tokenized, TOKENIZE_BODY),
    "detokenize": Shape(Detokenized, DETOKENIZE_BODY),
    "ollamaChat": Shape(OllamaChat, OLLAMA_CHAT_BODY, line=OllamaChat, failure=OllamaError),
    "ollamaGenerate": Shape(OllamaCompletion, GENERATE_BODY, line=OllamaCompletion, failure=OllamaError),
    "ollamaEmbed": Shape(OllamaEmbedded, EMBED_BODY, failure=OllamaError),
    "ollamaEmbeddings": Shape(OldEmbedding, OLD_EMBEDDING_BODY, failure=OllamaError),
    "ollamaShow": Shape(OllamaShown, SHOW_BODY, failure=OllamaError),
    "ollamaTags": Shape(OllamaTags, failure=OllamaError),
    "ollamaRunning": Shape(OllamaRunning, failure=OllamaError),
    "ollamaVersion": Shape(OllamaVersion, failure=OllamaError),
    "listRequests": Shape(RunningList),
    "retrieveRequest": Shape(RequestBody),
    "cancelRequest": Shape(CancelledBody),
    "showLive": Shape(LiveBody),
    "showCacheTree": Shape(CacheTreeBody),
    "showCache": Shape(CacheBody),
    "clearCache": Shape(ClearedBody),
    "explainCache": Shape(ExplainedBody, EXPLAIN_BODY),
    "exportCache": Shape(None),
    "importCache": Shape(AdoptedBody),
    "loadLora": Shape(LoraChanged, LOAD_BODY),
    "unloadLora": Shape(LoraChanged, UNLOAD_BODY),
    "health": PROBE,
    "live": PROBE,
    "ready": PROBE,
    "metrics": Shape(None, media=MEDIA_TYPE),
    "loads": Shape(LoadsBody),
    "version": Shape(VersionBody),
}
"""By the names of the operations."""


def document(terms: Terms, *, keyed: bool) -> dict[str, Any]:
    """The OpenAPI document of a server with these terms; `keyed` where it asks for an API key."""
    shapes = SHAPES.values()
    answers = [shape.answer for shape in shapes if shape.answer is not None]
    chunks = [shape.chunk for shape in shapes if shape.chunk is not None]
    events = [event for shape in shapes for event in shape.events]
    failures = [shape.failure for shape in shapes]
    _, components = msgspec.json.schema_components([*answers, *chunks, *events, *failures], ref_template=REFS)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        told = described(operation, SHAPES[operation.name], terms, keyed)
        paths.setdefault(operation.path, {})[operation.method.lower()] = told
    return {
        "openapi": "3.1.0",
        "info": {"title": "ingot", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": KEY_SCHEMES},
    }


def described(operation: Operation, shape: Shape, terms: Terms, keyed: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": responses(operation, shape, keyed),
    }
    if operation.takes is not None:
        entry["requestBody"] = {"required": True, "content": body_content(operation, shape, terms)}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [path_parameter(name, terms) for name in names]
    if shape.query is not None:
        parameters += query_parameters(shape.query, terms)
    if parameters:
        entry["parameters"] = parameters
    if keyed and not operation.public:
        entry["security"] = [{"bearer": []}, {"key": []}]
    return entry


def body_content(operation: Operation, shape: Shape, terms: Terms) -> dict[str, Any]:
    if shape.body is None:
        return FILE_CONTENT
    media = "multipart/form-data" if operation.takes == "form" else "application/json"
    return {media: {"schema": shape.body.schema(terms)}}


def responses(operation: Operation, shape: Shape, keyed: bool) -> dict[str, Any]:
    content: dict[str, Any] = {**FILE_CONTENT} if shape.media == FILE else {shape.media: {"schema": {"type": "string"}}}
    if shape.answer is not None:
        content = {"application/json": {"schema": reference(shape.answer)}}
    content |= {media: {"schema": {"type": "string"}} for media in shape.texts}
    if shape.chunk is not None:
        content["text/event-stream"] = {"schema": event_schema(shape.chunk)}
    if shape.line is not None:
        content["application/x-ndjson"] = {"schema": {"anyOf": [reference(shape.line), reference(OllamaError)]}}
    if shape.events:
        content["text/event-stream"] = {"schema": named_event_schema(shape)}
    answers = {
        str(status): {"description": phrase(status), "content": content} for status in (200, *shape.other_answers)
    }
    statuses = ALWAYS + operation.errors + ((401,) if keyed and not operation.public else ())
    failure = {"application/json": {"schema": reference(shape.failure)}}
    return answers | {str(status): {"description": phrase(status), "content": failure} for status in sorted(statuses)}


def path_parameter(name: str, terms: Terms) -> Schema:
    names = {"type": "string", "enum": list(terms.every_model)}
    pattern = RESPONSE_ID if name == "response_id" else REQUEST_ID
    schema = names if name == "model" else {"type": "string", "pattern": pattern}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def query_parameters(query: ObjectOf, terms: Terms) -> list[Schema]:
    """None of them is required. A query has no null."""
    return [
        {"name": spec.name, "in": "query", "schema": spec.metadata["kind"].schema(terms)}
        for spec in specs_of(query.cls).values()
        if not isinstance(spec.metadata["kind"], Refused)
    ]


def event_schema(chunk: type[Struct]) -> Schema:
    """One server-sent event: its data is a chunk, or the error that ends the stream, or `[DONE]`."""
    told = {"anyOf": [reference(chunk), reference(ErrorBody)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": told}
    return {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}, "required": ["data"]}


def named_event_schema(shape: Shape) -> Schema:
    """One server-sent event, named as the type in its data is."""
    told = {"anyOf": [reference(event) for event in (*shape.events, shape.failure)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": told}
    properties = {"event": {"type": "string"}, "data": data}
    return {"type": "object", "properties": properties, "required": ["event", "data"]}


def reference(answer: type[Struct]) -> Schema:
    return {"$ref": REFS.format(name=answer.__name__)}


def phrase(status: int) -> str:
    return PHRASES[status] if status in PHRASES else HTTPStatus(status).phrase
