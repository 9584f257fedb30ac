"""The field that says who may guess ahead for a request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ingot.errors import BadRequest
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import BodyReading, Kind, Schema, described
from ingot.protocol.terms import Terms

WHO_GUESSES: Final = (
    "Who may guess tokens ahead: `auto` for all that the server offers, `off`, or some of them, joined by commas. The "
    "text is the same."
)


@dataclass(frozen=True, slots=True)
class Proposers(Kind):
    """Becomes what `Request.speculate` is: None for all, else the names."""

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
                raise BadRequest(f"{path}: {described(name)} is not offered here; expected {wanted}.", param=path)
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
