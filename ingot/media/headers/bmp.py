"""BMP: a file header, then one of two descriptions of the picture."""

from __future__ import annotations

from typing import Final

from ingot.media.headers.cursor import Cursor, Damaged
from ingot.media.headers.header import PictureHeader

SIGNATURE: Final = b"BM"
_OLD, _LEAST = 12, 40  # bytes of the description


def read(data: bytes) -> PictureHeader:
    cursor = Cursor(data, 14)
    length = cursor.little(4)
    if length == _OLD:
        return PictureHeader("bmp", cursor.little(2), cursor.little(2))
    if length < _LEAST:
        raise Damaged("is no BMP behind its beginning")
    width, height = _signed(cursor.take(4)), _signed(cursor.take(4))
    return PictureHeader("bmp", width, abs(height))  # a negative height: lines come from the top


def _signed(four: bytes) -> int:
    return int.from_bytes(four, "little", signed=True)
