"""Which types a schema allows for a parameter."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.text.parser.arguments import ANY_TYPE, ValueSchema, parameter_types

DEFINITIONS = {
    "Count": {"type": "integer"},
    "Maybe": {"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]},
    "Loop": {"$ref": "#/$defs/Loop"},
    "a/b": {"type": "boolean"},
}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"enum": ["a", 1, None, 1.5, True, [], {}]}, set(ANY_TYPE)),
        ({"type": "string", "enum": ["1", "2"]}, {"string"}),
        ({"const": 3}, {"integer"}),
        ({"anyOf": [{"type": "integer"}, {"type": "array"}]}, {"integer", "array"}),
        ({"oneOf": [{"type": "integer"}, {"enum": ["x"]}]}, {"integer", "string"}),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "string"}]}, {"string"}),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, {"integer"}),
        ({"$ref": "#/$defs/Count"}, {"integer"}),
        ({"$ref": "#/$defs/Maybe"}, {"integer", "null"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/$defs/Loop"}, set(ANY_TYPE)),
        ({"$ref": "#/nowhere"}, set(ANY_TYPE)),
        ({"$ref": "https://example.org/x"}, set(ANY_TYPE)),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"type": "float"}, set(ANY_TYPE)),
        ({"type": [{}, "integer"]}, {"integer"}),
        ({}, set(ANY_TYPE)),
        (True, set(ANY_TYPE)),
        ("nonsense", set(ANY_TYPE)),
        ({"type": 5, "anyOf": {}, "enum": "no"}, set(ANY_TYPE)),
    ],
)
def test_a_parameters_schema_says_its_types(schema: Any, kinds: set[str]) -> None:
    assert parameter_types({"properties": {"p": schema}, "$defs": DEFINITIONS}, "p") == kinds


def test_a_parameter_without_a_schema_may_be_anything() -> None:
    assert parameter_types({}, "p") == ANY_TYPE
    assert parameter_types({"properties": {"q": {"type": "string"}}}, "p") == ANY_TYPE
    assert parameter_types({"properties": []}, "p") == ANY_TYPE


def test_other_parameters_take_the_type_of_additional_ones() -> None:
    schema = {"properties": {"q": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    assert parameter_types(schema, "p") == {"integer"}
    assert parameter_types(schema, "q") == {"string"}


def test_parameters_are_found_behind_references_and_in_branches() -> None:
    schema = {
        "anyOf": [{"$ref": "#/$defs/A"}, {"properties": {"p": {"type": "null"}}}],
        "$defs": {"A": {"properties": {"p": {"type": "integer"}}}},
    }
    assert parameter_types(schema, "p") == {"integer", "null"}


def test_what_stands_in_arrays_and_objects_has_its_own_types() -> None:
    rows = {"type": "array", "prefixItems": [{"type": "null"}], "items": {"anyOf": [{"$ref": "#/$defs/row"}, {}]}}
    row = {"properties": {"id": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    rows_described = ValueSchema.arguments({"properties": {"rows": rows}, "$defs": {"row": row}}).member("rows")
    assert rows_described.item(0).kinds == {"null"}
    assert rows_described.item(1).member("id").kinds == {"integer"}
    assert rows_described.item(7).member("x").kinds == {"string"}
    assert rows_described.member("x").kinds == rows_described.item(1).item(0).kinds == ANY_TYPE


def test_schemas_that_lead_back_to_themselves_in_many_ways_are_each_looked_at_once() -> None:
    back = {"$ref": "#/$defs/node"}
    node = {"anyOf": [back] * 30, "oneOf": [{"allOf": [back]}] * 30, "properties": {"next": back}}
    described = ValueSchema.arguments({"$ref": "#/$defs/node", "$defs": {"node": node}})
    for _ in range(50):
        described = described.member("next")
    assert len(described.schemas) == 1
