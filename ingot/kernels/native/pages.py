"""Keys and values in pages: which tokens lie where, and the memory they lie in."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ingot.kernels.native.extension import extension

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

    Integers = array[int] | memoryview | np.ndarray[Any, np.dtype[np.int32]]
    """Of 32 bits."""

KernelSpan = tuple[int, int, int, int, int]
"""(first token of the launch, tokens, row of the tables, place of the first, its position) of one sequence."""
PageTable = tuple[int, "Integers"] | tuple[int, "Integers", "Integers"]
"""(how many pages at the front were forgotten, the pages after them) of one sequence; and pages in fewer bits, which
stand in place of those that were forgotten."""
KernelChoice = tuple[int, int, int]
"""(full pages that tokens see, the newest of them, tokens of which one asks for the others)."""


def spans(
    spans: Sequence[KernelSpan],
    tables: Sequence[PageTable],
    positions: Integers | None = None,
    choice: KernelChoice | None = None,
) -> Any:
    """Which tokens of a launch belong to which sequence, and in which pages; for all layers that share tables.

    The token at a place lies in the page `pages[place // page - forgotten]`, at `place % page`; a page has 64, 128, 256
    or 512 tokens. Tables are copied. Rows may share pages that hold what they have in common; what a span writes, no
    other row sees. `positions`, one for each token of the launch, are what tokens are turned by instead of consecutive
    ones. With a `choice` the tokens of a single span see some of the pages before them, which each layer chooses by
    what they ask, as `cache.page_choice` says. Raises ValueError for spans that are out of order; the operations do for
    pages and places that there are not.
    """
    none = array("i")
    whole = [table if len(table) == 3 else (*table, none) for table in tables]
    return extension().Spans(spans, whole, positions, choice)


CodedSide = tuple[int, int, int, int, Sequence[float], Sequence[float]]
"""(bits of a code, numbers that share a scale, where codes and scales begin, levels, signs) of a page's keys or values.
No bits: they are as they were computed; numbers that share none: they are rotated."""


def coded_form(
    *, size: int, halves: bool, centre: int | None, head_bytes: int, keys: CodedSide, values: CodedSide
) -> Any:
    """How pages of 64 tokens lie in bytes [pages, kv_heads, 1, head_bytes], for attention that reads them as they are.

    `centre` is where what the keys of a page have in common begins. What is not coded is `halves`, or floats. Raises
    ValueError for what attention cannot read.
    """
    return extension().CodedForm(
        size=size, halves=halves, centre=centre, head_bytes=head_bytes, keys=keys, values=values
    )


def reserve(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Zeros that take memory only where they are written; all of it is given back when the array dies.

    It is no part of what mlx counts as active memory.
    """
    reserved: mx.array = extension().reserve(shape, dtype)
    return reserved


def discard(array: mx.array, pages: Sequence[int]) -> None:
    """Give back the memory of these rows of the first axis, where it is whole memory pages: they read as zeros then.

    Waits for the array; nothing that was not waited for may still read those rows.
    """
    extension().discard(array, pages)


def copy_tokens(arrays: Sequence[mx.array], copies: Sequence[tuple[int, int, int]]) -> list[mx.array]:
    """For each copy (source page, target page, tokens), in order: the target's first tokens become the source's.

    In place, in all arrays [pages, kv_heads, page, size] at once: what is given must not be used any more.
    """
    copied: list[mx.array] = extension().copy_tokens(arrays, copies)
    return copied


def write_tokens(array: mx.array, page: int, begin: int, tokens: mx.array) -> mx.array:
    """Tokens [kv_heads, count, size] into a page of the array, from its token `begin` on.

    In place: what is given must not be used any more.
    """
    written: mx.array = extension().write_tokens(array, page, begin, tokens)
    return written
