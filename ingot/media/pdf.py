"""A PDF as it was sent. Its pages are shown as pictures, and drawn only when somebody asks for their pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from ingot.errors import BadMedia
from ingot.media import bounds, worker
from ingot.media.guard import check_size
from ingot.media.picture import BICUBIC, Pixels, Unpacking, View, pixels_of
from ingot.media.size import Size
from ingot.media.worker import Job

NO_PDFIUM: Final = "This server cannot read PDFs: its `ingot doctor` says what to install."
MAGIC = b"%PDF-"
_POINTS = 72  # to an inch


@dataclass(frozen=True, slots=True)
class PdfFile:
    data: bytes = field(repr=False)
    pages: tuple[Size, ...]  # that each is drawn in
    digest: bytes

    @classmethod
    def of(cls, data: bytes) -> PdfFile:
        """Raises BadMedia for what is no PDF, or too much of one. Nothing is drawn for it."""
        if MAGIC not in data[:1024]:
            raise BadMedia("the file is no PDF.")
        if len(data) > bounds.PDF_BYTES:
            raise BadMedia(f"the PDF has {len(data)} bytes; at most {bounds.PDF_BYTES} are taken.")
        worker.require("pypdfium2", NO_PDFIUM)
        job = Job("pdf sizes", "PDF", bounds.PDF_MEMORY, bounds.PDF_CPU_S, (bounds.PDF_PAGES,))
        sizes = worker.pixels.run(job, data).value
        return cls(data, tuple(map(drawn_size, sizes)), blake2b(data, digest_size=32).digest())


def drawn_size(points: tuple[float, float]) -> Size:
    """The size that a page is drawn in. Raises BadMedia where it has none that makes sense."""
    width, height = points
    if not (0 < width < math.inf and 0 < height < math.inf):
        raise BadMedia("a page of the PDF has no size.")
    scale = min(bounds.PDF_DPI / _POINTS, math.sqrt(bounds.PDF_PAGE_PIXELS / (width * height)))
    size = Size(max(1, math.floor(width * scale)), max(1, math.floor(height * scale)))
    check_size(size)
    return size


@dataclass(frozen=True, slots=True)
class PdfPage:
    """One page, as a source of pixels."""

    file: PdfFile
    number: int

    @property
    def size(self) -> Size:
        return self.file.pages[self.number]

    @property
    def digest(self) -> bytes:
        return blake2b(self.file.digest + repr((self.number, *self.size)).encode(), digest_size=32).digest()

    def unpacking(self, views: Sequence[View]) -> Unpacking:
        return Unpacking.of(bounds.PDF_MEMORY, 0, self.size, views)

    def frames(self, *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        """Raises BadMedia where the page cannot be drawn."""
        memory = self.unpacking(views).memory
        job = Job("pdf page", "PDF", memory, bounds.PDF_CPU_S, (self.number, self.size, views, resample))
        return pixels_of(worker.pixels.stream(job, self.file.data), self.size, views)
