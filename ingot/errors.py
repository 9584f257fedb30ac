"""What can go wrong, said once: each error knows its HTTP status, its code, and what the user can do.

Every room raises these; the HTTP edge alone turns them into bodies. A message may be shown to a client as it
stands, so it never holds a secret, a path of the host or another tenant's text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class IngotError(Exception):
    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class BadRequest(IngotError):
    status, type, code = 400, "invalid_request_error", "invalid_value"


class UnknownField(BadRequest):
    code = "unknown_parameter"


class Unsupported(BadRequest):
    """A parameter that is known and cannot be honoured here."""

    code = "unsupported_parameter"


class BadMedia(BadRequest):
    """A picture or a clip that cannot be read, or is larger than is taken."""

    code = "invalid_media"


class AdapterError(BadRequest):
    """A LoRA adapter that cannot be read, or not be honoured by the model that it is for."""

    code = "invalid_adapter"


class ContextOverflow(BadRequest):
    code = "context_length_exceeded"

    def __init__(self, *, needed: int, limit: int, counted: bool = True) -> None:
        """`counted`: exactly so many are needed; else at least so many, as nobody has counted them."""
        told = f"{needed}" if counted else f"at least {needed}"
        super().__init__(
            f"This request needs {told} tokens of context (prompt and at least one new token), but the model's "
            f"context is {limit} tokens. Shorten the prompt, or serve with a longer context if the model has one.",
            param="messages",
        )
        self.needed, self.limit = needed, limit


class InputTooLong(BadRequest):
    """A text that an encoder would have to cut, which was not asked for."""

    code = "context_length_exceeded"

    def __init__(self, *, needed: int, limit: int, remedy: str, param: str | None = None, counted: bool = True) -> None:
        told = f"{needed}" if counted else f"at least {needed}"
        words = f"This input has {told} tokens, and the model reads {limit} at most. {remedy}"
        super().__init__(words, param=param)
        self.needed, self.limit = needed, limit


class Unauthorized(IngotError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(IngotError):
    status, type, code = 403, "permission_error", "forbidden"


class NotFound(IngotError):
    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(IngotError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class RequestTooSlow(IngotError):
    """The client did not send its request in time."""

    status, type, code = 408, "invalid_request_error", "request_timeout"


class RequestTooLarge(IngotError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class UnsupportedMedia(IngotError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class HeadersTooLarge(IngotError):
    status, type, code = 431, "invalid_request_error", "headers_too_large"


class Overloaded(IngotError):
    """The queue is full; the same request may succeed after `retry_after` seconds."""

    status, type, code = 429, "rate_limit_error", "overloaded"


class RateLimited(IngotError):
    """The key has used up what it may in a minute."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class Cancelled(IngotError):
    status, type, code = 499, "request_cancelled", "cancelled"


class ClientLeft(Cancelled):
    """Whoever asked does not read on."""


class Unavailable(IngotError):
    status, type, code = 503, "service_unavailable", "unavailable"


class DeviceLost(Unavailable):
    """The device computes nothing more for this process, which has to end."""

    code = "device_lost"
    exit_code = 75  # EX_TEMPFAIL: the same command may succeed when it is run again

    def __init__(self) -> None:
        super().__init__("The device was lost. The server is being started again.", retry_after=5)


class Stopping(Unavailable):
    """The server is told to stop, and takes on nothing more, or ends what has not come to its end by then."""


class DeadlineExceeded(IngotError):
    status, type, code = 504, "timeout_error", "deadline_exceeded"


class ModelError(IngotError):
    """A model that cannot be found, read or run as asked."""

    code = "model_error"


class ConfigError(IngotError):
    code = "config_error"


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most likely meant, or None."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return found[0] if found else None
