"""PDFs: a file whose pages become images, rendered by pypdfium2 in a worker process when they are requested.

The functions that end in `_job` run only in a worker; they import pypdfium2, which comes with the extra `vision`.
Raises BadMedia.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from ingot.errors import BadMedia
from ingot.media import bounds, worker
from ingot.media.images import BICUBIC, DecodingMemory, Pixels, View, frames_of_parts, render_views
from ingot.media.layout import Size, check_image_size
from ingot.media.worker import DecodeJob

NO_PDFIUM: Final = "This server cannot read PDFs: its `ingot doctor` says what to install."
PDF_MAGIC = b"%PDF-"
_POINTS = 72  # to an inch


@dataclass(frozen=True, slots=True)
class PdfFile:
    data: bytes = field(repr=False)
    pages: tuple[Size, ...]  # as rendered
    digest: bytes

    @classmethod
    def of(cls, data: bytes) -> PdfFile:
        """Raises BadMedia for what is not a PDF, or too large. Nothing is rendered."""
        if PDF_MAGIC not in data[:1024]:
            raise BadMedia("the file is no PDF.")
        if len(data) > bounds.PDF_BYTES:
            raise BadMedia(f"the PDF has {len(data)} bytes; at most {bounds.PDF_BYTES} are taken.")
        worker.require_package("pypdfium2", NO_PDFIUM)
        job = DecodeJob("pdf sizes", "PDF", bounds.PDF_MEMORY, bounds.PDF_CPU_S, (bounds.PDF_PAGES,))
        sizes = worker.pixel_pool.run(job, data).value
        return cls(data, tuple(map(rendered_page_size, sizes)), blake2b(data, digest_size=32).digest())


def rendered_page_size(points: tuple[float, float]) -> Size:
    """The size that a page is rendered in. Raises BadMedia where that is not finite."""
    width, height = points
    if not (0 < width < math.inf and 0 < height < math.inf):
        raise BadMedia("a page of the PDF has no size.")
    scale = min(bounds.PDF_DPI / _POINTS, math.sqrt(bounds.PDF_PAGE_PIXELS / (width * height)))
    size = Size(max(1, math.floor(width * scale)), max(1, math.floor(height * scale)))
    check_image_size(size)
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

    def unpacking(self, views: Sequence[View]) -> DecodingMemory:
        return DecodingMemory.of(bounds.PDF_MEMORY, 0, self.size, views)

    def frames(self, *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        """Raises BadMedia where the page cannot be rendered."""
        memory = self.unpacking(views).memory
        job = DecodeJob("pdf page", "PDF", memory, bounds.PDF_CPU_S, (self.number, self.size, views, resample))
        return frames_of_parts(worker.pixel_pool.stream(job, self.file.data), self.size, views)


def pdf_sizes_job(data: bytes, most: int) -> Iterator[tuple[Any, bytes]]:
    """Width and height of each page, in points, as displayed."""
    with _open_pdf(data) as document:
        count = len(document)
        if count < 1:
            raise BadMedia("the PDF has no page.")
        if count > most:
            raise BadMedia(f"the PDF has {count} pages; at most {most} are taken. Send some of them.")
        yield [document.get_page_size(at) for at in range(count)], b""


def pdf_page_job(
    data: bytes, number: int, size: Sequence[int], views: Sequence[Sequence[Sequence[int]]], resample: int
) -> Iterator[tuple[Any, bytes]]:
    """A page rendered on white, in all views."""
    import pypdfium2 as pdfium
    import pypdfium2.raw as raw
    from PIL import Image

    width, height = size
    with _open_pdf(data) as document:
        page = document[number]
        bitmap = pdfium.PdfBitmap.new_native(width, height, raw.FPDFBitmap_BGR)
        bitmap.fill_rect((255, 255, 255, 255), 0, 0, width, height)
        flags = raw.FPDF_ANNOT | raw.FPDF_REVERSE_BYTE_ORDER  # red first
        raw.FPDF_RenderPageBitmap(bitmap, page, 0, 0, width, height, 0, flags)
        image = Image.frombuffer("RGB", (width, height), bitmap.buffer, "raw", "RGB", bitmap.stride, 1)
        yield from render_views(image, views, resample)


@contextmanager
def _open_pdf(data: bytes) -> Iterator[Any]:
    import pypdfium2 as pdfium
    import pypdfium2.raw as raw

    try:
        document = pdfium.PdfDocument(bytes(data))
        try:
            yield document
        finally:
            document.close()
    except pdfium.PdfiumError as error:
        protected = getattr(error, "err_code", None) == raw.FPDF_ERR_PASSWORD
        raise BadMedia(f"the PDF is {'protected by a password' if protected else 'damaged'}.") from None
