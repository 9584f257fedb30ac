"""Whether JSON is as a schema says, for the few words that the measured schemas have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_KNOWN: Final = {
    *("type", "enum", "properties", "required", "additionalProperties", "items", "maxItems", "maxLength"),
    *("minimum", "maximum", "description"),
}


def problem_with(text: str, schema: Mapping[str, Any]) -> str | None:
    """Why a text is no JSON by that schema; None when it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return "it is not JSON"
    return _problem(value, schema, "it")


def _problem(value: Any, schema: Mapping[str, Any], place: str) -> str | None:
    if unknown := schema.keys() - _KNOWN:
        raise ValueError(f"nobody checks {', '.join(sorted(unknown))}")
    wanted = _TYPES.get(schema.get("type", ""))
    if wanted is not None and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
        return f"{place} is no {schema['type']}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{place} is none of {schema['enum']}"
    if isinstance(value, dict):
        return _object_problem(value, schema, place)
    if isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            return f"{place} has {len(value)} items"
        found = (_problem(each, schema.get("items", {}), f"{place}[{number}]") for number, each in enumerate(value))
        return next(filter(None, found), None)
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        return f"{place} has {len(value)} characters"
    if isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return f"{place} is {value}"
    return None


def _object_problem(value: Mapping[str, Any], schema: Mapping[str, Any], place: str) -> str | None:
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        return f"{place} has no {missing[0]}"
    listed = schema.get("properties", {})
    if schema.get("additionalProperties") is False and (more := [name for name in value if name not in listed]):
        return f"{place} has {more[0]}, which is not in the schema"
    found = (_problem(value[name], about, f"{place}.{name}") for name, about in listed.items() if name in value)
    return next(filter(None, found), None)
