"""What the endpoints share: the engine, what it serves, the requests under way, and the threads that read bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import anyio.to_thread

from ingot.config import Settings
from ingot.http.body import decode
from ingot.http.exchange import Live
from ingot.protocol.served import Served

if TYPE_CHECKING:
    from ingot.engine.engine import Engine

T = TypeVar("T")
READERS: Final = 8


class Service:
    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.served = Served.of(engine.card, engine.tokenizer, settings)
        self.live = Live()
        self._readers = anyio.CapacityLimiter(READERS)

    async def read(self, raw: bytes, translate: Callable[[Any], T]) -> T:
        """`translate` of the decoded body, in a thread: rendering and tokenizing would hold up every stream."""

        def read() -> T:
            return translate(decode(raw, self.settings.max_json_depth))

        return await anyio.to_thread.run_sync(read, limiter=self._readers)
