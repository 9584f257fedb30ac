"""A stored response. Light to import: the store is opened before the protocol is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response, and the items it answered, both as JSON has them."""

    response: dict[str, Any]
    input: list[dict[str, Any]]

    @property
    def conversation(self) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = self.response["output"]
        return [*self.input, *output]
