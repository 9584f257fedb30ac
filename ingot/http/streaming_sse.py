"""Server-sent events: bare ones, as OpenAI's chat has them, and named ones, as Anthropic's and the responses have."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from ingot.http.streaming_framing import Framing

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
MEDIA_TYPE: Final = "text/event-stream; charset=utf-8"
encoder = msgspec.json.Encoder()


def bare(buffer: bytearray, chunk: Struct) -> None:
    buffer += b"data: "
    encoder.encode_into(chunk, buffer, -1)
    buffer += b"\n\n"


def named(buffer: bytearray, chunk: Struct) -> None:
    """An event by the name of the chunk's tag."""
    buffer += b"event: %s\n" % str(chunk.__struct_config__.tag).encode()
    bare(buffer, chunk)


BARE_EVENTS: Final = Framing(MEDIA_TYPE, bare, done=DONE, alive=KEEP_ALIVE)
CHUNKS_ALONE: Final = Framing(MEDIA_TYPE, bare, alive=KEEP_ALIVE)  # llama.cpp's: the last chunk says that it is


def named_events(alive: Struct) -> Framing:
    """Named events whose sign of life is an event too."""
    buffer = bytearray()
    named(buffer, alive)
    return Framing(MEDIA_TYPE, named, alive=bytes(buffer))
