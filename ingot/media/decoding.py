"""Pictures unpacked by Pillow, which comes with the extra `vision`."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ingot.errors import BadMedia, Unavailable
from ingot.media.headers.header import PictureHeader

if TYPE_CHECKING:
    from PIL import Image as Images

Pixels = NDArray[np.uint8]
"""[height, width, 3], as people see it."""

NO_PILLOW: Final = "This server cannot unpack pictures: its `ingot doctor` says what to install."
_WHITE: Final = (255, 255, 255, 255)


def picture_pixels(data: bytes, header: PictureHeader) -> Pixels:
    """Turned as its camera was held, what is transparent on white, deep colours cut to eight bits.

    No more is unpacked than the header said. Raises BadMedia where the rest of the file says otherwise.
    """
    try:
        from PIL import Image
    except ImportError as missing:
        raise Unavailable(NO_PILLOW) from missing
    try:
        with Image.open(io.BytesIO(data), formats=[header.format.upper()]) as opened:
            if opened.size != header.stored:
                raise BadMedia("the file says twice how large the picture is, and not the same.")
            opened.load()
            pixels = _colours(opened)
    except BadMedia:
        raise
    except Exception as error:  # decoders raise whatever a damaged file leads them to
        raise BadMedia(f"the picture cannot be unpacked: {_reason(error)}.") from error
    return np.ascontiguousarray(turned(pixels, header.orientation))


def turned(pixels: NDArray[Any], orientation: int) -> NDArray[Any]:
    """As EXIF's orientation says: how to get from what is stored to what is shown."""
    flipped = {2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1]}
    if orientation < 5:
        return flipped.get(orientation, pixels)
    aside = pixels.swapaxes(0, 1)
    return {5: aside, 6: aside[:, ::-1], 7: aside[::-1, ::-1], 8: aside[::-1]}[orientation]


def _colours(picture: Images.Image) -> Pixels:
    from PIL import Image

    if picture.mode.startswith("I"):  # 16 bits, of which Pillow would cut off the upper ones
        deep = np.asarray(picture).astype(np.int64)
        grey = np.clip(deep >> 8, 0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if picture.has_transparency_data:
        ground = Image.new("RGBA", picture.size, _WHITE)
        picture = Image.alpha_composite(ground, picture.convert("RGBA"))
    return np.asarray(picture.convert("RGB"))


def _reason(error: Exception) -> str:
    """In Pillow's own words, which name no file."""
    return (str(error) or type(error).__name__)[:200].rstrip(".")
