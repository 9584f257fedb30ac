"""Inputs of the kernels over pages: their sources, the slabs of pages, and the rows of a forward batch.

A layer has slabs [pages, kv_heads, page, size] of keys and as many of values. They are passed to a kernel as a fixed
number of inputs, or found by their addresses. A page is identified by its slab and its index there (`page_number`).
Slabs are written in place: their arrays stay the same, and a reader takes the dependency token that
`PagedAttention.write` or `copy` returned. Nothing else orders reads and writes, as MLX does not know of the writes:
plain operations read slabs by indices that depend on the token, and a writer that overwrites what an earlier launch may
still read takes a token that depends on that launch's output.

For prompts, coded pages are decoded first: many queries see each of them, and it takes one kernel less.
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
from ingot.kernels.paged_attention.shapes import AttentionShape, CodedPages, KVSplits

SOURCE = Path(__file__).parent / "source"
INPUTS = {
    "locate": ("keys", "values"),
    "write": ("keys", "values", "slots", "after"),
    "turn": ("projected", "angles", "norms", "slots", "after"),
    "turn_latent": ("queries", "latents", "embedded", "angles", "norms", "slots", "after"),
    "copy": ("copies", "after"),
    "attend": ("queries", "numbers", "table", "rows", "after"),
    "attend_wide": ("queries", "numbers", "table", "rows", "after"),
    "attend_large": ("queries", "numbers", "table", "rows", "after"),
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
    "turn_latent": ("turned", "done"),
    "copy": ("done",),
    "attend": ("partial", "attended"),
    "attend_wide": ("partial", "attended"),
    "attend_large": ("partial", "attended"),
    "attend_coded": ("partial", "attended"),
    "attend_prompt": ("partial", "attended"),
    "attend_unpacked": ("partial", "attended"),
    "store": ("done",),
    "unpack": ("done",),
    "merge": ("attended",),
}
NO_PAGES = ("locate", "store", "unpack", "merge")
"""Kernels that read no slabs of keys and values."""
MATRIX = ("attend_wide", "attend_large", "attend_coded", "attend_prompt", "attend_unpacked", "unpack")
"""Kernels that use matrix units, or serve those that do: only on CUDA."""
BODIES = {
    "attend": ("kv_splits", "attend"),
    "attend_large": ("kv_splits", "attend_large"),
    "attend_wide": ("kv_splits", "split", "attend_wide"),
    "attend_coded": ("kv_splits", "split", "attend_coded", "attend_wide"),
    "merge": ("kv_splits", "merge"),
    "attend_unpacked": ("attend_prompt",),
}
"""The files of a body, where it is not one of the same name."""
HEADERS = {"attend_coded": "coded", "attend_unpacked": "unpacked", "unpack": "coded"}
"""Header files of bodies."""


@cache
def paged_kernel(name: str, slabs: int = 0) -> Kernel:
    """A kernel over so many slabs as inputs, or over any number by their addresses (0)."""
    names = [f"{kind}_{number}" for kind in ("keys", "values") for number in range(slabs)] or ["addresses"]
    each = " ".join(f"X({number})" for number in range(1, slabs))
    lookup = (
        f"#define EACH_SLAB(X) {each}\n{read_source(SOURCE / 'slabs.h')}"
        if slabs
        else read_source(SOURCE / "addresses.h")
    )
    header, inputs = (lookup + read_source(SOURCE / "pages.h"), names) if name not in NO_PAGES else ("", [])
    if name in HEADERS:
        header += read_source(SOURCE / f"{HEADERS[name]}.h")
    body = "".join(read_source(SOURCE / f"{part}.h") for part in BODIES.get(name, (name,)))
    return Kernel("paged", name, (*INPUTS[name], *inputs), OUTPUTS[name], header, body, name in MATRIX)


PAGE_LIMIT = 1 << 20
"""Pages in a slab."""
SLAB_LIMIT = (1 << 11) - 1
"""The most slabs that page numbers can refer to."""


def page_number(slab: int, index: int) -> int:
    return slab * PAGE_LIMIT + index


def order_after(array: mx.array, after: mx.array) -> mx.array:
    """A small `array` that depends on `after` on the device.

    `mx.depends` would only order evaluation: kernels run concurrently unless one reads what the other wrote.
    """
    return mx.where(after.reshape(-1)[:1] == 0, array, array)


class KVSlabs:
    """A layer's memory: `keys[i]` and `values[i]` [pages, kv_heads, page, size] have as many pages; sizes may differ.

    Made again when a slab is added, not at every call. Where kernels find slabs by their addresses, MLX does not know
    that they are read: the owner keeps them until the device has finished all work on them. The host must never read
    one itself, as MLX moves memory that it reads.
    """

    def __init__(self, keys: Sequence[mx.array], values: Sequence[mx.array], *, before: KVSlabs | None = None) -> None:
        """`before` is the previous object with fewer slabs, whose addresses are reused. Raises ValueError where there
        are none, too many, or of different dtypes."""
        if not 0 < len(keys) == len(values) <= SLAB_LIMIT:
            raise ValueError(f"{len(keys)} slabs of keys and {len(values)} of values: at most {SLAB_LIMIT}, alike")
        self.keys, self.values, self.dtype = tuple(keys), tuple(values), keys[0].dtype
        if any(slab.dtype != self.dtype for slab in (*keys, *values)):
            raise ValueError("slabs of different dtypes")
        self._located = [] if before is None else before._located_in(self)
        self._addresses: mx.array | None = None
        self._padded: dict[int, list[mx.array]] = {}

    def found(self, count: int, run: Launcher) -> list[mx.array]:
        """The inputs of a kernel that takes so many slabs; with 0, their addresses."""
        return self.inputs(count) if count else [self.addresses(run)]

    def inputs(self, count: int) -> list[mx.array]:
        """The slabs, padded to the number that a kernel takes."""
        if count not in self._padded:
            more = count - len(self.keys)
            self._padded[count] = [*self.keys, *[self.keys[0]] * more, *self.values, *[self.values[0]] * more]
        return self._padded[count]

    def addresses(self, run: Launcher) -> mx.array:
        """The addresses of each slab's keys and values, determined once."""
        if self._addresses is None:
            new = range(len(self._located), len(self.keys))
            mx.eval(self.keys[new.start :], self.values[new.start :])
            self._located += [self._locate(run, number) for number in new]
            self._addresses = mx.concatenate(self._located)
            mx.eval(self._addresses)
        return self._addresses

    @contextmanager
    def standing_for(self, *found: mx.array) -> Iterator[None]:
        """While this is open, kernels are given these: the addresses, or the slabs of keys and of values."""
        own = self.keys, self.values, self._addresses, self._padded
        if len(found) == 1:
            self._addresses = found[0]
        else:
            self.keys, self.values, self._padded = found[: len(self.keys)], found[len(self.keys) :], {}
        try:
            yield
        finally:
            self.keys, self.values, self._addresses, self._padded = own

    def _locate(self, run: Launcher, number: int) -> mx.array:
        work = LaunchConfig((("T", self.dtype),), (1, 1, 1), 32, (OutputSpec((4,), mx.int32),))
        [found] = run(paged_kernel("locate"), [self.keys[number], self.values[number]], work)
        return found

    def _located_in(self, larger: KVSlabs) -> list[mx.array]:
        """The addresses of slabs that both have."""
        both = zip(self.keys, larger.keys, self.values, larger.values, strict=False)
        same = takewhile(lambda slab: slab[0] is slab[1] and slab[2] is slab[3], both)
        return self._located[: sum(1 for _ in same)]


