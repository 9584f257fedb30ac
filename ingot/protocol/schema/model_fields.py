"""Fields that name a model or depend on the served one: token ids and biases, lengths and stop strings, time to live,
prefix cache, proposers, chat template variables; and on one that does not generate: its names, an encoder's token ids,
dimensions and prompts. Light to import: the settings' checks use it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ingot.errors import BadRequest, UnknownField
from ingot.protocol.schema import bounds
from ingot.protocol.schema.bounds import TEMPLATE_NUMBER, TEMPLATE_TEXT_CHARS, IntRange, Range
from ingot.protocol.schema.fields import (
    BodyReading,
    Bool,
    DelegateKind,
    Either,
    FieldKind,
    Int,
    ListOf,
    Number,
    OneOf,
    Schema,
    Text,
    as_whole_number,
    describe_value,
)
from ingot.protocol.terms import NO_TERMS, Terms, matches_model_name, model_names_schema, unknown_model_error

ADAPTER_SEPARATOR: Final = ":"


@dataclass(frozen=True, slots=True)
class ModelNameField(FieldKind):
    """A name of the served model or of its adapters. Any other is a 404 that lists them."""

    types, words = (str,), "the name of a model, as a string"

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        if not isinstance(value, str):
            raise self.refuse(value, path, reading)
        names = self.names(reading.terms)
        if not matches_model_name(value, names):
            raise unknown_model_error(value, self.listed(reading.terms))
        return value

    def schema(self, terms: Terms) -> Schema:
        return model_names_schema(self.names(terms))

    def listed(self, terms: Terms) -> tuple[str, ...]:
        """What an error lists: without the adapters after a model's name."""
        return (*terms.models, *terms.loras)

    def names(self, terms: Terms) -> tuple[str, ...]:
        """Models, adapters, and adapters after a model's name."""
        both = (f"{model}{ADAPTER_SEPARATOR}{lora}" for model in terms.models for lora in terms.loras)
        return (*terms.models, *terms.loras, *both)


def adapter_named_in(model: str, terms: Terms) -> str | None:
    """The adapter that `model` names, if it does: alone, or after a model's name."""
    if model in terms.loras:
        return model
    base, between, name = model.rpartition(ADAPTER_SEPARATOR)
    return name if between and name in terms.loras and matches_model_name(base, terms.models) else None


@dataclass(frozen=True, slots=True)
class TokenIdsField(FieldKind):
    """A list of token ids of the served model."""

    most: int
    least: int = 1

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[int, ...]:
        if not isinstance(value, list) or not self.least <= len(value) <= self.most:
            raise self.refuse(value, path, reading)
        ids = [as_whole_number(item) for item in value]
        for at, token in enumerate(ids):
            if token is None or not 0 <= token < reading.terms.vocab:
                raise BadRequest(
                    f"{path}.{at}: expected a token id from 0 to {reading.terms.vocab - 1}.", param=f"{path}.{at}"
                )
        return tuple(token for token in ids if token is not None)

    def schema(self, terms: Terms) -> Schema:
        item = {"type": "integer", "minimum": 0, "maximum": terms.vocab - 1}
        return {"type": "array", "items": item, "minItems": self.least, "maxItems": self.most}

    def admits(self, value: object) -> bool:
        return isinstance(value, list) and (not value or as_whole_number(value[0]) is not None)

    def wanted(self, terms: Terms) -> str:
        return f"a list of {self.least} to {self.most} token ids"


@dataclass(frozen=True, slots=True)
class LogitBiasesField(FieldKind):
    """An object from token ids, written as strings, to a number; read as pairs."""

    types = (dict,)
    bounds: Range
    most: int

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict) or len(value) > self.most:
            raise self.refuse(value, path, reading)
        number = Number(self.bounds)
        return tuple(
            (self._token(key, path, reading.terms), number.parse(bias, f"{path}.{key[:20]}", reading))
            for key, bias in value.items()
        )

    def schema(self, terms: Terms) -> Schema:
        return {
            "type": "object",
            "propertyNames": {"pattern": numeral_pattern(terms.vocab - 1)},
            "additionalProperties": Number(self.bounds).schema(terms),
            "maxProperties": self.most,
        }

    def wanted(self, terms: Terms) -> str:
        return f"an object of at most {self.most} token ids"

    def _token(self, key: str, path: str, terms: Terms) -> int:
        # Only the plain numeral: two spellings of one id would be two contradicting entries.
        if not (key.isascii() and key.isdigit() and len(key) <= 12) or str(int(key)) != key:
            raise BadRequest(f"{path}: keys are token ids in decimal, got '{key[:20]}'.", param=path)
        if int(key) >= terms.vocab:
            raise BadRequest(f"{path}: token ids end at {terms.vocab - 1}, got {key}.", param=path)
        return int(key)


