"""JSON schemas, read for the notations that are not JSON: alternatives, members, merged schemas, patterns.

Where a grammar is made here and not by the library, it allows a part of what the schema does: the listed members, in
their order, and no others. A keyword that would narrow this further and is not understood here is refused by name in a
strict schema, and left out in others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ingot.errors import BadRequest, Unsupported
from ingot.text.grammar.lark import (
    EMPTY_RULE,
    LarkRules,
    lark_choice,
    lark_optional,
    lark_regex,
    lark_sequence,
    quote_lark_text,
)
from ingot.text.parser.arguments import json_type_of, resolve_reference

ValueKind = Literal["values", "string", "number", "integer", "boolean", "null", "array", "object"]

_KEYWORDS_OF_KIND: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_KEYWORDS_OF_KIND["integer"] = _KEYWORDS_OF_KIND["number"]
_KIND_BY_KEYWORD = {
    **{"properties": "object", "items": "array", "minLength": "string", "maxLength": "string", "minimum": "number"},
    **{"additionalProperties": "object", "pattern": "string", "maximum": "number"},
}
VALUE_KINDS: tuple[ValueKind, ...] = ("string", "number", "boolean", "null", "array", "object")


@dataclass(frozen=True, slots=True)
class SchemaAlternative:
    """`values`: one of those of an enum. Else a value of this kind, with the keywords that are about the kind."""

    kind: ValueKind
    keywords: Mapping[str, Any]
    values: tuple[Any, ...] = ()

    @property
    def narrowed(self) -> bool:
        """Whether not every value of the kind will do."""
        return bool(self.keywords) or self.kind == "values"


def schema_alternatives(schema: Any, scope: SchemaScope) -> list[SchemaAlternative]:
    """All that `schema` allows, as far as it can be enforced; in a strict scope, Unsupported names what cannot."""
    schema = scope.flat(schema)
    if not isinstance(schema, Mapping):
        return [SchemaAlternative(kind, {}) for kind in VALUE_KINDS]
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches and isinstance(branches, list):
        return _branch_alternatives(schema, branches, scope)
    kinds = _kinds_of_schema(schema)
    if "enum" in schema or "const" in schema:
        return [_enum_alternative(schema, kinds, scope)]
    scope.refuse(schema, frozenset({"type", "nullable"}).union(*(_KEYWORDS_OF_KIND[kind] for kind in kinds)))
    return [
        SchemaAlternative(kind, {key: schema[key] for key in sorted(_KEYWORDS_OF_KIND[kind] & schema.keys())})
        for kind in (kinds or VALUE_KINDS)
    ]


def _branch_alternatives(
    schema: Mapping[str, Any], branches: Sequence[Any], scope: SchemaScope
) -> list[SchemaAlternative]:
    siblings = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
    found = [schema_alternatives(scope.both(branch, siblings), scope) for branch in branches]
    if "anyOf" not in schema:
        kinds = [kind for each in found for kind in {"number" if one.kind == "integer" else one.kind for one in each}]
        if len(set(kinds)) < len(kinds):
            scope.refuse({"oneOf": branches}, frozenset())
    return [one for each in found for one in each]


def _enum_alternative(schema: Mapping[str, Any], kinds: Sequence[ValueKind], scope: SchemaScope) -> SchemaAlternative:
    scope.refuse(schema, frozenset({"type", "enum", "const", "nullable"}))
    stated = [schema["const"]] if "const" in schema else schema["enum"]
    values = [value for value in stated if not kinds or _is_of_kind(value, kinds)] if isinstance(stated, list) else []
    if not values:
        raise BadRequest("An enum of a tool's schema has no value, or none of its type.")
    return SchemaAlternative("values", {}, tuple(values))


def _kinds_of_schema(schema: Mapping[str, Any]) -> list[ValueKind]:
    stated = schema.get("type") or next((kind for key, kind in _KIND_BY_KEYWORD.items() if key in schema), None)
    kinds: list[Any] = list(stated) if isinstance(stated, list) else [stated] if stated else []
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _KEYWORDS_OF_KIND:
            raise BadRequest(f"A tool's schema names a type {kind!r}, which JSON Schema does not have.")
    if kinds and schema.get("nullable") is True and "null" not in kinds:
        kinds.append("null")
    return kinds


def _is_of_kind(value: Any, kinds: Sequence[str]) -> bool:
    kind = json_type_of(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)


class StringRules:
    """Strings as they stand, none of which holds what would end it (`without`, patterns)."""

    def __init__(self, rules: LarkRules, scope: SchemaScope, without: Sequence[str]) -> None:
        self._rules, self._scope, self._without = rules, scope, without

    def until(self, closing: str, strings: Sequence[SchemaAlternative]) -> str:
        """One of the strings, and `closing` behind it."""
        bodies = [body for one in strings for body in self._bodies(one)]
        body = bodies[0] if len(bodies) == 1 else self._rules.terminal(" | ".join(bodies))
        return self._rules.until(closing, body, empty=any(map(self._may_be_empty, strings)))

    def _bodies(self, one: SchemaAlternative) -> Iterator[str]:
        if one.kind == "values":
            yield from (quote_lark_text(value) for value in one.values if isinstance(value, str) and value)
        else:
            yield self._rules.text(self._without, [*_length_keywords(one.keywords), *self._patterns(one.keywords)])

    def _patterns(self, keywords: Mapping[str, Any]) -> Iterator[str]:
        for pattern in _as_tuple(keywords.get("pattern")):
            if (expression := whole_text_pattern(str(pattern))) is not None:
                yield f"/{lark_regex(expression)}/"
            else:
                self._scope.refuse({"pattern": pattern}, frozenset())

    def _may_be_empty(self, one: SchemaAlternative) -> bool:
        if one.kind == "values":
            return "" in one.values
        supported = [
            str(pattern)
            for pattern in _as_tuple(one.keywords.get("pattern"))
            if whole_text_pattern(str(pattern)) is not None
        ]
        return not one.keywords.get("minLength") and all(re.search(pattern, "") for pattern in supported)


def _length_keywords(keywords: Mapping[str, Any]) -> list[str]:
    least, most = keywords.get("minLength"), keywords.get("maxLength")
    if least is None and most is None:
        return []
    return [f"/(?s:.){{{least or 0},{'' if most is None else most}}}/"]


# Keywords that say nothing of which values are right.
_ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "$anchor", "$comment", "$defs", "definitions"),
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("contentMediaType", "contentEncoding", "discriminator", "strict", "x-guidance"),
    }
)
_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties"})
_DEEPEST = 32


@dataclass(frozen=True, slots=True)
class SchemaMember:
    name: str
    schema: Any
    required: bool


@dataclass(frozen=True, slots=True)
class SchemaScope:
    """The document that a schema's references point into, and whether all of the schema must be enforced."""

    root: Mapping[str, Any]
    strict: bool

    def flat(self, schema: Any) -> Any:
        """The schema with what it refers to and all of its `allOf` put into one."""
        return self._flat(schema, 0)

    def both(self, one: Any, other: Any) -> Any:
        """A schema that states what both do."""
        stated = [each for each in (one, other) if isinstance(each, Mapping)]
        return {"allOf": stated} if stated else one

    def refuse(self, schema: Mapping[str, Any], understood: frozenset[str]) -> None:
        """Raises Unsupported, naming the keyword, for a strict schema with more keywords than are `understood`."""
        unknown = sorted(keyword for keyword in schema if keyword not in understood | _ANNOTATIONS)
        if self.strict and unknown:
            raise Unsupported(
                f"The keyword {unknown[0]} of a strict tool's schema cannot be enforced in this model's tool format."
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
            parts.insert(0, self._resolve(schema["$ref"]))
        found = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        for part in parts:
            flat = self._flat(part, depth + 1)
            found = merge_schemas(found, flat, self._refuse_conflict) if isinstance(flat, Mapping) else found
        return found

    def _refuse_conflict(self, keyword: str) -> None:
        if self.strict:
            raise Unsupported(
                f"A strict tool's schema states {keyword} twice: both cannot be enforced in this model's tool format."
            )

    def _resolve(self, reference: Any) -> Any:
        found = resolve_reference(reference, self.root)
        if found is None:
            raise Unsupported(f"The reference {reference} of a tool's schema leads nowhere.")
        return found


@dataclass(frozen=True, slots=True)
class ObjectMembers:
    """Of an object: the listed ones, in their order. Where none are, any of the schema `others`, unless it is None."""

    listed: tuple[SchemaMember, ...]
    others: Any = None


def object_members(schema: Any, scope: SchemaScope) -> ObjectMembers:
    schema = scope.flat(schema)
    if not isinstance(schema, Mapping):
        return ObjectMembers((), True)
    scope.refuse(schema, _OBJECT_KEYWORDS)
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, Mapping) else {}
    required = required if isinstance(required, list) else []
    others = schema.get("additionalProperties", True)
    unlisted = [SchemaMember(name, others or True, True) for name in required if name not in properties]
    listed = [SchemaMember(name, one, name in required) for name, one in properties.items()] + unlisted
    return ObjectMembers(tuple(listed), None if listed or others is False else others)


