"""An error as Ollama's clients expect it."""

from __future__ import annotations

from msgspec import Struct

from ingot.errors import IngotError


class OllamaError(Struct):
    error: str

    @classmethod
    def of(cls, error: IngotError) -> OllamaError:
        return cls(error.message)
