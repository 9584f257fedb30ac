"""An error as Anthropic's clients expect it."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from ingot.errors import ContextOverflow, IngotError

TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetail(Struct):
    type: str
    message: str


class AnthropicError(Struct, tag_field="type", tag="error", kw_only=True):
    """A body, and the last event of a stream that broke."""

    error: AnthropicErrorDetail
    request_id: str

    @classmethod
    def of(cls, error: IngotError, request_id: str) -> AnthropicError:
        kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return cls(error=AnthropicErrorDetail(kind, error_message(error)), request_id=request_id)


def error_message(error: IngotError) -> str:
    """Agents know by these words that it is time to shorten the conversation."""
    if isinstance(error, ContextOverflow):
        return f"prompt is too long: {error.needed} tokens > {error.limit} maximum. {error.message}"
    return error.message
