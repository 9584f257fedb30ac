from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from ingot.http.app import REFUSED_PATHS, build_app, route_path
from ingot.protocol.openapi import openapi_document
from ingot.protocol.operations import FILE, OPERATIONS, load
from ingot.protocol.terms import Terms
from tests.http.scripted import ScriptedEngine, settings

TERMS = Terms(models=("org/toy", "default"), vocab=300, timeout_s=60.0)


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if "$ref" in node else []
        return own + [ref for value in node.values() for ref in references(value)]
    return [ref for value in node for ref in references(value)] if isinstance(node, list) else []


def test_the_document_is_json_whose_references_lead_somewhere() -> None:
    made = json.loads(json.dumps(openapi_document(TERMS, keyed=True)))
    known = made["components"]["schemas"]
    assert {ref.removeprefix("#/components/schemas/") for ref in references(made)} <= set(known)


@pytest.mark.parametrize("body", sorted({op.shape.body for op in OPERATIONS if op.shape.body is not None}))
def test_each_body_schema_is_a_schema(body: str) -> None:
    jsonschema_rs.Draft202012Validator(load(body).schema(TERMS))


def test_an_answer_that_is_a_file_may_be_nothing_else() -> None:
    paths = openapi_document(TERMS, keyed=False)["paths"]
    assert paths["/v1/cache/export"]["get"]["responses"]["200"]["content"].keys() == {FILE}
    assert paths["/v1/cache/import"]["post"]["requestBody"]["content"].keys() == {FILE}


def test_every_operation_has_an_endpoint_and_every_endpoint_an_operation() -> None:
    paths = {route.path for route in build_app(ScriptedEngine(), settings()).routes}  # type: ignore[arg-type]
    described = {route_path(operation.path) for operation in OPERATIONS}
    known = {
        path for path in paths if path.startswith(("/v1", "/v2", "/api", "/health", "/metrics", "/version", "/infill"))
    }
    assert known - set(REFUSED_PATHS) == described


def test_only_what_needs_the_key_says_so() -> None:
    paths = openapi_document(TERMS, keyed=True)["paths"]
    assert paths["/v1/models"]["get"]["security"]
    assert "401" in paths["/v1/models"]["get"]["responses"]
    assert "security" not in paths["/health/live"]["get"]
    assert "security" not in openapi_document(TERMS, keyed=False)["paths"]["/v1/models"]["get"]