_THREADS = 128


class UnpackedPages:
    """Memory for decoded pages, which all layers use in turn: with memory for each layer, MLX would hold all of it
    until the device has finished."""

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
        """Decode a layer's pages once the previous layer's were read. Returns a token for readers."""
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
        """They may be overwritten once `reader`, which was computed from them, is done."""
        self._reader = reader


MOST_QUERIES = 16
"""Of a row, in one decode launch."""
WIDTHS = (1, 2, 4, 8, MOST_QUERIES)
"""Queries of a row for which there are kernels, at most."""
ROOM_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Padded numbers of rows, or of tokens, so that launches have few shapes."""
PROMPT_ROOMS = (96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""The same of prompts, where decode graphs compute them."""


def token_slots(slots: Sequence[tuple[int, int]]) -> mx.array:
    """(page, offset in the page) of each token, for `write`, padded with -1."""
    flat = [number for slot in slots for number in slot]
    flat += [-1] * (2 * max(4, padded_count(len(slots))) - len(flat))
    return mx.array(np.array(flat, np.int32).reshape(-1, 2))


def page_copies(copies: Sequence[tuple[int, int, int]]) -> mx.array:
    """(page, page to write, tokens), for `copy`."""
    return _pad_entries(np.array(copies, np.int32).reshape(-1, 3))


def padded_count(count: int) -> int:
    """So many rows, or tokens, with padding."""
    return next((room for room in (*ROOM_SIZES, *PROMPT_ROOMS) if count <= room), count)


def _doubling_room(count: int) -> int:
    """The next power of two, so that shapes change rarely."""
    return 1 << max(0, count - 1).bit_length()