def join_member_rules(rules: LarkRules, written: Sequence[tuple[str, bool]], comma: str) -> str:
    """Expressions in their order, with `comma` between any two. With each comes whether it must be there."""
    behind, alone = EMPTY_RULE, EMPTY_RULE  # what may follow one of them, and what may follow none
    for expression, required in reversed(written):
        after = lark_sequence([comma, expression])
        following = lark_sequence([expression, behind])
        alone = rules.rule(following if required else lark_choice([following, alone]))
        behind = rules.rule(lark_sequence([after if required else lark_optional(after), behind]))
    return alone


_GREATER_WINS = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_LESSER_WINS = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_MERGED_DEEPLY = frozenset({"items", "additionalProperties"})

CannotMerge = Callable[[str], None]
"""Called with a keyword whose two statements cannot be merged. Where it returns, the first of them counts."""


def merge_schemas(one: Mapping[str, Any], other: Mapping[str, Any], on_conflict: CannotMerge) -> dict[str, Any]:
    """What both allow."""
    found = dict(one)
    for keyword, stated in other.items():
        try:
            found[keyword] = (
                _merge_keyword(keyword, found[keyword], stated, on_conflict) if keyword in found else stated
            )
        except (TypeError, AttributeError):  # not what the keyword takes
            on_conflict(keyword)
    return found


