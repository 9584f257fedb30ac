"""Which way up a picture is to be shown, as cameras write it into EXIF."""

from __future__ import annotations

from typing import Final, Literal

from ingot.media.headers.cursor import Cursor, Damaged

PREFIX: Final = b"Exif\0\0"
_ORIENTATION: Final = 0x0112
_SHORT: Final = 3


def orientation(exif: bytes) -> int:
    """From 1 to 8; 1, as it lies, where nothing readable is said: that is no reason to refuse a picture."""
    try:
        found = _orientation(exif.removeprefix(PREFIX))
    except Damaged:
        return 1
    return found if 1 <= found <= 8 else 1


def _orientation(tiff: bytes) -> int:
    order: Literal["little", "big"]
    match tiff[:4]:
        case b"II*\0":
            order = "little"
        case b"MM\0*":
            order = "big"
        case _:
            raise Damaged("has no EXIF")

    def number(cursor: Cursor, size: int) -> int:
        return int.from_bytes(cursor.take(size), order)

    entries = Cursor(tiff, number(Cursor(tiff, 4), 4))
    for _ in range(number(entries, 2)):
        tag, kind = number(entries, 2), number(entries, 2)
        entries.skip(4)
        value = entries.take(4)
        if tag == _ORIENTATION and kind == _SHORT:
            return int.from_bytes(value[:2], order)
    return 1