def numeral_pattern(most: int) -> str:
    """A regular expression for the decimal numerals 0 to `most`, without leading zeros."""
    digits = str(most)
    cases = [f"[1-9][0-9]{{{length - 1}}}" for length in range(1, len(digits))]
    for at, digit in enumerate(digits):
        least = 1 if at == 0 else 0
        if int(digit) > least:
            cases.append(f"{digits[:at]}[{least}-{int(digit) - 1}][0-9]{{{len(digits) - at - 1}}}")
    cases.append(digits)
    return f"^(?:0|{'|'.join(cases)})$"


NO_TOKEN_LIMIT: Final = -1
STOP_STRINGS_FIELD: Final = ListOf(Text(bounds.STOP_STRING_CHARS), bounds.STOP_STRINGS)
STOP_FIELD: Final = Either((Text(bounds.STOP_STRING_CHARS), STOP_STRINGS_FIELD))


@dataclass(frozen=True, slots=True)
class TokenLimitField(FieldKind):
    """A number of tokens. -1 is no limit, as null is."""

    bounds: IntRange

    def parse(self, value: object, path: str, reading: BodyReading) -> int | None:
        whole = as_whole_number(value)
        if whole == NO_TOKEN_LIMIT:
            return None
        if whole is None or not self.bounds[0] <= whole <= self.bounds[1]:
            raise self.refuse(value, path, reading)
        return whole

    def schema(self, terms: Terms) -> Schema:
        return {"anyOf": [Int(self.bounds).schema(terms), {"const": NO_TOKEN_LIMIT}]}

    def admits(self, value: object) -> bool:
        return as_whole_number(value) is not None

    def wanted(self, terms: Terms) -> str:
        return f"{Int(self.bounds).wanted(terms)}, or {NO_TOKEN_LIMIT} for no limit"


ABOUT_TTL: Final = "Seconds that the model stays loaded after the request; the only model of a server always stays."


@dataclass(frozen=True, slots=True)
class TimeToLiveField(DelegateKind):
    """Seconds. The model registry has read it before; it has no effect on the only model of a server."""

    def parse(self, value: object, path: str, reading: BodyReading) -> None:
        self.kind(reading.terms).parse(value, path, reading)
        if not reading.terms.unloads:
            reading.ignore(path)

    def kind(self, terms: Terms) -> Number:
        return Number(bounds.TTL_S)


CACHE_FIELD: Final = OneOf(("auto", "exact", "off"))
ABOUT_CACHE_FIELD: Final = (
    "`off` neither reads nor writes the prefix cache; `exact` reuses nothing that went through a lossy `--cache-codec`."
)
ABOUT_SPECULATE: Final = (
    "The proposers of draft tokens: `auto` for all that the server offers, `off`, or some of them, joined by commas. "
    "The text is the same."
)


@dataclass(frozen=True, slots=True)
class ProposersField(FieldKind):
    """Parsed as `Request.speculate`: None for all, else the names."""

    types = (str,)

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[str, ...] | None:
        if not isinstance(value, str) or len(value) > bounds.IDENTIFIER_CHARS:
            raise self.refuse(value, path, reading)
        if value in ("auto", "off"):
            return None if value == "auto" else ()
        names = value.split(",")
        for name in names:
            if name not in reading.terms.proposers:
                wanted = self.wanted(reading.terms)
                raise BadRequest(f"{path}: {describe_value(name)} is not offered here; expected {wanted}.", param=path)
        return tuple(dict.fromkeys(names))

    def schema(self, terms: Terms) -> Schema:
        if not terms.proposers:
            return {"type": "string", "enum": ["auto", "off"]}
        name = "|".join(re.escape(name) for name in terms.proposers)
        pattern = f"^(?:auto|off|(?:{name})(?:,(?:{name}))*)$"
        return {"type": "string", "pattern": pattern, "maxLength": bounds.IDENTIFIER_CHARS}

    def wanted(self, terms: Terms) -> str:
        if not terms.proposers:
            return '"auto" or "off"'
        return f'"auto", "off", or some of {", ".join(terms.proposers)}, joined by commas'


THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
"""The template variables that switch thinking on and off. They are accepted for every model, as the field is."""
TEMPLATE_VALUE = Either((Bool(), Number(TEMPLATE_NUMBER), Text(TEMPLATE_TEXT_CHARS)))


def template_variables_problem(variables: dict[str, Any]) -> str | None:
    """What is wrong with the values of a setting, whatever the template reads."""
    for name, value in variables.items():
        try:
            TEMPLATE_VALUE.parse(value, name, BodyReading(NO_TERMS))
        except BadRequest as error:
            return error.message.rstrip(".")
    return None


@dataclass(frozen=True, slots=True)
class TemplateVariablesField(FieldKind):
    """A variable that the template does not read is refused, unless it switches thinking."""

    types, words = (dict,), "an object"

    def parse(self, value: object, path: str, reading: BodyReading) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.refuse(value, path, reading)
        known = reading.terms.template_variables
        for name in value:
            if name not in known and name not in THINKING_SWITCHES:
                reads = ", ".join(known) or "none"
                raise UnknownField(f"{path}: the chat template reads no '{name[:100]}'. It reads: {reads}.", param=path)
        return {
            name: _variable_kind(name, known).parse(each, f"{path}.{name}", reading) for name, each in value.items()
        }

    def schema(self, terms: Terms) -> Schema:
        known = terms.template_variables
        properties = {name: _variable_kind(name, known).schema(terms) for name in (*known, *THINKING_SWITCHES)}
        return {"type": "object", "properties": properties, "additionalProperties": False}


def _variable_kind(name: str, known: Sequence[str]) -> FieldKind:
    return TEMPLATE_VALUE if name in known else Bool()


@dataclass(frozen=True, slots=True)
class TaskModelField(ModelNameField):
    """A name of the served model of a kind that does not generate."""

    model_kind: str

    def schema(self, terms: Terms) -> Schema:
        names = self.names(terms)
        return model_names_schema(names) if names else {"type": "string"}

    def names(self, terms: Terms) -> tuple[str, ...]:
        return terms.task(self.model_kind).models

    listed = names


@dataclass(frozen=True, slots=True)
class EncoderField(DelegateKind):
    """A field whose bounds are those of the embedding model: a token id is one of its vocabulary."""

    own: FieldKind

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        return self.own.parse(value, path, replace(reading, terms=self._terms(reading.terms)))

    def schema(self, terms: Terms) -> Schema:
        return self.own.schema(self._terms(terms))

    def kind(self, terms: Terms) -> FieldKind:
        return self.own

    def _terms(self, terms: Terms) -> Terms:
        encoder = terms.task("embedding")
        return replace(terms, models=encoder.models, vocab=encoder.vocab)


@dataclass(frozen=True, slots=True)
class DimensionsField(DelegateKind):
    """The length of the embeddings, at most that of the model's."""

    def kind(self, terms: Terms) -> Int:
        return Int((1, terms.task("embedding").dimension))


@dataclass(frozen=True, slots=True)
class PromptNameField(FieldKind):
    """One of the prompts in the embedding model's files."""

    types = (str,)

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        names = self._names(reading.terms)
        if not names:
            raise self.refuse(value, path, reading)
        return OneOf(names).parse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        return OneOf(self._names(terms)).schema(terms) if self._names(terms) else {"enum": [None]}

    def wanted(self, terms: Terms) -> str:
        names = self._names(terms)
        return OneOf(names).wanted(terms) if names else "nothing, as the model's files have no prompts"

    def _names(self, terms: Terms) -> tuple[str, ...]:
        return terms.task("embedding").prompts
