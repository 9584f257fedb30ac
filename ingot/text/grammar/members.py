"""The members of an object, as a schema lists them: for the ways of writing that are not JSON.

Where a grammar is made here and not by the library, it allows a part of what the schema does: the listed members, in
their order, and no others. A keyword that would narrow this further and is not understood here is refused by name in
a strict schema, and left out in others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.errors import Unsupported
from ingot.text.grammar.lark import NOTHING, Rules, one_of, optional, sequence
from ingot.text.grammar.merging import merged

# Keywords that say nothing of which values are right.
_SILENT = frozenset(
    {
        *("$schema", "$id", "$anchor", "$comment", "$defs", "definitions"),
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("contentMediaType", "contentEncoding", "discriminator", "strict", "x-guidance"),
    }
)
_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"})
_DEEPEST = 32


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    schema: Any
    required: bool


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a schema stands: the document that its references point into, and how closely it is to be kept."""

    root: Mapping[str, Any]
    strict: bool

    def flat(self, schema: Any) -> Any:
        """The schema with what it refers to and all of its `allOf` put into one."""
        return self._flat(schema, 0)

    def both(self, one: Any, other: Any) -> Any:
        """A schema that says what both do."""
        stated = [each for each in (one, other) if isinstance(each, Mapping)]
        return {"allOf": stated} if stated else one

    def refuse(self, schema: Mapping[str, Any], understood: frozenset[str]) -> None:
        """Raises Unsupported, naming the keyword, for a strict schema that says more than is `understood`."""
        unknown = sorted(keyword for keyword in schema if keyword not in understood | _SILENT)
        if self.strict and unknown:
            raise Unsupported(
                f"The keyword {unknown[0]} of a strict tool's schema cannot be held to in this model's tool format."
            )

    def enclosed(self, schema: Any) -> Any:
        """The schema as a document of its own, with the definitions that it may refer to."""
        if not isinstance(schema, Mapping):
            return schema
        shared = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
        return {**shared, **schema}

    def _flat(self, schema: Any, depth: int) -> Any:
        if depth > _DEEPEST:
            raise Unsupported("The references of a tool's schema go in circles.")
        if not isinstance(schema, Mapping) or not schema.keys() & {"$ref", "allOf"}:
            return schema
        stated = schema.get("allOf")
        parts = list(stated) if isinstance(stated, list) else []
        if "$ref" in schema:
            parts.insert(0, self._pointed(schema["$ref"]))
        found = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        for part in parts:
            flat = self._flat(part, depth + 1)
            found = merged(found, flat, self._unable) if isinstance(flat, Mapping) else found
        return found

    def _unable(self, keyword: str) -> None:
        if self.strict:
            raise Unsupported(
                f"What a strict tool's schema says of {keyword} in two places cannot be held to in this model's tool "
                "format."
            )

    def _pointed(self, reference: Any) -> Any:
        found: Any = self.root
        for step in str(reference).removeprefix("#").split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                raise Unsupported(f"The reference {reference} of a tool's schema leads nowhere.")
            found = found[key]
        return found


@dataclass(frozen=True, slots=True)
class Members:
    """Of an object: the listed ones, in their order. Where none are, any of the schema `others`, unless it is None."""

    listed: tuple[Member, ...]
    others: Any = None


def members(schema: Any, scope: Scope) -> Members:
    schema = scope.flat(schema)
    if not isinstance(schema, Mapping):
        return Members((), True)
    scope.refuse(schema, _OF_OBJECTS)
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, Mapping) else {}
    required = required if isinstance(required, list) else []
    others = schema.get("additionalProperties", True)
    unlisted = [Member(name, others or True, True) for name in required if name not in properties]
    listed = [Member(name, one, name in required) for name, one in properties.items()] + unlisted
    return Members(tuple(listed), None if listed or others is False else others)


def join_members(rules: Rules, written: Sequence[tuple[str, bool]], comma: str) -> str:
    """Expressions in their order, with `comma` between any two. With each comes whether it must be there."""
    behind, alone = NOTHING, NOTHING  # what may follow one of them, and what may follow none
    for expression, required in reversed(written):
        after = sequence([comma, expression])
        following = sequence([expression, behind])
        alone = rules.rule(following if required else one_of([following, alone]))
        behind = rules.rule(sequence([after if required else optional(after), behind]))
    return alone
