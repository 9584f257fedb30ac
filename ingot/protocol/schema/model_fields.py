"""Kinds that depend on the served model's vocabulary: token ids, and the biases keyed by them."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.errors import BadRequest
from ingot.protocol.schema.bounds import Range
from ingot.protocol.schema.fields import BodyReading, Kind, Number, Schema, as_whole
from ingot.protocol.terms import Terms


@dataclass(frozen=True, slots=True)
class TokenIds(Kind):
    """A list of token ids of the served model."""

    most: int
    least: int = 1

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[int, ...]:
        if not isinstance(value, list) or not self.least <= len(value) <= self.most:
            raise self.refuse(value, path, reading)
        ids = [as_whole(item) for item in value]
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
        return isinstance(value, list) and (not value or as_whole(value[0]) is not None)

    def wanted(self, terms: Terms) -> str:
        return f"a list of {self.least} to {self.most} token ids"


@dataclass(frozen=True, slots=True)
class Biases(Kind):
    """An object from token ids, written as strings, to a number; read as pairs."""

    types = (dict,)
    bounds: Range
    most: int

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict) or len(value) > self.most:
            raise self.refuse(value, path, reading)
        number = Number(self.bounds)
        return tuple(
            (self._token(key, path, reading.terms), number.parse(held, f"{path}.{key[:20]}", reading))
            for key, held in value.items()
        )

    def schema(self, terms: Terms) -> Schema:
        return {
            "type": "object",
            "propertyNames": {"pattern": numerals_up_to(terms.vocab - 1)},
            "additionalProperties": Number(self.bounds).schema(terms),
            "maxProperties": self.most,
        }

    def wanted(self, terms: Terms) -> str:
        return f"an object of at most {self.most} token ids"

    def _token(self, key: str, path: str, terms: Terms) -> int:
        # Only the plain numeral: two spellings of one id would be two entries that contradict each other.
        if not (key.isascii() and key.isdigit() and len(key) <= 12) or str(int(key)) != key:
            raise BadRequest(f"{path}: keys are token ids in decimal, got '{key[:20]}'.", param=path)
        if int(key) >= terms.vocab:
            raise BadRequest(f"{path}: token ids end at {terms.vocab - 1}, got {key}.", param=path)
        return int(key)


def numerals_up_to(most: int) -> str:
    """A regular expression for the decimal numerals 0 to `most`, without leading zeros."""
    digits = str(most)
    cases = [f"[1-9][0-9]{{{length - 1}}}" for length in range(1, len(digits))]
    for at, digit in enumerate(digits):
        least = 1 if at == 0 else 0
        if int(digit) > least:
            cases.append(f"{digits[:at]}[{least}-{int(digit) - 1}][0-9]{{{len(digits) - at - 1}}}")
    cases.append(digits)
    return f"^(?:0|{'|'.join(cases)})$"
