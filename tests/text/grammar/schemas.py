"""JSON schemas of every kind that is supported, in all combinations."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

_NAMES = st.sampled_from(["a", "b", "name", "two words", "ünï", 'q"uote', "back\\slash", "x-y", "0", ""])
# SmolLM2's vocabulary cannot write what lies beyond.
_TEXTS = st.text(st.characters(codec="utf-8", max_codepoint=0x1FFFF), max_size=6)
_SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-999, 999), _TEXTS)
_PATTERNS = ["^[a-z]{2,4}$", "[0-9]", "^(foo|bar)+$", "^\\d{3}-\\d{4}$", "x|y", "^$", "é.", "\\$[0-9]+\\.[0-9]{2}"]
_FORMATS = ["time", "email", "ipv4", "uuid"]


@st.composite
def _ordered(draw: st.DrawFn, low: str, high: str, values: st.SearchStrategy[Any]) -> Schema:
    """Bounds, none of which excludes the other."""
    found = sorted(draw(st.lists(values, min_size=2, max_size=2)))
    return {key: value for key, value in zip((low, high), found, strict=True) if draw(st.booleans())}


@st.composite
def _strings(draw: st.DrawFn) -> Schema:
    kind = draw(st.sampled_from(["plain", "bounded", "bounded", "pattern", "format"]))
    if kind == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from(_PATTERNS))}
    if kind == "format":
        return {"type": "string", "format": draw(st.sampled_from(_FORMATS))}
    return {
        "type": "string",
        **(draw(_ordered("minLength", "maxLength", st.integers(0, 12))) if kind != "plain" else {}),
    }


@st.composite
def _integers(draw: st.DrawFn) -> Schema:
    extra = {"multipleOf": draw(st.sampled_from([2, 3, 5, 10]))} if draw(st.integers(0, 4)) == 0 else {}
    low, high = draw(st.sampled_from([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")]))
    numbers = sorted(draw(st.lists(st.integers(-5000, 5000), min_size=2, max_size=2)))
    bounds = {low: numbers[0], high: numbers[1] + 30}
    return {"type": "integer", **extra, **{key: value for key, value in bounds.items() if draw(st.booleans())}}


@st.composite
def _numbers(draw: st.DrawFn) -> Schema:
    values = st.integers(-500, 500).map(lambda whole: whole / 10)
    return {"type": "number", **draw(_ordered("minimum", "maximum", values))}


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    schema: Schema = {"type": "array", **draw(_ordered("minItems", "maxItems", st.integers(0, 4)))}
    if draw(st.integers(0, 3)) == 0:
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    return {**schema, "items": draw(inner)}


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_NAMES, inner, max_size=4))
    schema: Schema = {"type": "object", "properties": properties}
    if properties:
        schema["required"] = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    schema["additionalProperties"] = draw(st.one_of(st.just(False), st.just(False), st.booleans(), inner))
    return schema


def _combined(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.one_of(
        _arrays(inner),
        _objects(inner),
        _objects(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
        inner.map(lambda schema: {"allOf": [schema]}),
        st.lists(st.sampled_from(["string", "integer", "boolean", "null"]), min_size=1, unique=True).map(
            lambda types: {"type": types}
        ),
    )


_LEAVES = st.one_of(
    _strings(),
    _integers(),
    _numbers(),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.lists(_SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    _SCALARS.map(lambda value: {"const": value}),
)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    schema = draw(st.recursive(_LEAVES, _combined, max_leaves=6))
    if draw(st.integers(0, 4)) == 0:
        # The same by reference, also from within itself.
        tree = {"type": "object", "properties": {"value": {"$ref": "#/$defs/part"}, "next": {"$ref": "#/$defs/tree"}}}
        defs = {"part": schema, "tree": {**tree, "required": ["value"], "additionalProperties": False}}
        return {"$defs": defs, "$ref": draw(st.sampled_from(["#/$defs/part", "#/$defs/tree"]))}
    return {"title": "A schema", "description": "Made at random.", **schema}
