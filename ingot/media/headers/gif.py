"""GIF: the size of its screen, then blocks, of which more than one picture makes a film."""

from __future__ import annotations

from typing import Final

from ingot.media.headers.cursor import Cursor, Damaged
from ingot.media.headers.header import ANIMATED, PictureHeader

SIGNATURES: Final = (b"GIF87a", b"GIF89a")
_PICTURE, _EXTENSION, _END = 0x2C, 0x21, 0x3B
_TABLE = 0x80  # a colour table follows


def read(data: bytes) -> PictureHeader:
    cursor = Cursor(data, 6)
    width, height, flags = cursor.little(2), cursor.little(2), cursor.big(1)
    cursor.skip(2 + _table(flags))
    pictures = 0
    while cursor.left and (block := cursor.big(1)) != _END:
        if block == _PICTURE:
            pictures += 1
            if pictures > 1:
                raise Damaged(ANIMATED)
            cursor.skip(8)
            cursor.skip(_table(cursor.big(1)) + 1)
        elif block == _EXTENSION:
            cursor.skip(1)
        else:
            raise Damaged("is no GIF behind its beginning")
        _skip_blocks(cursor)
    if not pictures:
        raise Damaged("holds no picture")
    return PictureHeader("gif", width, height)


def _table(flags: int) -> int:
    return 3 << (flags & 0x07) + 1 if flags & _TABLE else 0


def _skip_blocks(cursor: Cursor) -> None:
    while cursor.left and (length := cursor.big(1)):
        cursor.skip(length)
