"""JPEG: segments, one of which says how large the picture is, and another which way up."""

from __future__ import annotations

from typing import Final

from ingot.media.headers.cursor import Cursor, Damaged
from ingot.media.headers.exif import PREFIX, orientation
from ingot.media.headers.header import PictureHeader

SIGNATURE: Final = b"\xff\xd8\xff"
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BARE: Final = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length
_APP1, _SCAN, _END = 0xE1, 0xDA, 0xD9


def read(data: bytes) -> PictureHeader:
    cursor = Cursor(data, 2)
    size: tuple[int, int] | None = None
    turned = 1
    while (marker := _marker(cursor)) not in (_SCAN, _END):
        if marker in _BARE:
            continue
        length = cursor.big(2) - 2
        if length < 0:
            raise Damaged("holds a segment of less than no length")
        if marker == _APP1:
            held = cursor.take(min(length, cursor.left))
            turned = orientation(held) if held.startswith(PREFIX) else turned
        elif marker in _FRAMES and size is None:
            held = cursor.take(length)
            if length < 5:
                raise Damaged("does not say how large it is")
            size = int.from_bytes(held[3:5], "big"), int.from_bytes(held[1:3], "big")
        else:
            cursor.skip(length)
    if size is None:
        raise Damaged("does not say how large it is")
    return PictureHeader("jpeg", *size, turned)


def _marker(cursor: Cursor) -> int:
    if cursor.big(1) != 0xFF:
        raise Damaged("is no JPEG behind its beginning")
    while (marker := cursor.big(1)) == 0xFF:  # any number of them may fill up
        pass
    return marker
