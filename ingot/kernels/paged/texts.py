"""The kernels over pages, each for a number of slabs that pages may lie in."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ingot.kernels.gpu.texts import Kernel, read

SOURCE = Path(__file__).parent / "source"
SLABS = (4, 12)
"""So many slabs of keys, and as many of values, a kernel is compiled for. Metal takes 31 buffers in all."""

INPUTS = {
    "write": ("keys", "values", "slots", "after"),
    "copy": ("copies", "after"),
    "attend": ("queries", "numbers", "table", "rows", "after"),
    "attend_wide": ("queries", "numbers", "table", "rows", "after"),
    "attend_prompt": ("queries", "numbers", "table", "rows", "after"),
    "merge": ("partial", "numbers", "rows"),
}
OUTPUTS = {
    "write": "done",
    "copy": "done",
    "attend": "partial",
    "attend_wide": "partial",
    "attend_prompt": "attended",
    "merge": "attended",
}
MATRIX = ("attend_wide", "attend_prompt")
"""By matrix units."""


@cache
def paged_kernel(name: str, slabs: int) -> Kernel:
    """One of them over so many slabs, one of `SLABS` (0 for one that reads no pages)."""
    each = " ".join(f"X({number})" for number in range(1, slabs))
    header = f"#define EACH_SLAB(X) {each}\n{read(SOURCE / 'pages.h')}" if slabs else ""
    names = [f"{kind}_{number}" for kind in ("keys", "values") for number in range(slabs)]
    body = read(SOURCE / f"{name}.h")
    return Kernel("paged", name, (*INPUTS[name], *names), (OUTPUTS[name],), header, body, name in MATRIX)
