"""Pages in fewer bits are unpacked some at a time: what is computed on the way takes several times the memory of what
comes of it. Only the engine thread may call what takes or gives arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import mlx.core as mx

from ingot.cache import tail
from ingot.cache.coded_pages import PageForm
from ingot.cache.pages import PAGE

AT_ONCE = 32
"""Pages."""
NUMBER_BYTES: Final = 16
"""What a number takes at most while it is unpacked by plain operations, in whatever codec."""
ENCODED_NUMBER_BYTES: Final = 32
"""The same while it is encoded."""

Piece = tuple[mx.array, mx.array]


def scratch_bytes(form: PageForm) -> int:
    """What is held on the way, beside what comes of it: that of pages that are computed, and of those before them."""
    return 2 * AT_ONCE * PAGE * form.heads * sum(form.sizes) * NUMBER_BYTES


def encoding_bytes(form: PageForm) -> int:
    """What is held while the pages of a layer are put into fewer bits, all that are at once."""
    return tail.STEP * form.heads * sum(form.sizes) * ENCODED_NUMBER_BYTES


def unpacked_bytes(form: PageForm) -> int:
    """What comes of a token."""
    return form.heads * sum(form.sizes) * form.dtype.size


def slices(pages: int) -> Iterator[slice]:
    """Of so many, those that are unpacked at once."""
    return (slice(begin, begin + AT_ONCE) for begin in range(0, pages, AT_ONCE))


def paced(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same keys and values: each is on its way before the next are, and no more than two of them at a time."""
    before: Piece | tuple[()] = ()
    for piece in pieces:
        mx.async_eval(*piece)
        mx.eval(*before)
        yield piece
        before = piece
