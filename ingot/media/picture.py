"""A picture as it was sent: its file, and what its header says. Unpacked only when somebody asks for its pixels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingot.errors import BadMedia
from ingot.media import bounds, worker
from ingot.media.guard import check_bytes
from ingot.media.size import Size
from ingot.media.worker import Job, Part

Pixels = NDArray[np.uint8]
"""[height, width, 3], as people see it."""
View = tuple[Size, ...]
"""Sizes that a frame is brought to, each from the one before; with none, it is shown as it is."""
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


class Unpacking(NamedTuple):
    """Bytes that a worker may take for a frame and views of it: some in any case, and so many for each pixel."""

    fixed: int
    each: int
    size: Size

    @classmethod
    def of(cls, fixed: int, each: int, size: Size, views: Sequence[View]) -> Unpacking:
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

    def unpacking(self, views: Sequence[View]) -> Unpacking:
        each = bounds.WEBP_PIXEL if self.header.format == "webp" else bounds.PICTURE_PIXEL
        return Unpacking.of(bounds.PICTURE_MEMORY, each, self.size, views)

    def frames(self, *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        """The one that it has. Raises BadMedia where the file is damaged behind its header."""
        header = (self.header.format, self.header.width, self.header.height, self.header.orientation)
        memory = self.unpacking(views).memory
        job = Job("picture", "picture", memory, bounds.PICTURE_CPU_S, (header, views, resample))
        return pixels_of(worker.pixels.stream(job, self.data), self.size, views)


def pixels_of(parts: Iterator[Part], size: Size, views: Sequence[View]) -> Iterator[Pixels]:
    """Frames of this size in these views, as a worker sends them. Raises BadMedia where they are not."""
    for part, view in zip(parts, itertools.cycle(views or [()]), strict=False):
        width, height = view[-1] if view else size
        if len(part.data) != 3 * width * height:
            raise BadMedia("the file cannot be unpacked: its frames are not of the size that it says.")
        yield np.frombuffer(part.data, np.uint8).reshape(height, width, 3)
