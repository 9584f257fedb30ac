"""What the kernels over pages are given: their sources, the slabs that pages lie in, and the rows of a forward batch.

A layer has slabs [pages, kv_heads, page, size] of keys and as many of values. They are inputs of a kernel, so many of
them, or are found by their addresses. A page is known by its slab and its index in there (`page_number`). Slabs are
written in place: their arrays stay the same, and whoever reads what was written takes the token that
`PagedAttention.write` or `copy` gave. Nothing else orders them, as MLX does not know of the writing: plain operations
that read slabs find them by indices that are ordered after it, and who writes over what a launch under way may still
read takes a token that is ordered after what that launch gives.

For prompts, pages in fewer bits are unpacked first: many queries see each of them, and one kernel less is to be kept
fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ingot.kernels.gpu.kernel_source import Kernel, KernelTemplate, LaunchConfig, OutputSpec, read_source
from ingot.kernels.gpu.launcher import Launcher
from ingot.kernels.paged_attention.shapes import AttentionShape, CodedPages

SOURCE = Path(__file__).parent / "source"
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
    found = (
        f"#define EACH_SLAB(X) {each}\n{read_source(SOURCE / 'slabs.h')}"
        if slabs
        else read_source(SOURCE / "addresses.h")
    )
    header, inputs = (found + read_source(SOURCE / "pages.h"), names) if name not in NO_PAGES else ("", [])
    if name in HEADERS:
        header += read_source(SOURCE / f"{HEADERS[name]}.h")
    body = "".join(read_source(SOURCE / f"{part}.h") for part in BODIES.get(name, (name,)))
    return Kernel("paged", name, (*INPUTS[name], *inputs), OUTPUTS[name], header, body, name in MATRIX)


PAGE_LIMIT = 1 << 20
"""Pages in a slab."""
SLAB_LIMIT = (1 << 11) - 1
"""Slabs that pages can be numbered in."""


def page_number(slab: int, index: int) -> int:
    return slab * PAGE_LIMIT + index


def order_after(array: mx.array, after: mx.array) -> mx.array:
    """A small `array`, which whoever reads it has only when the device has `after`.

    `mx.depends` would order evaluation alone: kernels run at once on a device unless one reads what the other made.
    """
    return mx.where(after.reshape(-1)[:1] == 0, array, array)


class KVSlabs:
    """A layer's memory: `keys[i]` and `values[i]` [pages, kv_heads, page, size] have as many pages; sizes may differ.

    Made anew when a slab is added, not at every call. Where kernels find them by their addresses, MLX does not know
    that they are read: who owns them keeps them until the device has done all that they are in. The host must never
    read one itself, as MLX moves memory that it reads.
    """

    def __init__(self, keys: Sequence[mx.array], values: Sequence[mx.array], *, before: KVSlabs | None = None) -> None:
        """`before` are those that had fewer, which knew some already. Raises ValueError where there are none, more than
        can be numbered, or of different kinds."""
        if not 0 < len(keys) == len(values) <= SLAB_LIMIT:
            raise ValueError(f"{len(keys)} slabs of keys and {len(values)} of values: at most {SLAB_LIMIT}, alike")
        self.keys, self.values, self.dtype = tuple(keys), tuple(values), keys[0].dtype
        if any(slab.dtype != self.dtype for slab in (*keys, *values)):
            raise ValueError("slabs of different dtypes")
        self._located = [] if before is None else before._located_in(self)
        self._addresses: mx.array | None = None
        self._padded: dict[int, list[mx.array]] = {}

    def found(self, count: int, run: Launcher) -> list[mx.array]:
        """What a kernel that takes so many slabs finds them by; with 0 it takes their addresses."""
        return self.inputs(count) if count else [self.addresses(run)]

    def inputs(self, count: int) -> list[mx.array]:
        """For a kernel that takes so many slabs, which are no fewer than there are."""
        if count not in self._padded:
            more = count - len(self.keys)
            self._padded[count] = [*self.keys, *[self.keys[0]] * more, *self.values, *[self.values[0]] * more]
        return self._padded[count]

    def addresses(self, run: Launcher) -> mx.array:
        """Where each lies, its keys and its values: found once."""
        if self._addresses is None:
            new = range(len(self._located), len(self.keys))
            mx.eval(self.keys[new.start :], self.values[new.start :])
            self._located += [self._locate(run, number) for number in new]
            self._addresses = mx.concatenate(self._located)
            mx.eval(self._addresses)
        return self._addresses

    @contextmanager
    def standing_for(self, addresses: mx.array) -> Iterator[None]:
        """While this is open, they lie there."""
        own, self._addresses = self._addresses, addresses
        try:
            yield
        finally:
            self._addresses = own

    def _locate(self, run: Launcher, number: int) -> mx.array:
        work = LaunchConfig((("T", self.dtype),), (1, 1, 1), 32, (OutputSpec((4,), mx.int32),))
        [found] = run(paged_kernel("locate"), [self.keys[number], self.values[number]], work)
        return found

    def _located_in(self, larger: KVSlabs) -> list[mx.array]:
        """What is known of those that both have."""
        both = zip(self.keys, larger.keys, self.values, larger.values, strict=False)
        same = takewhile(lambda slab: slab[0] is slab[1] and slab[2] is slab[3], both)
        return self._located[: sum(1 for _ in same)]


_THREADS = 128


class UnpackedPages:
    """Memory for what some pages are unpacked to, one layer's after another's: with memory of its own for each layer,
    MLX would hold all of it until the device has come by."""

    def __init__(self, pages: mx.array, shape: AttentionShape, dtype: mx.Dtype) -> None:
        """`pages` are their numbers, the same in all layers."""
        self._pages, self._shape = pages, shape
        keys, values = (
            mx.zeros((pages.size, shape.kv_heads, shape.page, size), dtype)
            for size in (shape.key_size, shape.value_size)
        )
        self.arrays = (keys, values)
        """[pages, kv_heads, page, size] each."""
        self._reader: mx.array | None = None

    def fill(self, run: Launcher, template: KernelTemplate, coded: CodedPages, after: mx.array) -> mx.array:
        """Unpack a layer's, once the one before was read. Gives a token for who reads them."""
        freed = self.arrays[0] if self._reader is None else self._reader
        [done] = run(
            paged_kernel("unpack"),
            [self._pages, coded.constants, after, freed, coded.addresses, *self.arrays],
            LaunchConfig(
                template=(*template, *coded.shape.template, ("THREADS", _THREADS)),
                groups=(self._pages.size, self._shape.kv_heads, 1),
                threads=_THREADS,
                outputs=(OutputSpec((1,), mx.int32),),
            ),
        )
        return done

    def free_after(self, reader: mx.array) -> None:
        """They may be written over when this one, which was made of them, is there."""
        self._reader = reader


