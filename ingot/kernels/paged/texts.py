"""The kernels' texts. A kernel is a body in the common subset of CUDA, Metal and C++, behind a prelude for each."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import mlx.core as mx

Prelude = Literal["cuda", "metal", "emulator"]
Template = tuple[tuple[str, "int | bool | mx.Dtype"], ...]


class Work(NamedTuple):
    """How a kernel is run: over so many slabs, in groups of so many threads, and what it gives."""

    slabs: int
    template: Template
    groups: tuple[int, int, int]
    threads: int
    shape: tuple[int, ...]
    dtype: mx.Dtype


"""Names in a body that stand for something else in each kernel that is made of it."""
SOURCE = Path(__file__).parent / "source"
SLABS = (4, 12)
"""So many slabs of keys, and as many of values, a kernel is compiled for. Metal takes 31 buffers in all."""

INPUTS = {
    "write": ("keys", "values", "slots", "after"),
    "copy": ("copies", "after"),
    "attend": ("queries", "numbers", "table", "rows", "after"),
    "merge": ("partial", "numbers", "rows"),
}
OUTPUTS = {"write": "done", "copy": "done", "attend": "partial", "merge": "attended"}


class KernelText(NamedTuple):
    name: str  # another one for another text: what is compiled is kept by name
    inputs: tuple[str, ...]
    output: str
    header: str
    body: str


@cache
def kernel_text(kernel: str, prelude: Prelude, slabs: int) -> KernelText:
    """The text of a kernel over so many slabs, one of `SLABS` (0 for one that reads no pages)."""
    each = " ".join(f"X({number})" for number in range(1, slabs))
    parts = [_read(f"prelude_{prelude}.h"), _read("common.h")]
    if slabs:
        parts += [f"#define EACH_SLAB(X) {each}\n", _read("pages.h")]
    header, body = "".join(parts), _read(f"{kernel}.h")
    names = [f"{kind}_{number}" for kind in ("keys", "values") for number in range(slabs)]
    digest = hashlib.sha256((header + body).encode()).hexdigest()[:12]
    return KernelText(
        f"ingot_paged_{kernel}_{slabs}_{digest}", (*INPUTS[kernel], *names), OUTPUTS[kernel], header, body
    )


def _read(name: str) -> str:
    """A file without comments and indentation: mlx puts the text together anew at every call."""
    lines = (re.sub(r"\s*//.*", "", line).strip() for line in (SOURCE / name).read_text().splitlines())
    return "".join(f"{line}\n" for line in lines if line)
