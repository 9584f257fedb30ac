"""The OpenAPI 3.1 document, generated from the table of operations."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct

from ingot.protocol.operations import FILE, OPERATIONS, PLAIN_ID, Operation, Reference, load
from ingot.protocol.schema.fields import Refused, Schema
from ingot.protocol.schema.objects import ObjectOf, field_specs
from ingot.protocol.terms import Terms
from ingot.version import __version__

SCHEMA_REFS = "#/components/schemas/{name}"
COMMON_STATUSES = (403, 500)
# Of statuses that the standard library does not have.
STATUS_PHRASES = {499: "Cancelled"}
PREFIXES = dict.fromkeys(operation.id_prefix for operation in OPERATIONS if operation.id_prefix != PLAIN_ID)
REQUEST_ID = f"^(?:{'|'.join(PREFIXES)}|{PLAIN_ID})[0-9a-f]{{24}}$"
FILE_CONTENT = {FILE: {"schema": {"type": "string", "format": "binary"}}}
RESPONSE_ID = "^resp_[0-9a-f]{24}$"
KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def openapi_document(terms: Terms, *, keyed: bool) -> dict[str, Any]:
    """The OpenAPI document of a server with these terms; `keyed` where it requires an API key."""
    shapes = [operation.shape for operation in OPERATIONS]
    answers = [each for shape in shapes for each in classes_of(shape.answer, shape.chunk, shape.events)]
    failures = [load(operation.wire.error) for operation in OPERATIONS]
    _, components = msgspec.json.schema_components([*answers, *failures], ref_template=SCHEMA_REFS)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = describe_operation(operation, terms, keyed)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ingot", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": KEY_SCHEMES},
    }


def classes_of(*references: Reference | None) -> list[type[Struct]]:
    """The classes that these columns of a row name, some of them several."""
    found = [load(reference) for reference in references if reference is not None]
    return [each for one in found for each in (one if isinstance(one, tuple) else (one,))]


def describe_operation(operation: Operation, terms: Terms, keyed: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": operation_responses(operation, keyed),
    }
    if operation.takes is not None:
        entry["requestBody"] = {"required": True, "content": request_body_content(operation, terms)}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [path_parameter(name, terms) for name in names]
    if operation.shape.query is not None:
        parameters += query_parameters(load(operation.shape.query), terms)
    if parameters:
        entry["parameters"] = parameters
    if keyed and not operation.public:
        entry["security"] = [{"bearer": []}, {"key": []}]
    return entry


def request_body_content(operation: Operation, terms: Terms) -> dict[str, Any]:
    if operation.shape.body is None:
        return FILE_CONTENT
    media = "multipart/form-data" if operation.takes == "form" else "application/json"
    return {media: {"schema": load(operation.shape.body).schema(terms)}}


def operation_responses(operation: Operation, keyed: bool) -> dict[str, Any]:
    shape, failed = operation.shape, schema_reference(operation.wire.error)
    texts = load(shape.texts).values() if isinstance(shape.texts, str) else shape.texts
    content: dict[str, Any] = {**FILE_CONTENT} if shape.media == FILE else {shape.media: {"schema": {"type": "string"}}}
    if shape.answer is not None:
        content = {"application/json": {"schema": schema_reference(shape.answer)}}
    content |= {media: {"schema": {"type": "string"}} for media in texts}
    streamed = [*map(name_of, classes_of(shape.chunk, shape.events)), failed]
    if shape.events is not None:
        content["text/event-stream"] = {"schema": named_event_schema(streamed)}
    elif shape.chunk is not None and operation.framing == "lines":
        content["application/x-ndjson"] = {"schema": {"anyOf": streamed}}
    elif shape.chunk is not None:
        content["text/event-stream"] = {"schema": event_schema(streamed)}
    answers = {
        str(status): {"description": status_phrase(status), "content": content}
        for status in (200, *shape.other_answers)
    }
    statuses = COMMON_STATUSES + operation.errors + ((401,) if keyed and not operation.public else ())
    failure = {"application/json": {"schema": failed}}
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


def event_schema(chunks: list[Schema]) -> Schema:
    """One server-sent event: its data is a chunk, or the error that ends the stream, or `[DONE]`."""
    data = json_text_schema(chunks)
    return {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}, "required": ["data"]}


def named_event_schema(events: list[Schema]) -> Schema:
    """One server-sent event, whose name is the type in its data."""
    properties = {"event": {"type": "string"}, "data": json_text_schema(events)}
    return {"type": "object", "properties": properties, "required": ["event", "data"]}


def json_text_schema(values: list[Schema]) -> Schema:
    """A text that is the JSON of one of `values`."""
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": values}}


def schema_reference(named: str) -> Schema:
    return name_of(load(named))


def name_of(answer: type[Struct]) -> Schema:
    return {"$ref": SCHEMA_REFS.format(name=answer.__name__)}


def status_phrase(status: int) -> str:
    return STATUS_PHRASES[status] if status in STATUS_PHRASES else HTTPStatus(status).phrase
