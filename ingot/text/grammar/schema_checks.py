"""What is checked of a JSON schema before the library sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ingot.errors import BadRequest, Unsupported
from ingot.text.grammar.limits import MOST_CHARS


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
