"""The table of operations, and the OpenAPI 3.1 document made from it and from the kinds that read the bodies."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct

from ingot.protocol.chat_answers import ChatChunk, ChatCompletion
from ingot.protocol.completion_answers import Completion
from ingot.protocol.errors import ErrorBody
from ingot.protocol.fields import Kind, ModelName, Schema, Terms
from ingot.protocol.health import HealthBody
from ingot.protocol.models import ModelBody, ModelList
from ingot.protocol.openai_chat import CHAT_BODY
from ingot.protocol.openai_completions import COMPLETION_BODY
from ingot.protocol.requests import CancelledBody, RunningList
from ingot.protocol.tokens import DETOKENIZE_BODY, TOKENIZE_BODY, Detokenized, Tokenized
from ingot.version import __version__

REFS = "#/components/schemas/{name}"
ALWAYS = (403, 500)
READS_BODY = (400, 404, 408, 413, 415)
RUNS = (429, 499, 503, 504)
# What the document calls the statuses that the standard library does not.
PHRASES = {499: "Cancelled"}
REQUEST_ID = "^(?:chatcmpl|cmpl)-[0-9a-f]{24}$"
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
    answer: type[Struct]
    body: Kind | None = None
    errors: tuple[int, ...] = ()
    other_answers: tuple[int, ...] = ()  # statuses besides 200 with the same body
    chunk: type[Struct] | None = None  # of the answer where it is streamed
    public: bool = False


OPERATIONS = (
    Operation(
        "createChatCompletion",
        "POST",
        "/v1/chat/completions",
        "Answer a conversation.",
        ChatCompletion,
        CHAT_BODY,
        READS_BODY + RUNS,
        chunk=ChatChunk,
    ),
    Operation(
        "createCompletion",
        "POST",
        "/v1/completions",
        "Continue a text.",
        Completion,
        COMPLETION_BODY,
        READS_BODY + RUNS,
        chunk=Completion,
    ),
    Operation("listModels", "GET", "/v1/models", "What is served.", ModelList),
    Operation("retrieveModel", "GET", "/v1/models/{model}", "The model served under a name.", ModelBody, errors=(404,)),
    Operation(
        "tokenize",
        "POST",
        "/v1/tokenize",
        "The tokens of a text or of a conversation.",
        Tokenized,
        TOKENIZE_BODY,
        READS_BODY,
    ),
    Operation("detokenize", "POST", "/v1/detokenize", "The text of tokens.", Detokenized, DETOKENIZE_BODY, READS_BODY),
    Operation("listRequests", "GET", "/v1/requests", "What runs now, and how far it is.", RunningList),
    Operation("cancelRequest", "DELETE", "/v1/requests/{id}", "Stop a running request.", CancelledBody, errors=(404,)),
    Operation(
        "live", "GET", "/health/live", "Whether the engine is alive.", HealthBody, other_answers=(503,), public=True
    ),
    Operation(
        "ready",
        "GET",
        "/health/ready",
        "Whether a request would be taken.",
        HealthBody,
        other_answers=(503,),
        public=True,
    ),
)


def document(terms: Terms, *, keyed: bool) -> dict[str, Any]:
    """The OpenAPI document of a server with these terms; `keyed` where it asks for an API key."""
    answers = [operation.answer for operation in OPERATIONS]
    chunks = [operation.chunk for operation in OPERATIONS if operation.chunk is not None]
    _, components = msgspec.json.schema_components([*answers, *chunks, ErrorBody], ref_template=REFS)
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
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    if names:
        entry["parameters"] = [path_parameter(name, terms) for name in names]
    if keyed and not operation.public:
        entry["security"] = [{"bearer": []}, {"key": []}]
    return entry


def responses(operation: Operation, keyed: bool) -> dict[str, Any]:
    content = {"application/json": {"schema": reference(operation.answer)}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": event_schema(operation.chunk)}
    answers = {
        str(status): {"description": phrase(status), "content": content} for status in (200, *operation.other_answers)
    }
    statuses = ALWAYS + operation.errors + ((401,) if keyed and not operation.public else ())
    failure = {"application/json": {"schema": reference(ErrorBody)}}
    return answers | {str(status): {"description": phrase(status), "content": failure} for status in sorted(statuses)}


def path_parameter(name: str, terms: Terms) -> Schema:
    schema = ModelName().schema(terms) if name == "model" else {"type": "string", "pattern": REQUEST_ID}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def event_schema(chunk: type[Struct]) -> Schema:
    """One server-sent event: its data is a chunk, or the error that ends the stream, or `[DONE]`."""
    told = {"anyOf": [reference(chunk), reference(ErrorBody)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": told}
    return {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}, "required": ["data"]}


def reference(answer: type[Struct]) -> Schema:
    return {"$ref": REFS.format(name=answer.__name__)}


def phrase(status: int) -> str:
    return PHRASES[status] if status in PHRASES else HTTPStatus(status).phrase
