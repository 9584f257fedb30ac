"""The kind of fields that are hints: taken without effect, since nothing depends on them, and named in the receipt."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.errors import Unsupported
from ingot.protocol.fields import Kind, Reading, Schema, Terms


@dataclass(frozen=True, slots=True)
class Unheeded(Kind):
    """Any object. A strict server refuses what would have no effect."""

    def parse(self, value: object, path: str, reading: Reading) -> None:
        if not isinstance(value, dict):
            raise self.refuse(value, path, reading)
        if reading.terms.strict:
            raise Unsupported(f"{path} has no effect here, and this server is strict.", param=path)
        if not reading.knows_ignored(path):
            reading.ignore(path)

    def schema(self, terms: Terms) -> Schema:
        return {"enum": [None]} if terms.strict else {"type": "object"}

    def admits(self, value: object) -> bool:
        return isinstance(value, dict)

    def wanted(self, terms: Terms) -> str:
        return "an object"
