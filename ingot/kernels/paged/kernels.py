"""Attention over pages of keys and values, for a few queries a row: one kernel source for CUDA and Metal.

A layer has slabs [pages, kv_heads, page, size] of keys and as many of values. A page is known by its slab and its index
in there (`page_number`). Slabs are written in place: their arrays stay the same, and whoever reads what was written
takes the token that `write` or `copy` gave. Nothing else orders them, as MLX does not know of the writing: plain
operations that read slabs find them by `ordered` indices, and who writes over what a launch under way may still read
takes a token that is `ordered` after what that launch gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gpu.launchers import Launcher, launcher
from ingot.kernels.gpu.texts import Output, Template, Work
from ingot.kernels.paged.shapes import CodedPages, CodedShape, Shape
from ingot.kernels.paged.texts import paged_kernel
from ingot.kernels.paged.tuning import TUNINGS, Matrix, Tuning

MOST_QUERIES = 16
"""Of a row, in one launch."""
WIDTHS = (1, 2, 4, 8, MOST_QUERIES)
"""Queries that a kernel is cut for, at most so many a row."""
ROOMS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""For rows of a launch, or their tokens, where they are few: so that launches are of few shapes."""
PAGE_LIMIT = 1 << 20
"""Pages in a slab."""
SLAB_LIMIT = (1 << 11) - 1
"""Slabs that pages can be numbered in."""
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
CODED_PART = 16
"""Queries that a group of threads attends for where pages are in fewer bits: a tile of them."""
_THREADS = 128
"""In a group that writes, copies or merges."""


def page_number(slab: int, index: int) -> int:
    return slab * PAGE_LIMIT + index


def token_slots(slots: Sequence[tuple[int, int]]) -> mx.array:
    """(page, place in the page) of each token, for `write`; of none behind the last, up to their room."""
    return _filled(np.array(slots, np.int32).reshape(-1, 2), room_of(len(slots)))


def page_copies(copies: Sequence[tuple[int, int, int]]) -> mx.array:
    """(page, page to write, places), for `copy`."""
    return _filled(np.array(copies, np.int32).reshape(-1, 3))


def ordered(array: mx.array, after: mx.array) -> mx.array:
    """A small `array`, which whoever reads it has only when the device has `after`.

    `mx.depends` would order evaluation alone: kernels run at once on a device unless one reads what the other made.
    """
    return mx.where(after.reshape(-1)[:1] == 0, array, array)


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


class Slabs:
    """A layer's memory: `keys[i]` and `values[i]` [pages, kv_heads, page, size] have as many pages; sizes may differ.

    Made anew when a slab is added, not at every call. Where kernels find them by their addresses, MLX does not know
    that they are read: who owns them keeps them until the device has done all that they are in. The host must never
    read one itself, as MLX moves memory that it reads.
    """

    def __init__(self, keys: Sequence[mx.array], values: Sequence[mx.array], *, before: Slabs | None = None) -> None:
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
        work = Work((("T", self.dtype),), (1, 1, 1), 32, (Output((4,), mx.int32),))
        [found] = run(paged_kernel("locate"), [self.keys[number], self.values[number]], work)
        return found

    def _located_in(self, larger: Slabs) -> list[mx.array]:
        """What is known of those that both have."""
        both = zip(self.keys, larger.keys, self.values, larger.values, strict=False)
        same = takewhile(lambda slab: slab[0] is slab[1] and slab[2] is slab[3], both)
        return self._located[: sum(1 for _ in same)]


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
    _stretches: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

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
        flat = np.concatenate([np.asarray(table, np.int32) for table in tables])
        return cls(
            _filled(flat, _room(len(flat))), _filled(rows), tuple(zip(lengths, counts, strict=True)), most, coded
        )

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


class Bound(NamedTuple):
    """What launches over rows depend on, apart from data: where it is the same, they are the same launches."""

    rows: int  # that there is room for
    most: int  # queries of a row
    stretches: int


class _Cut(NamedTuple):
    """How a launch is cut into groups of threads."""

    kernel: str
    part: int  # queries that share a head of keys and values, in a group of threads
    attend: Template
    merge: Template


