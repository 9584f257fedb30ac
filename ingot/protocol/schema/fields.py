"""What a wire field may hold. One description both reads a value and gives its JSON Schema.

A kind's `parse` returns the value that the rest of the program wants, or raises `BadRequest` whose `param` is the
dotted path of the offending value and whose message states what is allowed. `schema` says the same to machines; the two
must never disagree, as the OpenAPI document is made of it. Fields that are only hints (`HintField`) are accepted
without effect and named in the receipt.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ingot.errors import BadRequest, UnknownField, Unsupported
from ingot.protocol.schema.bounds import UNKNOWN_FIELDS, IntRange, Range
from ingot.protocol.terms import NO_TERMS, Terms

Schema = dict[str, Any]


@dataclass(slots=True)
class BodyReading:
    """The state of parsing one body: the terms it is read under, and the fields that have no effect."""

    terms: Terms
    ignored: list[str] = field(default_factory=list)
    past: bool = False  # the part that is parsed now was answered before
    media: int = 0  # images, pages and videos so far
    fetched: int = 0  # how many of them were fetched
    fetched_bytes: int = 0  # the size of those together

    def is_ignored(self, path: str) -> bool:
        return generalize_path(path) in self.ignored

    def ignore(self, path: str) -> None:
        """Name a field in the receipt, once. Their number is bounded: each costs a search for a misspelling."""
        if self.is_ignored(path):
            return
        if len(self.ignored) >= UNKNOWN_FIELDS:
            raise UnknownField(f"The body holds more than {UNKNOWN_FIELDS} unknown fields.", param=path)
        self.ignored.append(generalize_path(path))

    def ignore_hint(self, path: str) -> None:
        """The same for a known field that has no effect; a strict server refuses it."""
        if self.terms.strict:
            raise Unsupported(f"{path} has no effect here, and this server is strict.", param=path)
        self.ignore(path)


class FieldKind(ABC):
    """A set of JSON values: of these `types`, described by `words` unless `wanted` computes a description."""

    types: ClassVar[tuple[type, ...]] = (object,)
    words: ClassVar[str] = "any value"

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        if not self.admits(value):
            raise self.refuse(value, path, reading)
        return value

    @abstractmethod
    def schema(self, terms: Terms) -> Schema: ...

    def admits(self, value: object) -> bool:
        """Whether `value` has the JSON type of this kind, so that its `parse` decides about it."""
        return isinstance(value, self.types)

    def wanted(self, terms: Terms) -> str:
        """The kind in words, to end the sentence "expected …"."""
        return self.words

    def refuse(self, value: object, path: str, reading: BodyReading) -> BadRequest:
        return BadRequest(
            f"{path or 'The body'}: expected {self.wanted(reading.terms)}, got {describe_value(value)}.",
            param=path or None,
        )


class DelegateKind(FieldKind):
    """Delegates to another kind, which may depend on the terms."""

    @abstractmethod
    def kind(self, terms: Terms) -> FieldKind: ...

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        return self.kind(reading.terms).parse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        return self.kind(terms).schema(terms)

    def admits(self, value: object) -> bool:
        return self.kind(NO_TERMS).admits(value)

    def wanted(self, terms: Terms) -> str:
        return self.kind(terms).wanted(terms)


@dataclass(frozen=True, slots=True)
class Int(FieldKind):
    bounds: IntRange

    def parse(self, value: object, path: str, reading: BodyReading) -> int:
        whole = as_whole_number(value)
        if whole is None or not self.bounds[0] <= whole <= self.bounds[1]:
            raise self.refuse(value, path, reading)
        return whole

    def schema(self, terms: Terms) -> Schema:
        return {"type": "integer", "minimum": self.bounds[0], "maximum": self.bounds[1]}

    def admits(self, value: object) -> bool:
        return as_whole_number(value) is not None

    def wanted(self, terms: Terms) -> str:
        return f"an integer from {self.bounds[0]} to {self.bounds[1]}"


@dataclass(frozen=True, slots=True)
class Number(FieldKind):
    bounds: Range

    def parse(self, value: object, path: str, reading: BodyReading) -> float:
        if not self.admits(value) or not self.bounds[0] <= value <= self.bounds[1]:  # type: ignore[operator]
            raise self.refuse(value, path, reading)
        return float(value)  # type: ignore[arg-type]

    def schema(self, terms: Terms) -> Schema:
        return {"type": "number", "minimum": self.bounds[0], "maximum": self.bounds[1]}

    def admits(self, value: object) -> bool:
        return type(value) is int or (type(value) is float and math.isfinite(value))

    def wanted(self, terms: Terms) -> str:
        return f"a number from {self.bounds[0]:g} to {self.bounds[1]:g}"


@dataclass(frozen=True, slots=True)
class Timeout(DelegateKind):
    """Seconds, up to what the settings allow a request to take."""

    least: float

    def kind(self, terms: Terms) -> Number:
        return Number((self.least, terms.timeout_s))


@dataclass(frozen=True, slots=True)
class Bool(FieldKind):
    types, words = (bool,), "true or false"

    def schema(self, terms: Terms) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Text(FieldKind):
    """A string; `chars` bounds its length in code points (None: the body's own limit is enough)."""

    types = (str,)
    chars: int | None = None
    least: int = 0

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        if not isinstance(value, str) or not self.least <= len(value) <= (self.chars or len(value)):
            raise self.refuse(value, path, reading)
        return value

    def schema(self, terms: Terms) -> Schema:
        schema: Schema = {"type": "string"}
        if self.least:
            schema["minLength"] = self.least
        if self.chars is not None:
            schema["maxLength"] = self.chars
        return schema

    def wanted(self, terms: Terms) -> str:
        if self.chars is None:
            return "a string" if not self.least else "a string that is not empty"
        return f"a string of {self.least} to {self.chars} characters"


@dataclass(frozen=True, slots=True)
class OneOf(FieldKind):
    """One of a few strings. `refused` names values that are known and cannot be honoured, with the reason."""

    types = (str,)
    values: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        if isinstance(value, str) and value in self.refused:
            raise Unsupported(f"{path}: {value!r} {self.refused[value]}", param=path)
        if not isinstance(value, str) or value not in self.values:
            raise self.refuse(value, path, reading)
        return value

    def schema(self, terms: Terms) -> Schema:
        return {"type": "string", "enum": list(self.values)}

    def wanted(self, terms: Terms) -> str:
        return " or ".join(f'"{value}"' for value in self.values)


@dataclass(frozen=True, slots=True)
class Refused(FieldKind):
    """A known field that is not supported, unless it holds one of the values that change nothing."""

    words = "nothing"
    reason: str
    harmless: tuple[Any, ...] = ()

    def parse(self, value: object, path: str, reading: BodyReading) -> None:
        if not is_one_of(value, self.harmless):
            raise Unsupported(f"{path} {self.reason}", param=path)

    def schema(self, terms: Terms) -> Schema:
        return {"enum": list(self.harmless) or [None]}


@dataclass(frozen=True, slots=True)
class ListOf(FieldKind):
    item: FieldKind
    most: int
    least: int = 0

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[Any, ...]:
        if not isinstance(value, list) or not self.least <= len(value) <= self.most:
            raise self.refuse(value, path, reading)
        return tuple(self.item.parse(item, f"{path}.{at}", reading) for at, item in enumerate(value))

    def schema(self, terms: Terms) -> Schema:
        return {"type": "array", "items": self.item.schema(terms), "minItems": self.least, "maxItems": self.most}

    def admits(self, value: object) -> bool:
        return isinstance(value, list) and (not value or self.item.admits(value[0]))

    def wanted(self, terms: Terms) -> str:
        return f"a list of {self.least} to {self.most} items"


@dataclass(frozen=True, slots=True)
class MapOf(FieldKind):
    """An object whose keys are data."""

    types = (dict,)
    item: FieldKind
    most: int
    key_chars: int

    def parse(self, value: object, path: str, reading: BodyReading) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > self.most:
            raise self.refuse(value, path, reading)
        for key in value:
            if len(key) > self.key_chars:
                raise BadRequest(f"{path}: a key has more than {self.key_chars} characters.", param=path)
        return {key: self.item.parse(item, f"{path}.{key}", reading) for key, item in value.items()}

    def schema(self, terms: Terms) -> Schema:
        return {
            "type": "object",
            "additionalProperties": self.item.schema(terms),
            "maxProperties": self.most,
            "propertyNames": {"maxLength": self.key_chars},
        }

    def wanted(self, terms: Terms) -> str:
        return f"an object of at most {self.most} entries"


@dataclass(frozen=True, slots=True)
class Anything(FieldKind):
    """JSON that is passed on unchanged: an object (`dict`), or any value at all (`object`)."""

    type: type = object

    def schema(self, terms: Terms) -> Schema:
        return {"type": "object"} if self.type is dict else {}

    def admits(self, value: object) -> bool:
        return isinstance(value, self.type)

    def wanted(self, terms: Terms) -> str:
        return "an object" if self.type is dict else "any value"


@dataclass(frozen=True, slots=True)
class Either(FieldKind):
    """The first of `kinds` that admits the value parses it."""

    kinds: tuple[FieldKind, ...]

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        for kind in self.kinds:
            if kind.admits(value):
                return kind.parse(value, path, reading)
        raise self.refuse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        return {"anyOf": [kind.schema(terms) for kind in self.kinds]}

    def admits(self, value: object) -> bool:
        return any(kind.admits(value) for kind in self.kinds)

    def wanted(self, terms: Terms) -> str:
        return " or ".join(kind.wanted(terms) for kind in self.kinds)


def generalize_path(path: str) -> str:
    """`path` with `*` for each list index: the same field of every message is named once."""
    return re.sub(r"\.\d+(?=\.)", ".*", path)


def as_whole_number(value: object) -> int | None:
    """The integer that `value` is, or None. JSON has one number type, so 3.0 is 3; true is no number."""
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer():
        return int(value)
    return None


def describe_value(value: object) -> str:
    """`value` for an error message: itself where it is short, otherwise its size."""
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case int() | float():
            return "a very large number" if abs(value) >= 10**18 else str(value)
        case str():
            return f"a string of {len(value)} characters" if len(value) > 40 else f'"{value}"'
        case list():
            return f"a list of {len(value)} items"
        case _:
            return "an object"


def is_one_of(value: object, values: Iterable[Any]) -> bool:
    """Whether `value` is among `values`, where true is not 1 and 1 is not 1.0."""
    return any(type(value) is type(each) and value == each for each in values)


@dataclass(frozen=True, slots=True, init=False)
class HintField(FieldKind):
    """A field without effect. Any value but the `harmless` ones is named in the receipt."""

    harmless: tuple[Any, ...]
    kind: FieldKind

    def __init__(self, *harmless: Any, kind: FieldKind = Anything()) -> None:
        object.__setattr__(self, "harmless", harmless)
        object.__setattr__(self, "kind", kind)

    def parse(self, value: object, path: str, reading: BodyReading) -> None:
        if not is_one_of(self.kind.parse(value, path, reading), self.harmless):
            reading.ignore_hint(path)

    def schema(self, terms: Terms) -> Schema:
        return {"enum": list(self.harmless) or [None]} if terms.strict else self.kind.schema(terms)
