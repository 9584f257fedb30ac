"""Chunks that tell of several answers at once, as chats and completions have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET, Struct

from ingot.engine.request import Ended
from ingot.protocol.chat.answers import AnswerHead, Receipt, Streamed, UsageBody


class ChoicesStreamed(Streamed):
    """One finish a choice, and the usage where it was asked for. `make` makes a chunk of its fields.

    The last chunk, whichever it is, carries the receipt; so the last finish waits for `Ended`, which comes in the
    same batch.
    """

    def __init__(self, make: Callable[..., Any], head: AnswerHead, count: int, *, include_usage: bool) -> None:
        self._make, self.head, self.include_usage = make, head, include_usage
        self.unfinished = set(range(count))
        self._last: Any = None

    def chunk(self, *choices: Struct) -> Any:
        return self._make(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=list(choices),
            usage=None if self.include_usage else UNSET,
        )

    def finish(self, index: int, choice: Struct) -> list[Struct]:
        chunk = self.chunk(choice)
        self.unfinished.discard(index)
        if self.unfinished or self.include_usage:
            return [chunk]
        self._last = chunk
        return []

    def close(self, event: Ended) -> list[Struct]:
        last = self._last if self._last is not None else self.chunk()
        last.ingot = Receipt.of(self.head, event)
        if self.include_usage:
            last.usage = UsageBody.of(event.usage)
        return [last]
