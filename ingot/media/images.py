"""Images: a file as it was sent, what its header says, and its pixels, decoded by Pillow in a worker process.

An `ImageFile` is decoded only when somebody asks for its pixels. The functions that end in `_job`, and what they call,
run in a worker alone; they import Pillow, which comes with the extra `vision`. Raises BadMedia.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingot.errors import BadMedia
from ingot.media import bounds, worker
from ingot.media.layout import Size, check_file_size, check_image_size
from ingot.media.worker import DecodedPart, DecodeJob

if TYPE_CHECKING:
    from PIL import Image as Images


Pixels = NDArray[np.uint8]
"""[height, width, 3], as people see it."""
View = tuple[Size, ...]
"""Sizes that a frame is brought to, each from the one before; with none, it is shown as it is."""
BICUBIC: Final = 3
NO_PILLOW: Final = "This server cannot unpack pictures: its `ingot doctor` says what to install."


class ImageHeader(NamedTuple):
    """`width` and `height` are those of the stored picture; `orientation` says, as EXIF does, how it is turned."""

    format: str
    width: int
    height: int
    orientation: int = 1

    @property
    def stored(self) -> Size:
        return Size(self.width, self.height)

    @property
    def shown(self) -> Size:
        """The picture as people see it: orientations from 5 on lie on their side."""
        return Size(self.height, self.width) if self.orientation >= 5 else self.stored


class DecodingMemory(NamedTuple):
    """Bytes that a worker may take for a frame and views of it: some in any case, and so many for each pixel."""

    fixed: int
    each: int
    size: Size

    @classmethod
    def of(cls, fixed: int, each: int, size: Size, views: Sequence[View]) -> DecodingMemory:
        made = {view[:end] for view in views or [()] for end in range(min(1, len(view)), len(view) + 1)}
        return cls(fixed + 8 * sum((view[-1] if view else size).area for view in made), each, size)

    @property
    def memory(self) -> int:
        return self.fixed + self.each * self.size.area

    def largest(self, memory: int) -> Size | None:
        """The largest of this shape that so many bytes are enough for."""
        if not self.each or memory <= self.fixed:
            return None
        scale = math.sqrt((memory - self.fixed) / (self.each * self.size.area))
        return Size(*(max(1, math.floor(side * scale)) for side in self.size))


@dataclass(frozen=True, slots=True)
class ImageFile:
    data: bytes = field(repr=False)
    header: ImageHeader
    digest: bytes  # of the file

    @classmethod
    def of(cls, data: bytes) -> ImageFile:
        """Raises BadMedia for what is no picture, or too much of one, without unpacking it."""
        check_file_size(len(data))
        worker.require_package("PIL", NO_PILLOW)
        # Pillow reserves two canvases as soon as it sees a WebP.
        untouched = 8 * bounds.PIXELS if data[8:12] == b"WEBP" else 0
        job = DecodeJob("picture header", "picture", bounds.HEADER_MEMORY, bounds.HEADER_CPU_S, untouched=untouched)
        header = ImageHeader(*worker.header_pool.run(job, data).value)
        return cls(data, header, blake2b(data, digest_size=32).digest())

    @property
    def size(self) -> Size:
        """As it is shown."""
        return self.header.shown

    def unpacking(self, views: Sequence[View]) -> DecodingMemory:
        each = bounds.WEBP_PIXEL_BYTES if self.header.format == "webp" else bounds.IMAGE_PIXEL_BYTES
        return DecodingMemory.of(bounds.IMAGE_MEMORY, each, self.size, views)

    def frames(self, *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        """The one that it has. Raises BadMedia where the file is damaged behind its header."""
        memory = self.unpacking(views).memory
        job = DecodeJob("picture", "picture", memory, bounds.IMAGE_CPU_S, (self.header, views, resample))
        return frames_of_parts(worker.pixel_pool.stream(job, self.data), self.size, views)


def frames_of_parts(parts: Iterator[DecodedPart], size: Size, views: Sequence[View]) -> Iterator[Pixels]:
    """Frames of this size in these views, as a worker sends them. Raises BadMedia where they are not."""
    for part, view in zip(parts, itertools.cycle(views or [()]), strict=False):
        width, height = view[-1] if view else size
        if len(part.data) != 3 * width * height:
            raise BadMedia("the file cannot be unpacked: its frames are not of the size that it says.")
        yield np.frombuffer(part.data, np.uint8).reshape(height, width, 3)


KNOWN_IMAGES: Final = "PNG, JPEG, WebP, GIF and BMP are taken"
IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_SVG: Final = re.compile(rb"\s*(?:\xef\xbb\xbf)?\s*<(?:svg|\?xml|!DOCTYPE svg)", re.IGNORECASE)
_BRANDS: Final = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF", b"msf1": "HEIF"}
_WHITE: Final = (255, 255, 255, 255)
_ORIENTATION: Final = 0x0112
_TRANSPOSES: Final = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""By EXIF's orientation, what Pillow calls the way from what is stored to what is shown."""
_BAND: Final = 1 << 20
"""Pixels whose colours are changed at a time."""


def image_header_job(data: bytes) -> Iterator[tuple[Any, bytes]]:
    yield read_image_header(data), b""


def image_job(
    data: bytes, said: Sequence[Any], views: Sequence[Sequence[Sequence[int]]], resample: int
) -> Iterator[tuple[Any, bytes]]:
    yield from render_views(decode_image(data, ImageHeader(*said)), views, resample)


def render_views(
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


def read_image_header(data: bytes) -> ImageHeader:
    """Nothing is unpacked for it. Raises BadMedia, which says what to send instead."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as opened:
            check_image_size(Size(*opened.size))
            name = str(opened.format)
            if name != "MPO" and getattr(opened, "is_animated", False):
                raise BadMedia("the file is animated: send one picture, or a clip.")
            format = "jpeg" if name == "MPO" else name.lower()  # an MPO is a JPEG with more pictures behind it
            return ImageHeader(format, *opened.size, _orientation(opened))
    except BadMedia:
        raise
    except UnidentifiedImageError:
        raise BadMedia(f"the file is {_guess_format(data)}: {KNOWN_IMAGES}.") from None
    except Exception as error:  # decoders raise whatever a damaged file leads them to
        raise BadMedia(f"the picture cannot be unpacked: {_pillow_reason(error)}.") from error


def decode_image(data: bytes, header: ImageHeader) -> Images.Image:
    """Turned as its camera was held, what is transparent on white, deep colours cut to eight bits.

    No more is unpacked than the header said. Raises BadMedia where the rest of the file says otherwise.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=[header.format.upper()]) as opened:
            _check_stored_size(opened, header)
            opened.load()
            _check_stored_size(opened, header)
            shown = _to_rgb(opened)
        turn = _TRANSPOSES.get(header.orientation)
        return shown if turn is None else shown.transpose(Image.Transpose(turn))
    except BadMedia:
        raise
    except MemoryError:
        raise
    except Exception as error:
        raise BadMedia(f"the picture cannot be unpacked: {_pillow_reason(error)}.") from error


def _check_stored_size(opened: Images.Image, header: ImageHeader) -> None:
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


def _to_rgb(picture: Images.Image) -> Images.Image:
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


def _pillow_reason(error: Exception) -> str:
    """In Pillow's own words, which name no file."""
    return (str(error) or type(error).__name__)[:200].rstrip(".")


def _guess_format(data: bytes) -> str:
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