class PagedAttention:
    """One layer's attention, or that of all layers alike. Keeps nothing but what it was made with."""

    def __init__(
        self,
        run: Launcher,
        tuning: Tuning,
        shape: Shape,
        dtype: mx.Dtype,
        *,
        scale: float,
        cap: float | None = None,
        sinks: mx.array | None = None,
        window: int | None = None,
    ) -> None:
        """With `cap` a score s counts as cap * tanh(s / cap). `sinks` [heads] are scores that weigh nothing. With
        `window` a query sees so many places, its own included. Raises ValueError for what there is no kernel for."""
        if (reason := shape.unsupported()) is not None:
            raise ValueError(reason)
        if dtype not in DTYPES:
            raise ValueError(f"{dtype}: there are kernels for {', '.join(map(str, DTYPES))}")
        self._run, self._tuning, self._shape, self._dtype = run, tuning, shape, dtype
        self._size = max(shape.key_size, shape.value_size)
        self.stretch = tuning.stretch_of(dtype, self._size)
        """Places that a group of threads looks at: beyond, what several found is merged."""
        self._window, self._capped, self._sinks = window or 0, bool(cap), sinks is not None
        log2e = math.log2(math.e)
        factors = mx.array([scale / cap, cap * log2e] if cap else [scale * log2e, 0.0], mx.float32)
        lows = mx.zeros(shape.heads) if sinks is None else sinks.astype(mx.float32) * log2e
        self._numbers = mx.concatenate([factors, lows])
        mx.eval(self._numbers)
        self._values: Template = (("T", dtype), ("VALUE_SIZE", shape.value_size), ("KV_HEADS", shape.kv_heads))
        self._pages: Template = (*self._values, ("KEY_SIZE", shape.key_size), ("PAGE", shape.page))
        self._cuts: dict[tuple[int, CodedShape | None], _Cut] = {}

    def write(self, keys: mx.array, values: mx.array, slots: mx.array, slabs: Slabs, after: mx.array) -> mx.array:
        """Put keys and values [tokens, kv_heads, size] into pages, in place, where `token_slots` say;
        what goes to page -1 is not written. Gives a token for `after` of whoever reads or writes next."""
        self._check(keys.dtype, values.dtype, slabs.dtype)
        return self._in_place("write", [keys, values, slots, after], slabs, keys.shape[0])

    def copy(self, copies: mx.array, slabs: Slabs, after: mx.array) -> mx.array:
        """Copy beginnings of pages, as `page_copies` say. No page may be written and read in one call; page -1 is not
        copied. Gives a token, like `write`."""
        self._check(slabs.dtype)
        return self._in_place("copy", [copies, after], slabs, copies.shape[0])

    def attend(
        self, queries: mx.array, rows: Rows, slabs: Slabs, after: mx.array, coded: CodedPages | None = None
    ) -> mx.array:
        """What queries [tokens, heads, key_size], in contiguous memory, see in their rows' pages: [tokens, heads,
        value_size]. Numbers of pages below 0 are those of `coded` ones, -1 that of the first.

        A query's bits depend on its own row alone, not on the others nor on how many queries it is beside.
        """
        self._check(queries.dtype, slabs.dtype)
        if rows.most > MOST_QUERIES:
            return self._attend_prompts(queries, rows, slabs, after)
        shape, tokens = self._shape, queries.shape[0]
        cut = self._cuts.get((rows.most, coded and coded.shape)) or self._cut(rows.most, coded and coded.shape)
        taken, chunks = self._tuning.taken(len(slabs.keys)), -(-rows.most * shape.group // cut.part)
        stretches = rows.stretches(self.stretch, self._window)
        attended = Output((tokens, shape.heads, shape.value_size), self._dtype)
        partial = Output((tokens, shape.heads, stretches, shape.value_size + 4), mx.float32)
        sole = stretches == 1
        # What it does not write is small, but of the same type: with another it would be another kernel.
        given = (partial._replace(shape=(1,)), attended) if sole else (partial, attended._replace(shape=(1,)))
        found = self._run(
            paged_kernel(cut.kernel, taken),
            [
                *(queries, self._numbers, rows.table, rows.rows, after, *(coded[1:] if coded else ())),
                *slabs.found(taken, self._run),
            ],
            Work(
                template=cut.attend,
                groups=(stretches * chunks, shape.kv_heads, len(rows.spans)),
                threads=self._tuning.warps * 32,
                outputs=given,
            ),
        )
        return found[1] if sole else self._merged(found[0], rows, cut, attended)

    def bound(self, rows: Rows) -> Bound:
        return Bound(room_of(len(rows.spans)), rows.most, rows.stretches(self.stretch, self._window))

    def standing_for(self, bound: Bound, table: mx.array, rows: mx.array) -> Rows:
        """Any rows that are bound so."""
        spans, stretches = ((0, 0),) * bound.rows, {(self.stretch, self._window): bound.stretches}
        return Rows(table, rows, spans, bound.most, _stretches=stretches)

    def by(self, run: Launcher) -> PagedAttention:
        """The same, launched otherwise."""
        other = copy(self)
        other._run = run
        return other

    def _merged(self, partial: mx.array, rows: Rows, cut: _Cut, attended: Output) -> mx.array:
        groups = (1, self._shape.heads, len(rows.spans) * rows.most)
        work = Work(template=cut.merge, groups=groups, threads=_THREADS, outputs=(attended,))
        return self._run(paged_kernel("merge"), [partial, self._numbers, rows.rows], work)[0]

    @property
    def takes_prompts(self) -> bool:
        """Whether a row may have more than `MOST_QUERIES`."""
        return bool(self._tuning.prompts) and self._dtype.size == 2

    def _attend_prompts(self, queries: mx.array, rows: Rows, slabs: Slabs, after: mx.array) -> mx.array:
        if not self.takes_prompts:
            raise ValueError(f"{rows.most} queries in a row: at most {MOST_QUERIES}")
        shape, warps, taken = self._shape, self._tuning.prompts, self._tuning.taken(len(slabs.keys))
        block = 32 if max(shape.key_size, shape.value_size) <= 128 else 16
        seen = (("BLOCK", block), ("WINDOW", self._window), ("GROUP", shape.group), ("WARPS", warps))
        [attended] = self._run(
            paged_kernel("attend_prompt", taken),
            [queries, self._numbers, rows.table, rows.rows, after, *slabs.found(taken, self._run)],
            Work(
                template=(*self._pages, *seen, ("CAPPED", self._capped), ("SINKS", self._sinks)),
                groups=(-(-rows.most * shape.group // (warps * 16)), shape.kv_heads, len(rows.spans)),
                threads=warps * 32,
                outputs=(Output((queries.shape[0], shape.heads, shape.value_size), self._dtype),),
            ),
        )
        return attended

    @property
    def widths(self) -> list[int]:
        """For each kernel that it attends with, the most queries of a row that this one is for, or more than any."""
        few = sorted({self._part(width): width for width in WIDTHS}.values())
        return [*few, *([3 * MOST_QUERIES] if self.takes_prompts else [])]

    def _part(self, width: int) -> tuple[int, int]:
        return self._tuning.part(width * self._shape.group, self._dtype, self._size)

    @property
    def shape(self) -> Shape:
        return self._shape

    @property
    def dtype(self) -> mx.Dtype:
        return self._dtype

    def coded_widths(self, coded: CodedShape) -> list[int]:
        """Like `widths`, of the kernels that read such pages."""
        return sorted({self._cut(width, coded).attend: width for width in WIDTHS}.values())

    def reads(self, coded: CodedShape) -> bool:
        """Whether there is a kernel for pages in fewer bits; whether it is right, `check_coded` says."""
        cut = self._tuning
        if cut.matrix is None or self._dtype.size != 2 or cut.slabs or self._window:
            return False
        return coded.unsupported(self._shape) is None

    def store(self, pages: mx.array, numbers: mx.array, addresses: mx.array, after: mx.array) -> mx.array:
        """Put pages in fewer bits, int32 [pages, kv_heads, words], into slabs that are found by their addresses, where
        the numbers say. Gives a token, like `write`."""
        words = pages.shape[2]
        [done] = self._run(
            paged_kernel("store"),
            [pages, numbers, after, addresses],
            Work(
                template=(("KV_HEADS", self._shape.kv_heads), ("WORDS", words), ("THREADS", _THREADS)),
                groups=(pages.shape[0], self._shape.kv_heads, 1),
                threads=_THREADS,
                outputs=(Output((1,), mx.int32),),
            ),
        )
        return done

    def locate(self, slabs: Sequence[mx.array]) -> mx.array:
        """Where slabs of pages in fewer bits lie."""
        work = Work((("T", mx.int32),), (1, 1, 1), 32, (Output((4,), mx.int32),))
        found = [self._run(paged_kernel("locate"), [slab, slab], work)[0][:2] for slab in slabs]
        return mx.concatenate([*found, *[mx.zeros(2, mx.int32)] * max(0, 4 - len(found))])

    def _cut(self, count: int, coded: CodedShape | None = None) -> _Cut:
        if count > MOST_QUERIES:
            raise ValueError(f"{count} queries in a row: at most {MOST_QUERIES}")
        width, tuning = next(width for width in WIDTHS if width >= count), self._tuning
        part, unroll = self._part(width)
        part = part if coded is None else CODED_PART
        seen = (("STRETCH", self.stretch), ("WINDOW", self._window), ("GROUP", self._shape.group))
        matrix = tuning.matrix if self._dtype.size == 2 else None
        cut = (("UNROLL", unroll), ("RUN", tuning.run)) if matrix is None else self._pieces(matrix, part)
        ends = ("CAPPED", self._capped), ("SINKS", self._sinks), ("PART", part), ("WARPS", tuning.warps)
        attend = (*self._pages, *seen, *ends, *cut)
        if coded is not None and matrix is not None:
            halves = 1 if width * self._shape.group <= CODED_PART // 2 else 2
            attend = (*attend, *coded.template, ("AT_ONCE", matrix.coded), ("HALVES", halves))
        merge = (*self._values, *seen, ("SINKS", self._sinks), ("THREADS", _THREADS))
        name = "attend" if matrix is None else "attend_wide" if coded is None else "attend_coded"
        made = self._cuts[count, coded] = _Cut(name, part, attend, merge)
        return made

    def _pieces(self, matrix: Matrix, part: int) -> Template:
        return ("KEYS", matrix.keys(self._size)), ("SLOTS", matrix.slots_for(self._size, part, self.stretch))

    def _in_place(self, kernel: str, given: list[mx.array], slabs: Slabs, count: int) -> mx.array:
        taken = self._tuning.taken(len(slabs.keys))
        [done] = self._run(
            paged_kernel(kernel, taken),
            [*given, *slabs.found(taken, self._run)],
            Work(
                template=(*self._pages, ("THREADS", _THREADS)),
                groups=(count, self._shape.kv_heads, 1),
                threads=_THREADS,
                outputs=(Output((1,), mx.int32),),
            ),
        )
        return done

    def addresses(self, slabs: Slabs) -> mx.array:
        """Where kernels find them, if they do so by address."""
        return slabs.addresses(self._run)

    @property
    def most_slabs(self) -> int | None:
        """How many there may be; None: any number."""
        return self._tuning.slabs[-1] if self._tuning.slabs else None

    def _check(self, *dtypes: mx.Dtype) -> None:
        for dtype in dtypes:
            if dtype != self._dtype:
                raise ValueError(f"{dtype} where {self._dtype} was said")


def available(device: Device) -> bool:
    """Whether kernels run there at all; whether they are right, `selfcheck` says."""
    return launcher(device) is not None


def paged_attention(
    device: Device,
    shape: Shape,
    dtype: mx.Dtype,
    *,
    scale: float,
    cap: float | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    tuning: Tuning | None = None,
) -> PagedAttention:
    """Attention by this device's kernels, cut as is best there or as `tuning` says. Only where `available`; raises
    ValueError as `PagedAttention` does."""
    run = launcher(device)
    if run is None:
        raise ValueError(f"no kernels for {device.name}")
    tuning = tuning or TUNINGS[device.kind]
    return PagedAttention(run, tuning, shape, dtype, scale=scale, cap=cap, sinks=sinks, window=window)