def _merge_keyword(keyword: str, one: Any, other: Any, on_conflict: CannotMerge) -> Any:
    if one == other or keyword in ("title", "description", "default", "examples"):
        return one
    if keyword in _GREATER_WINS or keyword in _LESSER_WINS:
        return max(one, other) if keyword in _GREATER_WINS else min(one, other)
    if keyword in _MERGED_DEEPLY:
        both = [each for each in (one, other) if isinstance(each, Mapping)]
        return False if one is False or other is False else {"allOf": both}
    match keyword:
        case "properties":
            shared = {name: {"allOf": [one[name], other[name]]} for name in one.keys() & other.keys()}
            return {**one, **other, **shared}
        case "$defs" | "definitions":
            return {**other, **one}
        case "required":
            return [*one, *(name for name in other if name not in one)]
        case "pattern":
            return (*_as_tuple(one), *_as_tuple(other))
        case "type":
            common = _common_types(_as_tuple(one), _as_tuple(other))
        case "enum":
            common = [value for value in one if value in other]
        case _:
            common = []
    if not common:
        on_conflict(keyword)
        return one
    return common


def _common_types(one: tuple[Any, ...], other: tuple[Any, ...]) -> list[Any]:
    def within(kind: Any, kinds: tuple[Any, ...]) -> bool:
        return kind in kinds or (kind == "integer" and "number" in kinds)

    return [kind for kind in one if within(kind, other)] + [
        kind for kind in other if kind not in one and within(kind, one)
    ]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)


_ANY_TEXT = "(?s:.*)"
_TOKEN = re.compile(
    r"""
    \\[dDsSwWnrtfv] | \\x[0-9a-fA-F]{2} | \\u[0-9a-fA-F]{4} | \\p\{\w+\} | \\P\{\w+\} | \\[^\w\s]  # escapes
    | \[\^?(?:\\[^\n]|[^\]\[\\&~])(?:\\[^\n]|[^\]\[\\&~])*\]                                         # a class
    | \{[0-9]{1,4}(?:,[0-9]{0,4})?\}(?!\?) | [*+?](?!\?)                                            # repetitions
    | \(\?: | [()|^$] | [^\\\[\](){}*+?|^$]
    """,
    re.VERBOSE | re.DOTALL,
)


def whole_text_pattern(pattern: str) -> str | None:
    """What matches a text exactly where `pattern` is found in it; None where that cannot be expressed.

    Lookarounds, references, word boundaries, lazy repetition and anchors amid a pattern cannot.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return None
    tokens = list(_pattern_tokens(pattern))
    if "" in tokens:
        return None
    branches = [_anchored_branch(branch) for branch in _pattern_branches(tokens)]
    return None if None in branches else "|".join(f"({branch})" for branch in branches)


def _pattern_tokens(pattern: str) -> Iterator[str]:
    """The parts of the pattern; an empty one where it goes on with anything else."""
    at = 0
    while at < len(pattern):
        match = _TOKEN.match(pattern, at)
        if match is None or (pattern.startswith("(?", at) and match.group() != "(?:"):
            yield ""
            return
        yield match.group()
        at = match.end()


def _pattern_branches(tokens: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in ("(", "(?:")) - (token == ")")
        if token == "|" and depth == 0:
            found.append([])
        else:
            found[-1].append(token)
    return found


def _anchored_branch(branch: list[str]) -> str | None:
    begins, ends = branch[:1] == ["^"], branch[-1:] == ["$"]
    inner = branch[begins : len(branch) - ends]
    if "^" in inner or "$" in inner:
        return None
    return ("" if begins else _ANY_TEXT) + "".join(inner) + ("" if ends else _ANY_TEXT)
