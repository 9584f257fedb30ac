"""PDFs read and drawn by pypdfium2, which comes with the extra `vision`. Runs in a worker alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ingot.errors import BadMedia
from ingot.media.images import viewed


def sizes_job(data: bytes, most: int) -> Iterator[tuple[Any, bytes]]:
    """Width and height of each page, in points, as it is shown."""
    with _opened(data) as document:
        count = len(document)
        if count < 1:
            raise BadMedia("the PDF has no page.")
        if count > most:
            raise BadMedia(f"the PDF has {count} pages; at most {most} are taken. Send some of them.")
        yield [document.get_page_size(at) for at in range(count)], b""


def page_job(
    data: bytes, number: int, drawn: Sequence[int], views: Sequence[Sequence[Sequence[int]]], resample: int
) -> Iterator[tuple[Any, bytes]]:
    """A page drawn on white, in all views."""
    import pypdfium2 as pdfium
    import pypdfium2.raw as raw
    from PIL import Image

    width, height = drawn
    with _opened(data) as document:
        page = document[number]
        bitmap = pdfium.PdfBitmap.new_native(width, height, raw.FPDFBitmap_BGR)
        bitmap.fill_rect((255, 255, 255, 255), 0, 0, width, height)
        flags = raw.FPDF_ANNOT | raw.FPDF_REVERSE_BYTE_ORDER  # red first
        raw.FPDF_RenderPageBitmap(bitmap, page, 0, 0, width, height, 0, flags)
        shown = Image.frombuffer("RGB", (width, height), bitmap.buffer, "raw", "RGB", bitmap.stride, 1)
        yield from viewed(shown, views, resample)


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
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
