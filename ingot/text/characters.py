"""Characters that a text cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ingot.errors import BadRequest


@contextmanager
def whole_characters() -> Iterator[None]:
    """What a tokenizer says to half a character, in words for clients."""
    try:
        yield
    except (UnicodeEncodeError, TypeError):
        raise BadRequest("The text holds half of a surrogate pair, which no tokenizer can read.") from None
