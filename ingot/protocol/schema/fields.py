"""What a wire field may hold. One description both reads a value and gives its JSON Schema.

A kind's `parse` returns the value that the rest of the program wants, or raises `BadRequest` whose `param` is the
dotted path of the offending value and whose message states what is allowed. `schema` says the same to machines; the two
must never disagree, as the OpenAPI document is made of it. Fields that are only hints are accepted without effect and
named in the receipt (`Unheeded`, `Passed`).
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ingot.errors import BadRequest, UnknownField, Unsupported
from ingot.protocol.schema.bounds import UNKNOWN_FIELDS, IntRange, Range
from ingot.protocol.terms import NO_TERMS, Terms

Schema = dict[str, Any]


@dataclass(slots=True)
class BodyReading:
    """One body being read: the terms it is read under, and the fields in it that nobody knows."""

    terms: Terms
    ignored: list[str] = field(default_factory=list)
    past: bool = False  # what is being read now was answered before
    media: int = 0  # pictures and clips that were read,
    fetched: int = 0  # those of them that have to be fetched,
    fetched_bytes: int = 0  # and what these have in all

    def knows_ignored(self, path: str) -> bool:
        return generalize_path(path) in self.ignored

    def ignore(self, path: str) -> None:
        """Note an unknown field. Their number is bounded, as each one costs a search for what it may have meant."""
        if len(self.ignored) >= UNKNOWN_FIELDS:
            raise UnknownField(f"The body holds more than {UNKNOWN_FIELDS} unknown fields.", param=path)
        self.ignored.append(generalize_path(path))


class FieldKind(ABC):
    """A set of JSON values: of these `types`, and in `words` where those do not depend on anything."""

    types: ClassVar[tuple[type, ...]] = (object,)
    words: ClassVar[str] = "any value"

    @abstractmethod
    def parse(self, value: object, path: str, reading: BodyReading) -> Any: ...

    @abstractmethod
    def schema(self, terms: Terms) -> Schema: ...

    def admits(self, value: object) -> bool:
        """Whether `value` has the JSON type of this kind, so that `parse` is the one to judge it."""
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
    """Another kind, which may depend on the terms, judges the value."""

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

    def parse(self, value: object, path: str, reading: BodyReading) -> bool:
        if not isinstance(value, bool):
            raise self.refuse(value, path, reading)
        return value

    def schema(self, terms: Terms) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Text(FieldKind):
    """A string; `chars` bounds its length in code points (None: the body's own limit is enough)."""

    types = (str,)
    chars: int | None = None
    least: int = 0

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        if not isinstance(value, str) or len(value) < self.least:
            raise self.refuse(value, path, reading)
        if self.chars is not None and len(value) > self.chars:
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
    """A known field that cannot be honoured, unless it holds one of the values that ask for nothing."""

    words = "nothing"
    reason: str
    harmless: tuple[Any, ...] = ()

    def parse(self, value: object, path: str, reading: BodyReading) -> None:
        if not any(type(value) is type(free) and value == free for free in self.harmless):
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
        return {
            "type": "array",
            "items": self.item.schema(terms),
            "minItems": self.least,
            "maxItems": self.most,
        }

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
    """JSON that is handed on as it stands: an object (`dict`), or any value at all (`object`)."""

    type: type = object

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        if not isinstance(value, self.type):
            raise self.refuse(value, path, reading)
        return value

    def schema(self, terms: Terms) -> Schema:
        return {"type": "object"} if self.type is dict else {}

    def admits(self, value: object) -> bool:
        return isinstance(value, self.type)

    def wanted(self, terms: Terms) -> str:
        return "an object" if self.type is dict else "any value"


@dataclass(frozen=True, slots=True)
class Either(FieldKind):
    """The first of `kinds` that admits the value judges it."""

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
    """`path` with `*` for each position in a list: the same field of every message is named once."""
    return re.sub(r"\.\d+(?=\.)", ".*", path)


def as_whole_number(value: object) -> int | None:
    """The integer that `value` is, or None. JSON has one number type, so 3.0 is 3; true is no number."""
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer():
        return int(value)
    return None


def describe_value(value: object) -> str:
    """`value` for an error message: its worth where it is short, its size otherwise, never all of it."""
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


def note_ignored(path: str, reading: BodyReading) -> None:
    """Names in the receipt what has no effect; a strict server refuses it."""
    if reading.terms.strict:
        raise Unsupported(f"{path} has no effect here, and this server is strict.", param=path)
    if not reading.knows_ignored(path):
        reading.ignore(path)


@dataclass(frozen=True, slots=True)
class IgnoredField(FieldKind):
    """Any object."""

    types, words = (dict,), "an object"

    def parse(self, value: object, path: str, reading: BodyReading) -> None:
        if not isinstance(value, dict):
            raise self.refuse(value, path, reading)
        note_ignored(path, reading)

    def schema(self, terms: Terms) -> Schema:
        return {"enum": [None]} if terms.strict else {"type": "object"}


@dataclass(frozen=True, slots=True, init=False)
class HintField(FieldKind):
    """Anything. What is not `harmless` asks for something that has no effect here."""

    harmless: tuple[Any, ...]

    def __init__(self, *harmless: Any) -> None:
        object.__setattr__(self, "harmless", harmless)

    def parse(self, value: object, path: str, reading: BodyReading) -> None:
        if not any(type(value) is type(free) and value == free for free in self.harmless):
            note_ignored(path, reading)

    def schema(self, terms: Terms) -> Schema:
        return {"enum": list(self.harmless) or [None]} if terms.strict else {}


@dataclass(frozen=True, slots=True)
class HintWordField(FieldKind):
    """One of a few words. Those that are not `harmless` ask for something that has no effect here."""

    types = (str,)
    values: tuple[str, ...]
    harmless: tuple[str, ...] = ()

    def parse(self, value: object, path: str, reading: BodyReading) -> None:
        word = OneOf(self.values).parse(value, path, reading)
        if word in self.harmless:
            return
        note_ignored(path, reading)

    def schema(self, terms: Terms) -> Schema:
        return OneOf(self.harmless if terms.strict else self.values).schema(terms)

    def wanted(self, terms: Terms) -> str:
        return OneOf(self.values).wanted(terms)
