"""Pictures read and unpacked by Pillow, which comes with the extra `vision`. Runs in a worker alone."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from ingot.errors import BadMedia
from ingot.media.guard import check_size
from ingot.media.picture import PictureHeader
from ingot.media.size import Size

if TYPE_CHECKING:
    from PIL import Image as Images

KNOWN: Final = "PNG, JPEG, WebP, GIF and BMP are taken"
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_SVG: Final = re.compile(rb"\s*(?:\xef\xbb\xbf)?\s*<(?:svg|\?xml|!DOCTYPE svg)", re.IGNORECASE)
_BRANDS: Final = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF", b"msf1": "HEIF"}
_WHITE: Final = (255, 255, 255, 255)
_ORIENTATION: Final = 0x0112
_TURNS: Final = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""By EXIF's orientation, what Pillow calls the way from what is stored to what is shown."""
_BAND: Final = 1 << 20
"""Pixels whose colours are changed at a time."""


def header_job(data: bytes) -> Iterator[tuple[Any, bytes]]:
    header = picture_header(data)
    yield (header.format, header.width, header.height, header.orientation), b""


def picture_job(
    data: bytes, said: Sequence[Any], views: Sequence[Sequence[Sequence[int]]], resample: int
) -> Iterator[tuple[Any, bytes]]:
    yield from viewed(picture_pixels(data, PictureHeader(*said)), views, resample)


def viewed(
    frame: Images.Image, views: Sequence[Sequence[Sequence[int]]], resample: int
) -> Iterator[tuple[None, bytes]]:
    """A frame in all views, of which some may be on the way to others."""
    from PIL import Image

    made: dict[tuple[tuple[int, int], ...], Images.Image] = {(): frame}
    for view in views or [()]:
        chain: tuple[tuple[int, int], ...] = ()
        for width, height in view:
            before, chain = made[chain], (*chain, (width, height))
            if chain not in made:
                same = before.size == (width, height)
                made[chain] = before if same else before.resize((width, height), Image.Resampling(resample))
        yield None, made[chain].tobytes()


def picture_header(data: bytes) -> PictureHeader:
    """Nothing is unpacked for it. Raises BadMedia, which says what to send instead."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            check_size(Size(*opened.size))
            name = str(opened.format)
            if name != "MPO" and getattr(opened, "is_animated", False):
                raise BadMedia("the file is animated: send one picture, or a clip.")
            format = "jpeg" if name == "MPO" else name.lower()  # an MPO is a JPEG with more pictures behind it
            return PictureHeader(format, *opened.size, _orientation(opened))
    except BadMedia:
        raise
    except UnidentifiedImageError:
        raise BadMedia(f"the file is {_named(data)}: {KNOWN}.") from None
    except Exception as error:  # decoders raise whatever a damaged file leads them to
        raise BadMedia(f"the picture cannot be unpacked: {_reason(error)}.") from error


def picture_pixels(data: bytes, header: PictureHeader) -> Images.Image:
    """Turned as its camera was held, what is transparent on white, deep colours cut to eight bits.

    No more is unpacked than the header said. Raises BadMedia where the rest of the file says otherwise.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=[header.format.upper()]) as opened:
            _check(opened, header)
            opened.load()
            _check(opened, header)
            shown = _colours(opened)
        turn = _TURNS.get(header.orientation)
        return shown if turn is None else shown.transpose(Image.Transpose(turn))
    except BadMedia:
        raise
    except MemoryError:
        raise
    except Exception as error:
        raise BadMedia(f"the picture cannot be unpacked: {_reason(error)}.") from error


def _check(opened: Images.Image, header: PictureHeader) -> None:
    if opened.size != header.stored:
        raise BadMedia("the file says twice how large the picture is, and not the same.")


def _orientation(opened: Images.Image) -> int:
    """From 1 to 8; 1, as it lies, where nothing readable is said: that is no reason to refuse a picture."""
    from PIL import Image

    found = 1
    with suppress(Exception):
        exif = Image.Exif()
        exif.load(opened.info.get("exif", b""))
        found = int(exif.get(_ORIENTATION, 1))
    return found if 1 <= found <= 8 else 1


def _colours(picture: Images.Image) -> Images.Image:
    """In three colours, band by band where that takes copies: a large picture is held twice, and no more."""
    from PIL import Image

    if picture.mode.startswith("I"):  # 16 bits, of which Pillow would cut off the upper ones
        grey = Image.new("L", picture.size)
        for box in _bands(picture.size):
            grey.paste(_upper_bits(picture.crop(box)), box)
        return grey.convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    made = Image.new("RGB", picture.size)
    for box in _bands(picture.size):
        band = picture.crop(box).convert("RGBA")
        made.paste(Image.alpha_composite(Image.new("RGBA", band.size, _WHITE), band).convert("RGB"), box)
    return made


def _upper_bits(band: Images.Image) -> Images.Image:
    import numpy as np
    from PIL import Image

    deep = np.asarray(band).astype(np.int64)
    return Image.fromarray(np.clip(deep >> 8, 0, 255).astype(np.uint8))


def _bands(size: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    width, height = size
    rows = max(1, _BAND // width)
    for top in range(0, height, rows):
        yield 0, top, width, min(height, top + rows)


def _reason(error: Exception) -> str:
    """In Pillow's own words, which name no file."""
    return (str(error) or type(error).__name__)[:200].rstrip(".")


def _named(data: bytes) -> str:
    """What else it may be, for who sent it."""
    data = bytes(data[:256])
    if not data:
        return "empty"
    if _SVG.match(data):
        return "an SVG, which is a drawing and no picture"
    if data.startswith((b"II*\0", b"MM\0*")):
        return "a TIFF"
    if data.startswith(b"%PDF"):
        return "a PDF"
    if data[4:8] == b"ftyp":
        return f"{_BRANDS.get(data[8:12], 'a clip or an unknown kind of picture')}"
    return "no picture of a known format, or damaged"
