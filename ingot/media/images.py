"""Images: a file, its header, and its pixels, decoded by Pillow in a worker process when they are requested.

The functions that end in `_job`, and what they call, run only in a worker; they import Pillow, which comes with the
extra `vision`. Raises BadMedia.
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
"""[height, width, 3], in display orientation."""
View = tuple[Size, ...]
"""Sizes that a frame is resized to, one after another; empty: it stays as it is."""
LANCZOS: Final = 1
BILINEAR: Final = 2
BICUBIC: Final = 3
BILINEAR_UNFILTERED: Final = 102
"""None of Pillow's: from the two by two nearest pixels, however much smaller the image becomes."""
NO_PILLOW: Final = "This server cannot unpack images: its `ingot doctor` says what to install."


class ImageHeader(NamedTuple):
    """`width` and `height` are those of the stored image; `orientation` is EXIF's."""

    format: str
    width: int
    height: int
    orientation: int = 1

    @property
    def stored(self) -> Size:
        return Size(self.width, self.height)

    @property
    def shown(self) -> Size:
        """The size as displayed: orientations from 5 on swap the sides."""
        return Size(self.height, self.width) if self.orientation >= 5 else self.stored


class DecodingMemory(NamedTuple):
    """Bytes that a worker may use for a frame and its views: a fixed number, and some for each pixel."""

    fixed: int
    each: int
    size: Size

    @classmethod
    def of(cls, fixed: int, each: int, size: Size, views: Sequence[View]) -> DecodingMemory:
        steps = {view[:end] for view in views or [()] for end in range(min(1, len(view)), len(view) + 1)}
        return cls(fixed + 8 * sum((view[-1] if view else size).area for view in steps), each, size)

    @property
    def memory(self) -> int:
        return self.fixed + self.each * self.size.area

    def largest(self, memory: int) -> Size | None:
        """The largest size of this shape that fits into so many bytes."""
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
        """Raises BadMedia for what is not an image, or too large, without decoding it."""
        check_file_size(len(data))
        worker.require_package("PIL", NO_PILLOW)
        # For a WebP, Pillow reserves two canvases at once.
        untouched = 8 * bounds.PIXELS if data[8:12] == b"WEBP" else 0
        job = DecodeJob("image header", "image", bounds.HEADER_MEMORY, bounds.HEADER_CPU_S, untouched=untouched)
        header = ImageHeader(*worker.header_pool.run(job, data).value)
        return cls(data, header, blake2b(data, digest_size=32).digest())

    @property
    def size(self) -> Size:
        """As displayed."""
        return self.header.shown

    def unpacking(self, views: Sequence[View]) -> DecodingMemory:
        each = bounds.WEBP_PIXEL_BYTES if self.header.format == "webp" else bounds.IMAGE_PIXEL_BYTES
        return DecodingMemory.of(bounds.IMAGE_MEMORY, each, self.size, views)

    def frames(self, *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        """Its only frame. Raises BadMedia where the file is damaged behind its header."""
        memory = self.unpacking(views).memory
        job = DecodeJob("image", "image", memory, bounds.IMAGE_CPU_S, (self.header, views, resample))
        return frames_of_parts(worker.pixel_pool.stream(job, self.data), self.size, views)


def frames_of_parts(parts: Iterator[DecodedPart], size: Size, views: Sequence[View]) -> Iterator[Pixels]:
    """Frames of this size in these views, as a worker sends them. Raises BadMedia where the size is wrong."""
    for part, view in zip(parts, itertools.cycle(views or [()]), strict=False):
        width, height = view[-1] if view else size
        if len(part.data) != 3 * width * height:
            raise BadMedia("the file cannot be unpacked: its frames do not have the size that it states.")
        yield np.frombuffer(part.data, np.uint8).reshape(height, width, 3)


KNOWN_IMAGES: Final = "PNG, JPEG, WebP, GIF and BMP are taken"
IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_SVG: Final = re.compile(rb"\s*(?:\xef\xbb\xbf)?\s*<(?:svg|\?xml|!DOCTYPE svg)", re.IGNORECASE)
_BRANDS: Final = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF", b"msf1": "HEIF"}
_WHITE: Final = (255, 255, 255, 255)
_ORIENTATION: Final = 0x0112
_TRANSPOSES: Final = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""By EXIF's orientation, Pillow's transposition from the stored to the displayed image."""
_BAND: Final = 1 << 20
"""Pixels that are converted at a time."""
_NARROW_BAND: Final = 1 << 17
"""Pixels that are resized at a time, in floating point."""


def image_header_job(data: bytes) -> Iterator[tuple[Any, bytes]]:
    yield read_image_header(data), b""


def image_job(
    data: bytes, header: Sequence[Any], views: Sequence[Sequence[Sequence[int]]], resample: int
) -> Iterator[tuple[Any, bytes]]:
    yield from render_views(decode_image(data, ImageHeader(*header)), views, resample)


def render_views(
    frame: Images.Image, views: Sequence[Sequence[Sequence[int]]], resample: int
) -> Iterator[tuple[None, bytes]]:
    """A frame in all views, of which some may be steps towards others."""
    from PIL import Image

    resized: dict[tuple[tuple[int, int], ...], Images.Image] = {(): frame}
    for view in views or [()]:
        chain: tuple[tuple[int, int], ...] = ()
        for width, height in view:
            source, chain = resized[chain], (*chain, (width, height))
            if chain not in resized:
                same = source.size == (width, height)
                if resample == BILINEAR_UNFILTERED and not same:
                    resized[chain] = _resize_unfiltered(source, Size(width, height))
                else:
                    resized[chain] = source if same else source.resize((width, height), Image.Resampling(resample))
        yield None, resized[chain].tobytes()


def _resize_unfiltered(image: Images.Image, size: Size) -> Images.Image:
    """As torch does without antialiasing, a few rows at a time."""
    from PIL import Image

    made = Image.new("RGB", size)
    columns, rows = (_neighbours(old, new) for old, new in zip(image.size, size, strict=True))
    each = max(1.0, image.height / size.height) * image.width
    step = max(1, int(_NARROW_BAND / max(each, size.width)))
    for begin in range(0, size.height, step):
        near, far, share = (rows[0][begin:][:step], rows[1][begin:][:step], rows[2][begin:][:step])
        first, last = int(near[0]), int(far[-1]) + 1
        band = np.asarray(image.crop((0, first, image.width, last))).astype(np.float32)
        across = _between(band, columns, 1)
        found = _between(across, (near - first, far - first, share), 0)
        made.paste(Image.fromarray(np.rint(found).astype(np.uint8)), (0, begin))
    return made


Neighbours = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]
"""For each new place along an axis the old ones before and behind it, and the share of the second."""


def _neighbours(old: int, new: int) -> Neighbours:
    at = np.maximum((np.arange(new) + 0.5) * (old / new) - 0.5, 0)
    near = at.astype(np.int64)
    return near, np.minimum(near + 1, old - 1), (at - near).astype(np.float32)


def _between(pixels: NDArray[np.float32], neighbours: Neighbours, axis: int) -> NDArray[np.float32]:
    near, far, share = neighbours
    one, other = np.take(pixels, near, axis=axis), np.take(pixels, far, axis=axis)
    found: NDArray[np.float32] = one + (other - one) * share.reshape((-1, 1) if axis else (-1, 1, 1))
    return found


def read_image_header(data: bytes) -> ImageHeader:
    """Nothing is decoded. Raises BadMedia, which says what to send instead."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as opened:
            check_image_size(Size(*opened.size))
            name = str(opened.format)
            if name != "MPO" and getattr(opened, "is_animated", False):
                raise BadMedia("the file is animated: send one image, or a video.")
            format = "jpeg" if name == "MPO" else name.lower()  # an MPO is a JPEG with more images behind it
            return ImageHeader(format, *opened.size, _orientation(opened))
    except BadMedia:
        raise
    except UnidentifiedImageError:
        raise BadMedia(f"the file is {_likely_format(data)}: {KNOWN_IMAGES}.") from None
    except Exception as error:  # decoders raise whatever a damaged file leads them to
        raise BadMedia(f"the image cannot be unpacked: {_pillow_reason(error)}.") from error


def decode_image(data: bytes, header: ImageHeader) -> Images.Image:
    """In display orientation, on white where it is transparent, with eight bits a colour.

    Raises BadMedia where the file has another size than its header.
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
        raise BadMedia(f"the image cannot be unpacked: {_pillow_reason(error)}.") from error


def _check_stored_size(opened: Images.Image, header: ImageHeader) -> None:
    if opened.size != header.stored:
        raise BadMedia("the file states two different sizes of the image.")


def _orientation(opened: Images.Image) -> int:
    """From 1 to 8; 1 where EXIF data is missing or unreadable, which is no reason to refuse an image."""
    from PIL import Image

    found = 1
    with suppress(Exception):
        exif = Image.Exif()
        exif.load(opened.info.get("exif", b""))
        found = int(exif.get(_ORIENTATION, 1))
    return found if 1 <= found <= 8 else 1


def _to_rgb(image: Images.Image) -> Images.Image:
    """In RGB, band by band where that takes copies, so that a large image is in memory at most twice."""
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip instead of scaling
        grey = Image.new("L", image.size)
        for box in _bands(image.size):
            grey.paste(_upper_bits(image.crop(box)), box)
        return grey.convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    made = Image.new("RGB", image.size)
    for box in _bands(image.size):
        band = image.crop(box).convert("RGBA")
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
    """Pillow's own message, which names no file."""
    return (str(error) or type(error).__name__)[:200].rstrip(".")


def _likely_format(data: bytes) -> str:
    """What else the file may be, for the error message."""
    data = bytes(data[:256])
    if not data:
        return "empty"
    if _SVG.match(data):
        return "an SVG, which is a drawing and not an image"
    if data.startswith((b"II*\0", b"MM\0*")):
        return "a TIFF"
    if data.startswith(b"%PDF"):
        return "a PDF"
    if data[4:8] == b"ftyp":
        return f"{_BRANDS.get(data[8:12], 'a video or an unknown kind of image')}"
    return "not an image of a known format, or damaged"
