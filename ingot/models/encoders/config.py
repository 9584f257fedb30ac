"""A model's config, read with types: what is missing or of the wrong kind is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.errors import ModelError


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    config: dict[str, Any]

    def number(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int:
            raise self._wrong(key, value, "a whole number")
        return value

    def real(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float):
            raise self._wrong(key, value, "a number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def packing(self) -> dict[str, Any]:
        """Bits and groups of packed weights, as MLX's converters state them; empty where there are none."""
        told = self.config.get("quantization") or self.config.get("quantization_config") or {}
        if not isinstance(told, dict) or (told and type(told.get("bits")) is not int):
            raise self._wrong("quantization", told, "a form that ingot knows")
        return told

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None and default is None:
            raise ModelError(f"The model's config.json does not state {key}")
        return default if value is None else value

    def _wrong(self, key: str, value: Any, wanted: str) -> ModelError:
        return ModelError(f"The model's config.json states {key} as {value!r}, which is not {wanted}")
