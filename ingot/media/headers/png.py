"""PNG: chunks, of which the first says how large the picture is."""

from __future__ import annotations

from typing import Final

from ingot.media.headers.cursor import Cursor, Damaged
from ingot.media.headers.exif import orientation
from ingot.media.headers.header import ANIMATED, PictureHeader

SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_CHECKSUM: Final = 4


def read(data: bytes) -> PictureHeader:
    cursor = Cursor(data, len(SIGNATURE))
    size, name = cursor.big(4), cursor.take(4)
    if name != b"IHDR" or size < 8:
        raise Damaged("does not begin with its size, as a PNG does")
    width, height = cursor.big(4), cursor.big(4)
    cursor.skip(size - 8 + _CHECKSUM)
    turned = 1
    while cursor.left >= 8:
        size, name = cursor.big(4), cursor.take(4)
        if name == b"acTL":
            raise Damaged(ANIMATED)
        if name == b"IEND":
            break
        if name == b"eXIf":
            turned = orientation(cursor.take(min(size, cursor.left)))
            cursor.skip(_CHECKSUM)
        else:
            cursor.skip(size + _CHECKSUM)
    return PictureHeader("png", width, height, turned)
