"""PDFs are read and drawn by pypdfium2, which comes with the extra `vision`, in a process of its own for each.

A PDF is a program in all but name, and the library that runs it is large: a file that crashes it, or that never ends,
must take no more with it than that process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from ingot.errors import BadMedia, Unavailable
from ingot.media import bounds
from ingot.media.decoding import Pixels
from ingot.media.size import Size

NO_PDFIUM: Final = "This server cannot read PDFs: its `ingot doctor` says what to install."


def page_sizes(data: bytes) -> list[tuple[float, float]]:
    """Width and height of each page, in points, as it is shown. Raises BadMedia."""
    answer, _ = _asked({"pages": bounds.PDF_PAGES}, data)
    return [(width, height) for width, height in answer["sizes"]]


def page_pixels(data: bytes, number: int, size: Size) -> Pixels:
    """A page drawn on white. Raises BadMedia."""
    answer, drawn = _asked({"draw": number, "width": size.width, "height": size.height}, data)
    stride = int(answer["stride"])
    if len(drawn) != stride * size.height:
        raise BadMedia("the PDF cannot be drawn: its process was interrupted.")
    lines = np.frombuffer(drawn, np.uint8).reshape(size.height, stride)
    return np.ascontiguousarray(lines[:, : size.width * 3].reshape(size.height, size.width, 3))


def _asked(question: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """The answer's first line, and what follows it."""
    if find_spec("pypdfium2") is None:
        raise Unavailable(NO_PDFIUM)
    # -P: what lies in the working directory is nothing to import.
    command = [sys.executable, "-P", "-m", "ingot.media.pdf_process"]
    sent = json.dumps(question).encode() + b"\n" + data
    try:
        done = subprocess.run(
            command,
            input=sent,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=bounds.PDF_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BadMedia(f"the PDF took longer than {bounds.PDF_WALL_S:g} seconds to read.") from None
    line, _, rest = done.stdout.partition(b"\n")
    if done.returncode != 0 or not line:
        raise BadMedia("the PDF cannot be read: it takes too long or too much memory, or is damaged.")
    answer: dict[str, Any] = json.loads(line)
    if "refused" in answer:
        raise BadMedia(f"the PDF {answer['refused']}.")
    return answer, rest
