"""Reads or draws one PDF for the server, in a process that may crash or be killed for it.

Reads a line of JSON, then the file: {"pages": most} is answered by a line with each page's size, {"draw": number,
"width": …, "height": …} by a line with how many bytes a line of pixels has, and then the pixels. What is wrong with the
file is said as {"refused": …}.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from ingot.media.bounds import PDF_CPU_S

MEMORY_BYTES = 2 << 30


def sizes(document: Any, most: int) -> tuple[dict[str, Any], bytes]:
    count = len(document)
    if count < 1:
        return {"refused": "has no page"}, b""
    if count > most:
        return {"refused": f"has {count} pages; at most {most} are taken. Send some of them"}, b""
    return {"sizes": [document.get_page_size(at) for at in range(count)]}, b""


def drawn(document: Any, number: int, width: int, height: int) -> tuple[dict[str, Any], bytes]:
    page = document[number]
    bitmap = pdfium.PdfBitmap.new_native(width, height, raw.FPDFBitmap_BGR)
    bitmap.fill_rect((255, 255, 255, 255), 0, 0, width, height)
    flags = raw.FPDF_ANNOT | raw.FPDF_REVERSE_BYTE_ORDER  # red first
    raw.FPDF_RenderPageBitmap(bitmap, page, 0, 0, width, height, 0, flags)
    return {"stride": bitmap.stride}, bytes(bitmap.buffer)


def answer(question: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        document = pdfium.PdfDocument(data)
        if "pages" in question:
            return sizes(document, question["pages"])
        return drawn(document, question["draw"], question["width"], question["height"])
    except pdfium.PdfiumError as error:
        protected = getattr(error, "err_code", None) == raw.FPDF_ERR_PASSWORD
        return {"refused": "is protected by a password" if protected else "is damaged"}, b""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, PDF_CPU_S)  # it ends the process: the library cannot be interrupted
    line = sys.stdin.buffer.readline()
    said, pixels = answer(json.loads(line), sys.stdin.buffer.read())
    sys.stdout.buffer.write(json.dumps(said).encode() + b"\n" + pixels)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
