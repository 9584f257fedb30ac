"""A picture as it was sent: its file, and what its header says. Unpacked only when somebody asks for its pixels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ingot.errors import BadMedia
from ingot.media import bounds, worker
from ingot.media.guard import check_bytes
from ingot.media.size import Size
from ingot.media.worker import Job, Part

Pixels = NDArray[np.uint8]
"""[height, width, 3], as people see it."""
BICUBIC: Final = 3
NO_PILLOW: Final = "This server cannot unpack pictures: its `ingot doctor` says what to install."


@dataclass(frozen=True, slots=True)
class PictureHeader:
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


@dataclass(frozen=True, slots=True)
class Picture:
    data: bytes = field(repr=False)
    header: PictureHeader
    digest: bytes  # of the file

    @classmethod
    def of(cls, data: bytes) -> Picture:
        """Raises BadMedia for what is no picture, or too much of one, without unpacking it."""
        check_bytes(len(data))
        worker.require("PIL", NO_PILLOW)
        # Pillow reserves two canvases as soon as it sees a WebP.
        untouched = 8 * bounds.PIXELS if data[8:12] == b"WEBP" else 0
        job = Job("picture header", "picture", bounds.HEADER_MEMORY, bounds.HEADER_CPU_S, untouched=untouched)
        format, width, height, orientation = worker.headers.run(job, data).value
        return cls(data, PictureHeader(format, width, height, orientation), blake2b(data, digest_size=32).digest())

    @property
    def size(self) -> Size:
        """As it is shown."""
        return self.header.shown

    def frames(self, size: Size | None = None, resample: int = BICUBIC) -> Iterator[Pixels]:
        """The one that it has. Raises BadMedia where the file is damaged behind its header."""
        each = bounds.WEBP_PIXEL if self.header.format == "webp" else bounds.PICTURE_PIXEL
        made = self.size if size is None else size
        memory = bounds.PICTURE_MEMORY + each * self.size.area + 8 * made.area
        header = (self.header.format, self.header.width, self.header.height, self.header.orientation)
        job = Job("picture", "picture", memory, bounds.PICTURE_CPU_S, (header, size, resample))
        for part in worker.pixels.stream(job, self.data):
            yield as_pixels(part, made)


def as_pixels(part: Part, size: Size) -> Pixels:
    """Raises BadMedia where a worker's answer is no frame of that size."""
    if len(part.data) != 3 * size.area:
        raise BadMedia("the file cannot be unpacked: its frames are not of the size that it says.")
    return np.frombuffer(part.data, np.uint8).reshape(size.height, size.width, 3)
