"""The header of a picture, of whichever format its first bytes say: names and types that clients give do not count."""

from __future__ import annotations

import re
from typing import Final

from ingot.errors import BadMedia
from ingot.media.guard import check_size
from ingot.media.headers import bmp, gif, jpeg, png, webp
from ingot.media.headers.cursor import Damaged
from ingot.media.headers.header import PictureHeader

KNOWN: Final = "PNG, JPEG, WebP, GIF and BMP are taken"
_SVG: Final = re.compile(rb"\s*(?:\xef\xbb\xbf)?\s*<(?:svg|\?xml|!DOCTYPE svg)", re.IGNORECASE)
_BRANDS: Final = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF", b"msf1": "HEIF"}


def picture_header(data: bytes) -> PictureHeader:
    """Looks at a bounded number of the file's pieces. Raises BadMedia, which says what to send instead."""
    try:
        header = _read(data)
    except Damaged as problem:
        raise BadMedia(f"the file {problem}.") from None
    check_size(header.stored)
    return header


def _read(data: bytes) -> PictureHeader:
    if data.startswith(png.SIGNATURE):
        return png.read(data)
    if data.startswith(jpeg.SIGNATURE):
        return jpeg.read(data)
    if webp.is_webp(data):
        return webp.read(data)
    if data.startswith(gif.SIGNATURES):
        return gif.read(data)
    if data.startswith(bmp.SIGNATURE):
        return bmp.read(data)
    raise Damaged(f"is {_named(data)}: {KNOWN}")


def _named(data: bytes) -> str:
    """What else it may be, for who sent it."""
    if not data:
        return "empty"
    if _SVG.match(data[:256]):
        return "an SVG, which is a drawing and no picture"
    if data.startswith((b"II*\0", b"MM\0*")):
        return "a TIFF"
    if data.startswith(b"%PDF"):
        return "a PDF"
    if data[4:8] == b"ftyp":
        return f"{_BRANDS.get(data[8:12], 'a clip or an unknown kind of picture')}"
    return "no picture of a known format"