MOST_QUERIES = 16
"""Of a row, in one launch."""
WIDTHS = (1, 2, 4, 8, MOST_QUERIES)
"""Queries that a kernel is cut for, at most so many a row."""
ROOM_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""For rows of a launch, or their tokens, where they are few: so that launches are of few shapes."""


def token_slots(slots: Sequence[tuple[int, int]]) -> mx.array:
    """(page, place in the page) of each token, for `write`; of none behind the last, up to their room."""
    return _pad_entries(np.array(slots, np.int32).reshape(-1, 2), padded_count(len(slots)))


def page_copies(copies: Sequence[tuple[int, int, int]]) -> mx.array:
    """(page, page to write, places), for `copy`."""
    return _pad_entries(np.array(copies, np.int32).reshape(-1, 3))


def padded_count(count: int) -> int:
    """For so many rows, or tokens, and some that nobody has."""
    return next((room for room in ROOM_SIZES if count <= room), count)


def _doubling_room(count: int) -> int:
    """For so many, and some more: as seldom as they double, something is of another shape."""
    return 1 << max(0, count - 1).bit_length()


def _pad_entries(entries: np.ndarray, room: int = 0) -> mx.array:
    """With -1 behind it up to `room`, or where there is little: for inputs of fewer than eight numbers Metal compiles
    another kernel."""
    count = max(room, -(-8 // math.prod(entries.shape[1:])), len(entries))
    filled = np.full((count, *entries.shape[1:]), -1, np.int32)  # np.pad takes tens of microseconds
    filled[: len(entries)] = entries
    return mx.array(filled)


@dataclass(frozen=True, slots=True)
class KernelRows:
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
    _kv_splits: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    _unpacked: dict[tuple[AttentionShape, mx.Dtype], UnpackedPages] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        tables: Sequence[Sequence[int] | np.ndarray[Any, np.dtype[np.int32]]],
        lengths: Sequence[int],
        *,
        firsts: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
        coded: bool = False,
    ) -> KernelRows:
        """Row r has places [0, lengths[r]), its queries' own included; the token at place p lies in the page
        `tables[r][p // page - firsts[r]]`. Its `counts[r]` queries (1, if not given) are its last places, and stand one
        row's behind another's in what `attend` is given."""
        counts = counts or [1] * len(lengths)
        firsts = firsts or [0] * len(lengths)
        widths = [len(table) for table in tables]
        queries, entries = np.cumsum([0, *counts[:-1]]), np.cumsum([0, *widths[:-1]])
        most = next((width for width in WIDTHS if max(counts) <= width), max(counts))
        rows = np.zeros((padded_count(len(lengths)), 6), np.int32)
        rows[: len(lengths), :5] = np.stack([lengths, firsts, queries, counts, entries], axis=1)
        rows[:, 5] = most
        flat, packed = np.concatenate([np.asarray(table, np.int32) for table in tables]), None
        if coded and most > MOST_QUERIES:
            flat, packed = _split_coded(flat)
        spans = tuple(zip(lengths, counts, strict=True))
        return cls(_pad_entries(flat, _doubling_room(len(flat))), _pad_entries(rows), spans, most, coded, packed)

    def stretches(self, stretch: int, window: int) -> int:
        """No fewer than any row's queries have to look at; found once for all layers."""
        known = self._kv_splits.get((stretch, window))
        if known is None:
            most = max(
                -(-length // stretch) - (max(length - count + 1 - window, 0) if window else 0) // stretch
                for length, count in self.spans
            )
            known = self._kv_splits[stretch, window] = _doubling_room(most)
        return known

    def unpacked(self, shape: AttentionShape, dtype: mx.Dtype) -> UnpackedPages:
        """Where layers of that shape have the pages that are unpacked, one layer after another."""
        if (shape, dtype) not in self._unpacked:
            assert self.packed is not None, "none is in fewer bits, or kernels read them as they are"
            self._unpacked[shape, dtype] = UnpackedPages(self.packed, shape, dtype)
        return self._unpacked[shape, dtype]

    def narrowed(self, shown: mx.array, page: int) -> KernelRows:
        """Of a single row: its queries see the pages `shown`, of those before them, and what is in their own."""
        [(length, queries)] = self.spans
        own, end = (length - queries) // page, -(-length // page)
        first = shown.size * page + (length - queries) % page
        narrow = KernelRows.of([np.zeros(0, np.int32)], [first + queries], counts=[queries])
        return replace(narrow, table=mx.concatenate([mx.take(self.table, shown), self.table[own:end]]))

    # For steps that are compiled.

    @property
    def asked(self) -> tuple[tuple[int, int], ...]:
        """How layers cut these rows: stretches, and windows."""
        return tuple(self._kv_splits)

    def rooms(self, asked: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """What launches that cut such rows so are bound to, whatever their lengths are."""
        return tuple(self.stretches(stretch, window) for stretch, window in asked)

    def standing_for(self, table: mx.array, rows: mx.array) -> KernelRows:
        """Any rows whose launches are bound to the same."""
        return replace(self, table=table, rows=rows)


def _split_coded(table: np.ndarray[Any, np.dtype[np.int32]]) -> tuple[np.ndarray[Any, np.dtype[np.int32]], mx.array]:
    """The table in which those in fewer bits are counted, -1 the first, and their numbers: each once, whoever has
    it."""
    coded = table < 0
    pages, counted = np.unique(~table[coded], return_inverse=True)
    apart = table.copy()
    apart[coded] = ~counted.astype(np.int32)
    return apart, mx.array(pages)


class RowBounds(NamedTuple):
    """What launches over rows depend on, apart from data: where it is the same, they are the same launches."""

    rows: int  # that there is room for
    most: int  # queries of a row
    stretches: int
