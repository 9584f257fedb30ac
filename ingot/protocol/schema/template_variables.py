"""The kind of `chat_template_kwargs`: values for variables that the served model's chat template reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ingot.errors import BadRequest, UnknownField
from ingot.protocol.schema.bounds import TEMPLATE_NUMBER, TEMPLATE_TEXT_CHARS
from ingot.protocol.schema.fields import BodyReading, Bool, Either, Kind, Number, Schema, Text
from ingot.protocol.terms import NO_TERMS, Terms

SWITCHES: Final = ("enable_thinking", "thinking")
"""What templates call the variable that switches thinking on and off. It is taken of every model, as the field of that
name is."""
VALUE = Either((Bool(), Number(TEMPLATE_NUMBER), Text(TEMPLATE_TEXT_CHARS)))


def variables_problem(variables: dict[str, Any]) -> str | None:
    """What is wrong with the values that a setting gives, whatever the template reads."""
    for name, value in variables.items():
        try:
            VALUE.parse(value, name, BodyReading(NO_TERMS))
        except BadRequest as error:
            return error.message.rstrip(".")
    return None


@dataclass(frozen=True, slots=True)
class TemplateVariables(Kind):
    """A name that the template does not read would be ignored, so it is refused, unless it switches thinking."""

    types, words = (dict,), "an object"

    def parse(self, value: object, path: str, reading: BodyReading) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.refuse(value, path, reading)
        known = reading.terms.template_variables
        for name in value:
            if name not in known and name not in SWITCHES:
                reads = ", ".join(known) or "none"
                raise UnknownField(f"{path}: the chat template reads no '{name[:100]}'. It reads: {reads}.", param=path)
        return {name: _kind(name, known).parse(held, f"{path}.{name}", reading) for name, held in value.items()}

    def schema(self, terms: Terms) -> Schema:
        known = terms.template_variables
        properties = {name: _kind(name, known).schema(terms) for name in (*known, *SWITCHES)}
        return {"type": "object", "properties": properties, "additionalProperties": False}


def _kind(name: str, known: Sequence[str]) -> Kind:
    return VALUE if name in known else Bool()
