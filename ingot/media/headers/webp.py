"""WebP: chunks in a RIFF file; lossy, lossless, or extended, which alone may be animated or turned."""

from __future__ import annotations

from typing import Final

from ingot.media.headers.cursor import Cursor, Damaged
from ingot.media.headers.exif import orientation
from ingot.media.headers.header import ANIMATED, PictureHeader

_ANIMATION, _EXIF = 0x02, 0x08
_KEYFRAME: Final = b"\x9d\x01\x2a"


def is_webp(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def read(data: bytes) -> PictureHeader:
    cursor = Cursor(data, 12)
    name, length = cursor.take(4), cursor.little(4)
    match name:
        case b"VP8 ":
            return _lossy(cursor)
        case b"VP8L":
            return _lossless(cursor)
        case b"VP8X":
            return _extended(cursor, length)
    raise Damaged("is no WebP behind its beginning")


def _lossy(cursor: Cursor) -> PictureHeader:
    cursor.skip(3)
    if cursor.take(3) != _KEYFRAME:
        raise Damaged("does not begin with a whole frame")
    return PictureHeader("webp", cursor.little(2) & 0x3FFF, cursor.little(2) & 0x3FFF)


def _lossless(cursor: Cursor) -> PictureHeader:
    if cursor.big(1) != 0x2F:
        raise Damaged("is no WebP behind its beginning")
    bits = cursor.little(4)
    return PictureHeader("webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)


def _extended(cursor: Cursor, length: int) -> PictureHeader:
    begin = cursor.at
    flags = cursor.big(1)
    cursor.skip(3)
    width, height = cursor.little(3) + 1, cursor.little(3) + 1
    if flags & _ANIMATION:
        raise Damaged(ANIMATED)
    cursor.at = begin + length + length % 2
    turned = _turned(cursor) if flags & _EXIF else 1
    return PictureHeader("webp", width, height, turned)


def _turned(cursor: Cursor) -> int:
    while cursor.left >= 8:
        name, length = cursor.take(4), cursor.little(4)
        if name == b"EXIF":
            return orientation(cursor.take(min(length, cursor.left)))
        cursor.skip(length + length % 2)
    return 1