def _pad_entries(entries: np.ndarray, room: int = 0) -> mx.array:
    """Padded with -1 up to `room`, and to at least eight numbers: for fewer Metal compiles another kernel."""
    count = max(room, -(-8 // math.prod(entries.shape[1:])), len(entries))
    filled = np.empty((count, *entries.shape[1:]), np.int32)  # np.pad takes tens of microseconds
    filled[: len(entries)], filled[len(entries) :] = entries, -1
    return mx.array(filled)


@dataclass(frozen=True, slots=True)
class KernelRows:
    """The rows of a forward batch: made once a step for all layers with the same tables."""

    table: mx.array
    rows: mx.array
    """int32 [rows, 6]: length, first page, first query, queries, first entry of the table, most queries of any row.
    Padding rows have no queries."""
    spans: tuple[tuple[int, int], ...]
    """(length, queries) of each."""
    most: int
    """The most queries of a row, rounded up to one of `WIDTHS` where they are few."""
    coded: bool = False
    """Whether some pages are coded."""
    packed: mx.array | None = None
    """The coded pages of rows with many queries, which are decoded first; the table has indices into these."""
    _kv_splits: dict[tuple[KVSplits, int], int] = field(default_factory=dict, repr=False)
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
        widths: Sequence[int] | None = None,
    ) -> KernelRows:
        """Row r has lengths[r] tokens, including its queries'; token i is in the page
        `tables[r][i // page - firsts[r]]`. Its `counts[r]` queries (1 by default) are its last tokens; `attend` takes
        the queries of all rows concatenated. `widths` are the tables' lengths where they come as one."""
        counts = counts or [1] * len(lengths)
        firsts = firsts or [0] * len(lengths)
        most = next((width for width in WIDTHS if max(counts) <= width), max(counts))
        numbers: list[int] = []  # of few rows: numpy would take longer to add them up
        query = entry = 0
        for length, first, count, width in zip(lengths, firsts, counts, widths or map(len, tables), strict=True):
            numbers += (length, first, query, count, entry, most)
            query, entry = query + count, entry + width
        numbers += (0, 0, 0, 0, 0, most) * (padded_count(len(lengths)) - len(lengths))
        rows = np.array(numbers, np.int32).reshape(-1, 6)
        pages = [np.asarray(table, np.int32) for table in tables]
        flat, packed = pages[0] if len(pages) == 1 else np.concatenate(pages), None
        if coded and most > MOST_QUERIES:
            flat, packed = _split_coded(flat)
        spans = tuple(zip(lengths, counts, strict=True))
        return cls(_pad_entries(flat, _doubling_room(len(flat))), _pad_entries(rows), spans, most, coded, packed)

    def splits(self, cut: KVSplits, window: int) -> int:
        """KV splits, at least as many as any row's queries need; computed once for all layers."""
        splits = self._kv_splits.get((cut, window))
        if splits is None:
            most = max(
                cut.number_at(length - 1) + 1 - cut.number_at(max(length - count + 1 - window, 0) if window else 0)
                for length, count in self.spans
            )
            splits = self._kv_splits[cut, window] = _doubling_room(most)
        return splits

    def unpacked(self, shape: AttentionShape, dtype: mx.Dtype) -> UnpackedPages:
        """The memory for decoded pages that layers of that shape share."""
        if (shape, dtype) not in self._unpacked:
            assert self.packed is not None, "no page is coded, or kernels read coded pages"
            self._unpacked[shape, dtype] = UnpackedPages(self.packed, shape, dtype)
        return self._unpacked[shape, dtype]

    def narrowed(self, shown: mx.array, page: int) -> KernelRows:
        """A single row whose queries see, of the earlier pages, only `shown`, and their own pages."""
        [(length, queries)] = self.spans
        own, end = (length - queries) // page, -(-length // page)
        first = shown.size * page + (length - queries) % page
        narrow = KernelRows.of([np.zeros(0, np.int32)], [first + queries], counts=[queries])
        return replace(narrow, table=mx.concatenate([mx.take(self.table, shown), self.table[own:end]]))

    # For compiled steps

    @property
    def asked(self) -> tuple[tuple[KVSplits, int], ...]:
        """The KV splits and windows that layers have used."""
        return tuple(self._kv_splits)

    def rooms(self, asked: Sequence[tuple[KVSplits, int]]) -> tuple[int, ...]:
        """The numbers of KV splits that such launches depend on, whatever the rows' lengths."""
        return tuple(self.splits(cut, window) for cut, window in asked)

    def standing_for(self, table: mx.array, rows: mx.array) -> KernelRows:
        """Other rows with the same launches."""
        return replace(self, table=table, rows=rows)


def _split_coded(table: np.ndarray[Any, np.dtype[np.int32]]) -> tuple[np.ndarray[Any, np.dtype[np.int32]], mx.array]:
    """The table with coded pages as indices (-1 is the first) into their numbers, and these numbers, each once."""
    coded = table < 0
    pages, counted = np.unique(~table[coded], return_inverse=True)
    apart = table.copy()
    apart[coded] = ~counted.astype(np.int32)
    return apart, mx.array(pages)


class RowBounds(NamedTuple):
    """What launches over rows depend on, apart from data: with the same bounds they are the same launches."""

    rows: int  # with padding
    most: int  # queries of a row
    splits: int
