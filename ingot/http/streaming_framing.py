"""How the chunks of a streamed answer become bytes: what is written around each, and after the last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec import Struct


@dataclass(frozen=True, slots=True)
class Framing:
    """`frame` adds one chunk to a buffer. `done` follows the last chunk of an answer that came to its end; `alive` is
    what holds a connection open in a silence, empty where the format has nothing but chunks."""

    media_type: str
    frame: Callable[[bytearray, Struct], None]
    done: bytes = b""
    alive: bytes = b""

    def framed(self, chunks: Iterable[Struct]) -> bytes:
        buffer = bytearray()
        for chunk in chunks:
            self.frame(buffer, chunk)
        return bytes(buffer)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", self.media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
