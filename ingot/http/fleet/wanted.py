"""What a body says of its model, known before the rest of it is read: that depends on which model it is."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import Struct

from ingot.errors import BadRequest
from ingot.http.multipart import read_form

LATEST: Final = ":latest"
UNITS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
PART: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(h|ms|us|µs|ns|m|s)")


class Wanted(Struct):
    """Whatever types these have: what is wrong with them is said by who reads all of the body."""

    model: Any = None
    name: Any = None  # what Ollama's clients called it once
    stream: Any = None
    keep_alive: Any = None  # Ollama's
    ttl: Any = None  # LM Studio's
    timeout: Any = None

    @classmethod
    def of(cls, raw: bytes) -> Wanted:
        try:
            return msgspec.json.decode(raw, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return cls()

    @classmethod
    def of_form(cls, raw: bytes, content_type: str) -> Wanted:
        try:
            form = read_form(raw, content_type)
        except BadRequest:
            return cls()
        told: dict[str, Any] = {name: form[name] for name in cls.__struct_fields__ if name in form}
        for name in ("ttl", "timeout"):
            with suppress(TypeError, ValueError):
                told[name] = float(told.get(name, ""))
        return cls(**told)

    @property
    def named(self) -> str | None:
        said = self.model if self.model is not None else self.name
        return said.removesuffix(LATEST) if isinstance(said, str) else None

    @property
    def within_s(self) -> float | None:
        """How long the request may take in all; None where nothing is said, or nothing that can be."""
        return float(self.timeout) if _is_number(self.timeout) and self.timeout > 0 else None

    @property
    def kept_s(self) -> float | None:
        """How long the model is to stay after the request; infinite where it is to stay, None where nothing is said."""
        if _is_number(self.ttl):
            return float(max(0, self.ttl))
        seconds = _duration(self.keep_alive)
        return math.inf if seconds is not None and seconds < 0 else seconds


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _duration(value: Any) -> float | None:
    """Seconds, or Go's way to write them: `5m`, `1h30m`, `-1s`."""
    if _is_number(value):
        return float(value)
    if not isinstance(value, str):
        return None
    sign, text = (-1.0, value[1:]) if value.startswith("-") else (1.0, value.removeprefix("+"))
    if text.isdecimal():
        return sign * float(text)
    parts = PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sign * sum(float(number) * UNITS[unit] for number, unit in parts)
