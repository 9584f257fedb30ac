"""The rows of a launch as the kernels over pages take them, and where the tokens of one are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ingot.kernels.paged.unpacking import UnpackedPages
from ingot.kernels.paged_attention.shapes import Shape

MOST_QUERIES = 16
"""Of a row, in one launch."""
WIDTHS = (1, 2, 4, 8, MOST_QUERIES)
"""Queries that a kernel is cut for, at most so many a row."""
ROOMS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""For rows of a launch, or their tokens, where they are few: so that launches are of few shapes."""


def token_slots(slots: Sequence[tuple[int, int]]) -> mx.array:
    """(page, place in the page) of each token, for `write`; of none behind the last, up to their room."""
    return _filled(np.array(slots, np.int32).reshape(-1, 2), room_of(len(slots)))


def page_copies(copies: Sequence[tuple[int, int, int]]) -> mx.array:
    """(page, page to write, places), for `copy`."""
    return _filled(np.array(copies, np.int32).reshape(-1, 3))


def room_of(count: int) -> int:
    """For so many rows, or tokens, and some that nobody has."""
    return next((room for room in ROOMS if count <= room), count)


def _room(count: int) -> int:
    """For so many, and some more: as seldom as they double, something is of another shape."""
    return 1 << max(0, count - 1).bit_length()


def _filled(entries: np.ndarray, room: int = 0) -> mx.array:
    """With -1 behind it up to `room`, or where there is little: for inputs of fewer than eight numbers Metal compiles
    another kernel."""
    count = max(room, -(-8 // math.prod(entries.shape[1:])), len(entries))
    filled = np.full((count, *entries.shape[1:]), -1, np.int32)  # np.pad takes tens of microseconds
    filled[: len(entries)] = entries
    return mx.array(filled)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a launch: made once a step for all layers whose tables are the same."""

    table: mx.array
    rows: mx.array
    """int32 [rows, 6]: length, first page, first query, queries, first entry of the table, most queries of any row. Up
    to their room there are some behind the last that have no queries."""
    spans: tuple[tuple[int, int], ...]
    """(length, queries) of each."""
    most: int
    """Queries of a row, at most: one of `WIDTHS`, where they are few."""
    coded: bool = False
    """Whether some pages are in fewer bits."""
    packed: mx.array | None = None
    """Of rows with many queries, these pages: they are unpacked first, and the table says which of them it is."""
    _stretches: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    _unpacked: dict[tuple[Shape, mx.Dtype], UnpackedPages] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        tables: Sequence[Sequence[int] | np.ndarray[Any, np.dtype[np.int32]]],
        lengths: Sequence[int],
        *,
        firsts: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
        coded: bool = False,
    ) -> Rows:
        """Row r has places [0, lengths[r]), its queries' own included; the token at place p lies in the page
        `tables[r][p // page - firsts[r]]`. Its `counts[r]` queries (1, if not given) are its last places, and stand one
        row's behind another's in what `attend` is given."""
        counts = counts or [1] * len(lengths)
        firsts = firsts or [0] * len(lengths)
        widths = [len(table) for table in tables]
        queries, entries = np.cumsum([0, *counts[:-1]]), np.cumsum([0, *widths[:-1]])
        most = next((width for width in WIDTHS if max(counts) <= width), max(counts))
        rows = np.zeros((room_of(len(lengths)), 6), np.int32)
        rows[: len(lengths), :5] = np.stack([lengths, firsts, queries, counts, entries], axis=1)
        rows[:, 5] = most
        flat, packed = np.concatenate([np.asarray(table, np.int32) for table in tables]), None
        if coded and most > MOST_QUERIES:
            flat, packed = _apart(flat)
        spans = tuple(zip(lengths, counts, strict=True))
        return cls(_filled(flat, _room(len(flat))), _filled(rows), spans, most, coded, packed)

    def stretches(self, stretch: int, window: int) -> int:
        """No fewer than any row's queries have to look at; found once for all layers."""
        known = self._stretches.get((stretch, window))
        if known is None:
            most = max(
                -(-length // stretch) - (max(length - count + 1 - window, 0) if window else 0) // stretch
                for length, count in self.spans
            )
            known = self._stretches[stretch, window] = _room(most)
        return known

    def unpacked(self, shape: Shape, dtype: mx.Dtype) -> UnpackedPages:
        """Where layers of that shape have the pages that are unpacked, one layer after another."""
        if (shape, dtype) not in self._unpacked:
            assert self.packed is not None, "none is in fewer bits, or kernels read them as they are"
            self._unpacked[shape, dtype] = UnpackedPages(self.packed, shape, dtype)
        return self._unpacked[shape, dtype]

    def narrowed(self, shown: mx.array, page: int) -> Rows:
        """Of a single row: its queries see the pages `shown`, of those before them, and what is in their own."""
        [(length, queries)] = self.spans
        own, end = (length - queries) // page, -(-length // page)
        first = shown.size * page + (length - queries) % page
        narrow = Rows.of([np.zeros(0, np.int32)], [first + queries], counts=[queries])
        return replace(narrow, table=mx.concatenate([mx.take(self.table, shown), self.table[own:end]]))

    # For steps that are compiled.

    @property
    def asked(self) -> tuple[tuple[int, int], ...]:
        """How layers cut these rows: stretches, and windows."""
        return tuple(self._stretches)

    def rooms(self, asked: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """What launches that cut such rows so are bound to, whatever their lengths are."""
        return tuple(self.stretches(stretch, window) for stretch, window in asked)

    def standing_for(self, table: mx.array, rows: mx.array) -> Rows:
        """Any rows whose launches are bound to the same."""
        return replace(self, table=table, rows=rows)


def _apart(table: np.ndarray[Any, np.dtype[np.int32]]) -> tuple[np.ndarray[Any, np.dtype[np.int32]], mx.array]:
    """The table in which those in fewer bits are counted, -1 the first, and their numbers: each once, whoever has
    it."""
    coded = table < 0
    pages, counted = np.unique(~table[coded], return_inverse=True)
    apart = table.copy()
    apart[coded] = ~counted.astype(np.int32)
    return apart, mx.array(pages)


class Bound(NamedTuple):
    """What launches over rows depend on, apart from data: where it is the same, they are the same launches."""

    rows: int  # that there is room for
    most: int  # queries of a row
    stretches: int
