"""The table of operations, and the OpenAPI 3.1 document made from it and from the kinds that read the bodies."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct

from ingot.observe.exposition import MEDIA_TYPE
from ingot.protocol.anthropic.answers import MESSAGE_EVENTS, MessageBody
from ingot.protocol.anthropic.body import COUNT_BODY, MESSAGES_BODY, TokenCount
from ingot.protocol.anthropic.errors import AnthropicError
from ingot.protocol.errors import ErrorBody
from ingot.protocol.ollama.answers import OllamaChat, OllamaCompletion
from ingot.protocol.ollama.body import CHAT_BODY as OLLAMA_CHAT_BODY
from ingot.protocol.ollama.body import GENERATE_BODY
from ingot.protocol.ollama.embed import EMBED_BODY, OLD_EMBEDDING_BODY, OldEmbedding, OllamaEmbedded
from ingot.protocol.ollama.errors import OllamaError
from ingot.protocol.ollama.models import SHOW_BODY, OllamaRunning, OllamaShown, OllamaTags, OllamaVersion
from ingot.protocol.openai.chat import CHAT_BODY
from ingot.protocol.openai.chat_answers import ChatChunk, ChatCompletion
from ingot.protocol.openai.completion_answers import Completion
from ingot.protocol.openai.completions import COMPLETION_BODY
from ingot.protocol.openai.embeddings import EMBEDDING_BODY, EmbeddingList
from ingot.protocol.openai.models import ModelBody, ModelList
from ingot.protocol.ours.cache import FILE, IMPORT_PATH, AdoptedBody, CacheBody, ClearedBody, ExplainedBody
from ingot.protocol.ours.health import HealthBody, VersionBody
from ingot.protocol.ours.loads import LoadsBody
from ingot.protocol.ours.questions import EXPLAIN_BODY
from ingot.protocol.ours.requests import CancelledBody, RequestBody, RunningList
from ingot.protocol.ours.tokenize import DETOKENIZE_BODY, TOKENIZE_BODY, Detokenized, Tokenized
from ingot.protocol.rerank import RERANK_BODY, Reranked
from ingot.protocol.responses.answers import DeletedResponse, InputItemList, ResponseBody, ResponseEvent, ResponseTokens
from ingot.protocol.responses.body import RESPONSES_BODY
from ingot.protocol.responses.queries import ITEMS_QUERY, RESPONSE_QUERY
from ingot.protocol.schema.fields import Kind, Refused, Schema
from ingot.protocol.schema.objects import ObjectOf, specs_of
from ingot.protocol.schema.terms import Terms
from ingot.version import __version__

REFS = "#/components/schemas/{name}"
ALWAYS = (403, 500)
READS_BODY = (400, 404, 408, 413, 415)
RUNS = (429, 499, 503, 504)
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
class Operation:
    """One thing a client can ask for. `public` ones need no key."""

    name: str
    method: str
    path: str
    summary: str
    answer: type[Struct] | None  # None: a file, or text of another `media` type
    body: Kind | None = None
    errors: tuple[int, ...] = ()
    other_answers: tuple[int, ...] = ()  # statuses besides 200 with the same body
    chunk: type[Struct] | None = None  # of the answer where it is streamed
    events: tuple[type[Struct], ...] = ()  # of the answer where it is streamed as named events
    line: type[Struct] | None = None  # of the answer where it is streamed line by line
    failure: type[Struct] = ErrorBody  # what errors look like
    query: ObjectOf | None = None  # what may follow the path
    takes_file: bool = False  # as its body
    media: str = FILE  # of an answer that is no JSON
    public: bool = False

    @property
    def runs(self) -> bool:
        """Whether an engine works on it."""
        return set(RUNS) <= set(self.errors)


def runs(name: str, path: str, summary: str, answer: type[Struct], body: Kind, **told: Any) -> Operation:
    """A body that an engine works on."""
    return Operation(name, "POST", path, summary, answer, body, READS_BODY + RUNS, **told)


def reads(name: str, path: str, summary: str, answer: type[Struct], body: Kind, **told: Any) -> Operation:
    """A body that takes no engine."""
    return Operation(name, "POST", path, summary, answer, body, READS_BODY, **told)


def tells(name: str, path: str, summary: str, answer: type[Struct] | None, *errors: int, **told: Any) -> Operation:
    return Operation(name, "GET", path, summary, answer, None, errors, **told)


ANTHROPIC = {"failure": AnthropicError}
OLLAMA = {"failure": OllamaError}
PROBE = {"other_answers": (503,), "public": True}
RESPONSE = "/v1/responses/{response_id}"
LOOKS_UP = (400, 404, 503)

OPERATIONS = (
    runs(
        "createChatCompletion",
        "/v1/chat/completions",
        "Answer a conversation.",
        ChatCompletion,
        CHAT_BODY,
        chunk=ChatChunk,
    ),
    runs("createCompletion", "/v1/completions", "Continue a text.", Completion, COMPLETION_BODY, chunk=Completion),
    runs(
        "createMessage",
        "/v1/messages",
        "Answer a conversation, in Anthropic's words.",
        MessageBody,
        MESSAGES_BODY,
        events=MESSAGE_EVENTS,
        **ANTHROPIC,
    ),
    reads(
        "countMessageTokens",
        "/v1/messages/count_tokens",
        "The tokens that a conversation takes as a prompt.",
        TokenCount,
        COUNT_BODY,
        **ANTHROPIC,
    ),
    runs("createEmbedding", "/v1/embeddings", "A vector for each text.", EmbeddingList, EMBEDDING_BODY),
    *(
        runs(name, path, "Documents by how well they answer a query.", Reranked, RERANK_BODY)
        for name, path in (("rerank", "/v1/rerank"), ("rerankV2", "/v2/rerank"))
    ),
    runs(
        "createResponse",
        "/v1/responses",
        "Answer a conversation, in items.",
        ResponseBody,
        RESPONSES_BODY,
        events=(ResponseEvent,),
    ),
    Operation(
        "countResponseTokens",
        "POST",
        "/v1/responses/input_tokens",
        "The tokens that a response would take as a prompt.",
        ResponseTokens,
        RESPONSES_BODY,
        (*READS_BODY, 503),
    ),
    tells(
        "retrieveResponse",
        RESPONSE,
        "A response that is stored or under way.",
        ResponseBody,
        *LOOKS_UP,
        query=RESPONSE_QUERY,
    ),
    Operation("deleteResponse", "DELETE", RESPONSE, "Forget a response.", DeletedResponse, errors=(404, 503)),
    Operation(
        "cancelResponse",
        "POST",
        f"{RESPONSE}/cancel",
        "Stop a response that is under way.",
        ResponseBody,
        errors=LOOKS_UP,
    ),
    tells(
        "listInputItems",
        f"{RESPONSE}/input_items",
        "What a response answered.",
        InputItemList,
        *LOOKS_UP,
        query=ITEMS_QUERY,
    ),
    tells("listModels", "/v1/models", "What is served.", ModelList),
    tells("retrieveModel", "/v1/models/{model}", "The model served under a name.", ModelBody, 404),
    reads("tokenize", "/v1/tokenize", "The tokens of a text or of a conversation.", Tokenized, TOKENIZE_BODY),
    reads("detokenize", "/v1/detokenize", "The text of tokens.", Detokenized, DETOKENIZE_BODY),
    runs(
        "ollamaChat",
        "/api/chat",
        "Answer a conversation, in Ollama's words.",
        OllamaChat,
        OLLAMA_CHAT_BODY,
        line=OllamaChat,
        **OLLAMA,
    ),
    runs(
        "ollamaGenerate",
        "/api/generate",
        "Answer a prompt, in Ollama's words.",
        OllamaCompletion,
        GENERATE_BODY,
        line=OllamaCompletion,
        **OLLAMA,
    ),
    runs("ollamaEmbed", "/api/embed", "Vectors of texts, in Ollama's words.", OllamaEmbedded, EMBED_BODY, **OLLAMA),
    runs(
        "ollamaEmbeddings",
        "/api/embeddings",
        "The vector of a text, as Ollama once asked for it.",
        OldEmbedding,
        OLD_EMBEDDING_BODY,
        **OLLAMA,
    ),
    reads("ollamaShow", "/api/show", "What a model is.", OllamaShown, SHOW_BODY, **OLLAMA),
    tells("ollamaTags", "/api/tags", "What is served, for Ollama's clients.", OllamaTags, **OLLAMA),
    tells("ollamaRunning", "/api/ps", "What is loaded, for Ollama's clients.", OllamaRunning, **OLLAMA),
    tells("ollamaVersion", "/api/version", "Whose protocol this is.", OllamaVersion, **OLLAMA),
    tells("listRequests", "/v1/requests", "What runs now, and how far it is.", RunningList),
    tells(
        "retrieveRequest",
        "/v1/requests/{id}",
        "How far a running request is, or the receipt of one that ended lately.",
        RequestBody,
        404,
    ),
    Operation("cancelRequest", "DELETE", "/v1/requests/{id}", "Stop a running request.", CancelledBody, errors=(404,)),
    tells("showCache", "/v1/cache", "What is kept of earlier prompts.", CacheBody),
    Operation("clearCache", "DELETE", "/v1/cache", "Forget all that is kept of the asking key's prompts.", ClearedBody),
    reads(
        "explainCache",
        "/v1/cache/explain",
        "What a request would take over if it came now, and why no more.",
        ExplainedBody,
        EXPLAIN_BODY,
    ),
    tells("exportCache", "/v1/cache/export", "What is kept of the asking key's prompts, as a file.", None, 400),
    Operation(
        "importCache",
        "POST",
        IMPORT_PATH,
        "Keep what a server of the same model and archive key kept; for the administrator's key.",
        AdoptedBody,
        errors=(400, 408, 413, 415),
        takes_file=True,
    ),
    tells("health", "/health", "Whether a request would be taken.", HealthBody, **PROBE),
    tells("live", "/health/live", "Whether the engine is alive.", HealthBody, **PROBE),
    tells("ready", "/health/ready", "Whether a request would be taken.", HealthBody, **PROBE),
    tells(
        "metrics",
        "/metrics",
        "What the server did and does, for Prometheus; for the administrator's key.",
        None,
        media=MEDIA_TYPE,
    ),
    tells("loads", "/v1/loads", "How busy the server is, for routers; for the administrator's key.", LoadsBody),
    tells("version", "/version", "What this server is.", VersionBody),
)


def document(terms: Terms, *, keyed: bool) -> dict[str, Any]:
    """The OpenAPI document of a server with these terms; `keyed` where it asks for an API key."""
    answers = [operation.answer for operation in OPERATIONS if operation.answer is not None]
    chunks = [operation.chunk for operation in OPERATIONS if operation.chunk is not None]
    events = [event for operation in OPERATIONS for event in operation.events]
    failures = [operation.failure for operation in OPERATIONS]
    _, components = msgspec.json.schema_components([*answers, *chunks, *events, *failures], ref_template=REFS)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = described(operation, terms, keyed)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ingot", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": KEY_SCHEMES},
    }


def described(operation: Operation, terms: Terms, keyed: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": responses(operation, keyed),
    }
    if operation.body is not None:
        content = {"application/json": {"schema": operation.body.schema(terms)}}
        entry["requestBody"] = {"required": True, "content": content}
    if operation.takes_file:
        entry["requestBody"] = {"required": True, "content": FILE_CONTENT}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [path_parameter(name, terms) for name in names]
    if operation.query is not None:
        parameters += query_parameters(operation.query, terms)
    if parameters:
        entry["parameters"] = parameters
    if keyed and not operation.public:
        entry["security"] = [{"bearer": []}, {"key": []}]
    return entry


def responses(operation: Operation, keyed: bool) -> dict[str, Any]:
    text = {operation.media: {"schema": {"type": "string"}}}
    content: dict[str, Any] = FILE_CONTENT if operation.media == FILE else text
    if operation.answer is not None:
        content = {"application/json": {"schema": reference(operation.answer)}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": event_schema(operation.chunk)}
    if operation.line is not None:
        content["application/x-ndjson"] = {"schema": {"anyOf": [reference(operation.line), reference(OllamaError)]}}
    if operation.events:
        content["text/event-stream"] = {"schema": named_event_schema(operation)}
    answers = {
        str(status): {"description": phrase(status), "content": content} for status in (200, *operation.other_answers)
    }
    statuses = ALWAYS + operation.errors + ((401,) if keyed and not operation.public else ())
    failure = {"application/json": {"schema": reference(operation.failure)}}
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


def named_event_schema(operation: Operation) -> Schema:
    """One server-sent event, named as the type in its data is."""
    told = {"anyOf": [reference(event) for event in (*operation.events, operation.failure)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": told}
    properties = {"event": {"type": "string"}, "data": data}
    return {"type": "object", "properties": properties, "required": ["event", "data"]}


def reference(answer: type[Struct]) -> Schema:
    return {"$ref": REFS.format(name=answer.__name__)}


def phrase(status: int) -> str:
    return PHRASES[status] if status in PHRASES else HTTPStatus(status).phrase
