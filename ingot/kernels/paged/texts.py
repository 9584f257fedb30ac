"""The kernels over pages. Slabs that pages lie in are inputs, so many of them, or are found by their addresses."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ingot.kernels.gpu.texts import Kernel, read

SOURCE = Path(__file__).parents[1] / "paged_attention" / "source"
INPUTS = {
    "locate": ("keys", "values"),
    "write": ("keys", "values", "slots", "after"),
    "turn": ("projected", "angles", "norms", "slots", "after"),
    "copy": ("copies", "after"),
    "attend": ("queries", "numbers", "table", "rows", "after"),
    "attend_wide": ("queries", "numbers", "table", "rows", "after"),
    "attend_coded": ("queries", "numbers", "table", "rows", "after", "constants", "coded"),
    "attend_prompt": ("queries", "numbers", "table", "rows", "after"),
    "attend_unpacked": ("queries", "numbers", "table", "rows", "after", "unpacked_keys", "unpacked_values"),
    "store": ("pages", "numbers", "after", "coded"),
    "unpack": ("pages", "constants", "after", "freed", "coded", "keys", "values"),
    "merge": ("partial", "numbers", "rows"),
}
OUTPUTS: dict[str, tuple[str, ...]] = {
    "locate": ("addresses",),
    "write": ("done",),
    "turn": ("turned", "done"),
    "copy": ("done",),
    "attend": ("partial", "attended"),
    "attend_wide": ("partial", "attended"),
    "attend_coded": ("partial", "attended"),
    "attend_prompt": ("attended",),
    "attend_unpacked": ("attended",),
    "store": ("done",),
    "unpack": ("done",),
    "merge": ("attended",),
}
NO_PAGES = ("locate", "store", "unpack", "merge")
"""Read none that lie in slabs of keys and values."""
MATRIX = ("attend_wide", "attend_coded", "attend_prompt", "attend_unpacked", "unpack")
"""By matrix units, or for those that are: CUDA's alone."""
BODIES = {
    "attend_wide": ("stretch", "attend_wide"),
    "attend_coded": ("stretch", "attend_coded", "attend_wide"),
    "attend_unpacked": ("attend_prompt",),
}
"""Files that bodies are put together from, where it is not one of the same name."""
HEADERS = {"attend_coded": "coded", "attend_unpacked": "unpacked", "unpack": "coded"}
"""Files that come before them."""


@cache
def paged_kernel(name: str, slabs: int = 0) -> Kernel:
    """One of them over so many slabs as inputs, or over any that are found by their addresses (0)."""
    names = [f"{kind}_{number}" for kind in ("keys", "values") for number in range(slabs)] or ["addresses"]
    each = " ".join(f"X({number})" for number in range(1, slabs))
    found = f"#define EACH_SLAB(X) {each}\n{read(SOURCE / 'slabs.h')}" if slabs else read(SOURCE / "addresses.h")
    header, inputs = (found + read(SOURCE / "pages.h"), names) if name not in NO_PAGES else ("", [])
    if name in HEADERS:
        header += read(SOURCE / f"{HEADERS[name]}.h")
    body = "".join(read(SOURCE / f"{part}.h") for part in BODIES.get(name, (name,)))
    return Kernel("paged", name, (*INPUTS[name], *inputs), OUTPUTS[name], header, body, name in MATRIX)
