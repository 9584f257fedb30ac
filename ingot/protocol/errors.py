"""An error as the clients of each protocol expect it; OpenAI's shape is also that of every path of our own."""

from __future__ import annotations

import math

from msgspec import Struct

from ingot.errors import IngotError
from ingot.protocol.anthropic.errors import AnthropicError
from ingot.protocol.ollama.errors import OllamaError


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


def error_body(error: IngotError, path: str, request_id: str) -> Struct:
    """The body in the shape of the protocol that `path` belongs to."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return AnthropicError.of(error, request_id)
    if path.startswith("/api/"):
        return OllamaError.of(error)
    return ErrorBody.of(error)


def retry_after(error: IngotError) -> str | None:
    """The `Retry-After` header's value: whole seconds, at least one."""
    return None if error.retry_after is None else str(max(1, math.ceil(error.retry_after)))
