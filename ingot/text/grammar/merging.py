"""Schemas that hold together, put into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_GREATER = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_LESSER = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_NARROWER = frozenset({"items", "additionalProperties"})

Unable = Callable[[str], None]
"""Told of a keyword whose two statements cannot be put into one. Where it returns, the first of them stands."""


def merged(one: Mapping[str, Any], other: Mapping[str, Any], unable: Unable) -> dict[str, Any]:
    """What both allow."""
    found = dict(one)
    for keyword, stated in other.items():
        try:
            found[keyword] = _both(keyword, found[keyword], stated, unable) if keyword in found else stated
        except (TypeError, AttributeError):  # not what the keyword takes
            unable(keyword)
    return found


def _both(keyword: str, one: Any, other: Any, unable: Unable) -> Any:
    if one == other or keyword in ("title", "description", "default", "examples"):
        return one
    if keyword in _GREATER or keyword in _LESSER:
        return max(one, other) if keyword in _GREATER else min(one, other)
    if keyword in _NARROWER:
        return _narrower(one, other)
    match keyword:
        case "properties":
            shared = {name: {"allOf": [one[name], other[name]]} for name in one.keys() & other.keys()}
            return {**one, **other, **shared}
        case "$defs" | "definitions":
            return {**other, **one}
        case "required":
            return [*one, *(name for name in other if name not in one)]
        case "pattern":
            return (*_listed(one), *_listed(other))
        case "type":
            common = _common_types(_listed(one), _listed(other))
        case "enum":
            common = [value for value in one if value in other]
        case _:
            common = []
    if not common:
        unable(keyword)
        return one
    return common


def _narrower(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    return {"allOf": [each for each in (one, other) if isinstance(each, Mapping)]}


def _common_types(one: tuple[Any, ...], other: tuple[Any, ...]) -> list[Any]:
    def within(kind: Any, kinds: tuple[Any, ...]) -> bool:
        return kind in kinds or (kind == "integer" and "number" in kinds)

    return [kind for kind in one if within(kind, other)] + [
        kind for kind in other if kind not in one and within(kind, one)
    ]


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
