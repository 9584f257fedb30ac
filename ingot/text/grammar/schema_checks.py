"""What is checked of a JSON schema before the library sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ingot.errors import BadRequest, Unsupported
from ingot.text.grammar.limits import MOST_CHARS

ANNOTATING = frozenset(
    {
        *("binary", "byte", "password", "uri-reference", "iri-reference"),
        *("path", "file-path", "directory-path", "textarea", "markdown", "html"),
    }
)
"""Formats that tell what a text is for, and not which texts are right."""
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_VALUES = frozenset({"const", "enum", "default", "examples", "example"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def plain_schema(schema: Any) -> Any:
    """The same without what says nothing of which values are right, and with whole numbers written as such."""
    if isinstance(schema, list):
        return [plain_schema(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _plain(key, value) for key, value in schema.items() if not _says_nothing(schema, key, value)}


def _plain(key: str, value: Any) -> Any:
    if key in _VALUES:
        return value
    if key in _NAMED and isinstance(value, Mapping):
        return {name: plain_schema(each) for name, each in value.items()}
    if key in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    return plain_schema(value)


def _says_nothing(schema: Mapping[str, Any], key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value in ANNOTATING
    most = schema.get("maxItems")
    single = isinstance(most, int | float) and most <= 1
    return key == "uniqueItems" and (value is False or single)


def place_in(schema: Any, problem: str) -> str | None:
    """Where in a schema that stands which a problem names: a value between quotes, else a keyword."""
    words = set(re.findall(r"[$A-Za-z]+", problem))
    found = list(_stated(schema, ""))
    quoted = (path for path, _, value in found if isinstance(value, str) and f"'{value}'" in problem)
    return next(quoted, None) or next((path for path, key, _ in found if key in words), None)


def _stated(schema: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Each keyword with its value and where it stands."""
    if isinstance(schema, list):
        for at, each in enumerate(schema):
            yield from _stated(each, f"{path}.{at}")
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        where = f"{path}.{key}".removeprefix(".")
        yield where, key, value
        if key in _NAMED and isinstance(value, Mapping):
            for name, each in value.items():
                yield from _stated(each, f"{where}.{name}")
        elif key not in _VALUES:
            yield from _stated(value, where)


def check_schema(schema: Any, param: str | None) -> None:
    """Raises BadRequest for a schema that is too large or no schema, Unsupported for what could not be kept."""
    if not isinstance(schema, Mapping | bool):
        raise BadRequest("A JSON schema is an object, or true or false.", param=param)
    try:
        size = len(json.dumps(schema))
    except (RecursionError, ValueError, TypeError) as error:
        raise BadRequest(f"The schema cannot be written as JSON: {error}", param=param) from None
    if size > MOST_CHARS:
        raise BadRequest(
            f"The schema is too large: {size} characters, where at most {MOST_CHARS} are taken.", param=param
        )
    for part in _parts(schema):
        if _counts_keys(part):
            raise Unsupported(
                "minProperties is supported only up to 1, up to the number of required properties, or where all "
                "properties are listed: a key may be written twice.",
                param=param,
            )


def _counts_keys(schema: Mapping[str, Any]) -> bool:
    """Whether the schema asks for a number of keys that the grammar cannot count, as it may repeat unlisted ones."""
    least = schema.get("minProperties")
    if not isinstance(least, int) or least <= 1:
        return False
    required = schema.get("required")
    listed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return not listed and least > (len(set(required)) if isinstance(required, list) else 0)


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Everything in a schema that may be one. Values that only look like schemas are looked at too, which is safe."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
