"""An error as OpenAI's clients expect it."""

from __future__ import annotations

import math

from msgspec import Struct

from ingot.errors import IngotError


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    error: ErrorDetail

    @classmethod
    def of(cls, error: IngotError) -> ErrorBody:
        return cls(ErrorDetail(error.message, error.type, error.param, error.code))


def retry_after(error: IngotError) -> str | None:
    """The `Retry-After` header's value: whole seconds, at least one."""
    return None if error.retry_after is None else str(max(1, math.ceil(error.retry_after)))
