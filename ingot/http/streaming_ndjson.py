"""Newline-delimited JSON, one chunk a line. It has no comments: readers take every line for a chunk."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from ingot.http.streaming_framing import Framing

encoder = msgspec.json.Encoder()


def line(buffer: bytearray, chunk: Struct) -> None:
    encoder.encode_into(chunk, buffer, -1)
    buffer += b"\n"


LINES: Final = Framing("application/x-ndjson", line)
