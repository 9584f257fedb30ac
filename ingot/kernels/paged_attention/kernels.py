"""Attention over pages of keys and values, for a few queries a row, or a prompt's: one kernel source for CUDA and
Metal. How pages lie in memory, and what orders reading and writing them, `inputs.py` says.

A row is cut into KV splits (`KVSplits`), one group of threads for each and for up to eight queries that share a KV head
(up to 64 with matrix units, in tiles of sixteen). `merge` adds the splits in their order. So the bits of a query depend
on its row alone: neither on the batch nor on how many queries there are. Prompts in 16 bits on CUDA use
`attend_prompt`, whose blocks begin at the same positions however the prompt is cut; outside of graphs, it cuts rows
into KV splits if there are few queries. MLX's own attention is faster for heads of up to 128 once it has met a length,
but takes 50 to 70 ms for every new length, and every turn of a conversation is one (`bench.prompts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.gpu.kernel_source import KernelTemplate, LaunchConfig, OutputSpec
from ingot.kernels.gpu.launcher import Launched, Launcher, kernel_launcher, required_launcher
from ingot.kernels.paged_attention.inputs import (
    MOST_QUERIES,
    WIDTHS,
    KernelRows,
    KVSlabs,
    RowBounds,
    padded_count,
    paged_kernel,
)
from ingot.kernels.paged_attention.shapes import (
    QUERY_TILES,
    TUNINGS,
    AttentionShape,
    AttentionTuning,
    CodedPages,
    CodedShape,
    KVSplits,
    MatrixTuning,
)

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
CODED_PART = 16
"""Queries that a group of threads attends for where pages are in fewer bits: a tile of them."""
LARGE_WARPS = 8
"""Of a group of `attend_large`."""
PROMPT_GROUPS = 264
"""Groups of threads that a prompt launch is filled up to by KV splits: two for each multiprocessor of a large GPU."""
LEAST_PROMPT_SPLIT = 512
"""Tokens of a KV split of a prompt launch, at least."""
_THREADS = 128
"""In a group that writes, copies or merges."""


class _AttentionCut(NamedTuple):
    """How a launch is cut into groups of threads."""

    kernel: str
    part: int  # queries that share a head of keys and values, in a group of threads
    warps: int
    attend: KernelTemplate
    merge: KernelTemplate
    lent: int = 0  # bytes of dynamic shared memory


class PagedAttention(Launched):
    """One layer's attention, or that of all layers alike. Keeps nothing but what it was made with."""

    def __init__(
        self,
        run: Launcher,
        tuning: AttentionTuning,
        shape: AttentionShape,
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
        self._matrix_kernel = tuning.matrix_kernel(shape, dtype)
        self.splits = tuning.kv_splits(shape, dtype, window)
        """Of a row, each for a group of threads: what several found is merged."""
        self._window, self._capped, self._sinks = window or 0, bool(cap), sinks is not None
        log2e = math.log2(math.e)
        factors = mx.array([scale / cap, cap * log2e] if cap else [scale * log2e, 0.0], mx.float32)
        lows = mx.zeros(shape.heads) if sinks is None else sinks.astype(mx.float32) * log2e
        self._numbers = mx.concatenate([factors, lows])
        mx.eval(self._numbers)
        self._pages: KernelTemplate = (
            *(("T", dtype), ("VALUE_SIZE", shape.value_size), ("KV_HEADS", shape.kv_heads)),
            *(("KEY_SIZE", shape.key_size), ("PAGE", shape.page)),
        )
        self._cuts: dict[tuple[int, CodedShape | None], _AttentionCut] = {}
        self._prompt_cut = self._large_cut(QUERY_TILES[1], None)

    def write(self, keys: mx.array, values: mx.array, slots: mx.array, slabs: KVSlabs, after: mx.array) -> mx.array:
        """Put keys and values [tokens, kv_heads, size] into pages, in place, where `token_slots` say;
        what goes to page -1 is not written. Gives a token for `after` of whoever reads or writes next."""
        self._check(keys.dtype, values.dtype, slabs.dtype)
        return self._in_place("write", [keys, values, slots, after], slabs, keys.shape[0])

    def copy(self, copies: mx.array, slabs: KVSlabs, after: mx.array) -> mx.array:
        """Copy beginnings of pages, as `page_copies` say. No page may be written and read in one call; page -1 is not
        copied. Gives a token, like `write`."""
        self._check(slabs.dtype)
        return self._in_place("copy", [copies, after], slabs, copies.shape[0])

    def attend(
        self, queries: mx.array, rows: KernelRows, slabs: KVSlabs, after: mx.array, coded: CodedPages | None = None
    ) -> mx.array:
        """What queries [tokens, heads, query_size], in contiguous memory, see in their rows' pages: [tokens, heads,
        output_size]. Numbers of pages below 0 are those of `coded` ones, -1 that of the first.

        A query's bits depend on its own row alone, not on the others nor on how many queries it is beside.
        """
        self._check(queries.dtype, slabs.dtype)
        if rows.most > MOST_QUERIES:
            return self._attend_prompts(queries, rows, slabs, after, coded)
        shape, tokens = self._shape, queries.shape[0]
        cut = self._cuts.get((rows.most, coded and coded.shape)) or self._cut(rows.most, coded and coded.shape)
        taken, chunks = self._tuning.taken(len(slabs.keys)), -(-rows.most * shape.group // cut.part)
        splits = rows.splits(self.splits, self._window)
        attended = OutputSpec((tokens, shape.heads, shape.output_size), self._dtype)
        partial = OutputSpec((tokens, shape.heads, splits, shape.output_size + 4), mx.float32)
        sole = splits == 1
        # What it does not write is small, but of the same type: with another it would be another kernel.
        given = (partial._replace(shape=(1,)), attended) if sole else (partial, attended._replace(shape=(1,)))
        found = self._run(
            paged_kernel(cut.kernel, taken),
            [
                *(queries, self._numbers, rows.table, rows.rows, after, *(coded[1:] if coded else ())),
                *slabs.found(taken, self._run),
            ],
            LaunchConfig(
                template=cut.attend,
                groups=(splits * chunks, shape.kv_heads, len(rows.spans)),
                threads=cut.warps * 32,
                outputs=given,
                lent=cut.lent,
            ),
        )
        return found[1] if sole else self._merged(found[0], rows, cut.merge, attended)

    def bound(self, rows: KernelRows) -> RowBounds:
        return RowBounds(padded_count(len(rows.spans)), rows.most, rows.splits(self.splits, self._window))

    def standing_for(self, bound: RowBounds, table: mx.array, rows: mx.array) -> KernelRows:
        """Any rows that are bound so."""
        spans, splits = ((0, 0),) * bound.rows, {(self.splits, self._window): bound.splits}
        return KernelRows(table, rows, spans, bound.most, _kv_splits=splits)

    def _merged(self, partial: mx.array, rows: KernelRows, merge: KernelTemplate, attended: OutputSpec) -> mx.array:
        groups = (1, self._shape.heads, len(rows.spans) * rows.most)
        work = LaunchConfig(template=merge, groups=groups, threads=_THREADS, outputs=(attended,))
        return self._run(paged_kernel("merge"), [partial, self._numbers, rows.rows], work)[0]

    @property
    def takes_prompts(self) -> bool:
        """Whether a row may have more than `MOST_QUERIES`."""
        if not self._tuning.prompts or self._dtype.size != 2:
            return False
        return self._matrix_kernel == "attend_large" or not self._shape.large

    def _attend_prompts(
        self, queries: mx.array, rows: KernelRows, slabs: KVSlabs, after: mx.array, coded: CodedPages | None
    ) -> mx.array:
        if not self.takes_prompts:
            raise ValueError(f"{rows.most} queries in a row: at most {MOST_QUERIES}")
        if self._matrix_kernel == "attend_large":
            return self._attend_large_prompts(queries, rows, slabs, after)
        if coded is None:
            return self._attend_many("attend_prompt", queries, rows, slabs, after)
        unpacked = rows.unpacked(self._shape, self._dtype)
        after = unpacked.fill(self._run, self._pages, coded, after)
        attended = self._attend_many("attend_unpacked", queries, rows, slabs, after, unpacked.arrays)
        unpacked.free_after(attended)
        return attended

    def _attend_large_prompts(self, queries: mx.array, rows: KernelRows, slabs: KVSlabs, after: mx.array) -> mx.array:
        shape, cut, taken = self._shape, self._prompt_cut, self._tuning.taken(len(slabs.keys))
        outputs = (
            OutputSpec((1,), mx.float32),
            OutputSpec((queries.shape[0], shape.heads, shape.output_size), self._dtype),
        )
        _, attended = self._run(
            paged_kernel(cut.kernel, taken),
            [queries, self._numbers, rows.table, rows.rows, after, *slabs.found(taken, self._run)],
            LaunchConfig(
                template=cut.attend,
                groups=(-(-rows.most * shape.group // cut.part), shape.kv_heads, len(rows.spans)),
                threads=cut.warps * 32,
                outputs=outputs,
                lent=cut.lent,
            ),
        )
        return attended

    def _attend_many(
        self,
        kernel: str,
        queries: mx.array,
        rows: KernelRows,
        slabs: KVSlabs,
        after: mx.array,
        unpacked: Sequence[mx.array] = (),
    ) -> mx.array:
        shape, warps, taken = self._shape, self._tuning.prompts, self._tuning.taken(len(slabs.keys))
        block = 32 if max(shape.key_size, shape.value_size) <= 128 else 16
        seen = (("BLOCK", block), ("WINDOW", self._window), ("GROUP", shape.group), ("WARPS", warps))
        groups = (-(-rows.most * shape.group // (warps * 16)), shape.kv_heads, len(rows.spans))
        splits = self._prompt_splits(rows, math.prod(groups))
        attended = OutputSpec((queries.shape[0], shape.heads, shape.value_size), self._dtype)
        partial = OutputSpec((queries.shape[0], shape.heads, splits, shape.value_size + 4), mx.float32)
        sole = splits == 1
        found = self._run(
            paged_kernel(kernel, taken),
            [queries, self._numbers, rows.table, rows.rows, after, *unpacked, *slabs.found(taken, self._run)],
            LaunchConfig(
                template=(*self._pages, *seen, ("CAPPED", self._capped), ("SINKS", self._sinks)),
                groups=(groups[0] * splits, *groups[1:]),
                threads=warps * 32,
                outputs=(partial._replace(shape=(1,)), attended) if sole else (partial, attended._replace(shape=(1,))),
            ),
        )
        if sole:
            return found[1]
        all_splits = (*KVSplits(0, False).template, ("WINDOW", 0), ("GROUP", shape.group))
        merge = (*self._merging, *all_splits, ("SINKS", self._sinks), ("THREADS", _THREADS))
        return self._merged(found[0], rows, merge, attended)

    def _prompt_splits(self, rows: KernelRows, groups: int) -> int:
        """The splits that each row of a prompt launch of so many groups of threads is cut into, so that a short turn of
        a long conversation keeps the device busy. Rows of captured graphs, whose lengths are not known, have one: where
        graphs compute prompts, a query's bits must not depend on the launch."""
        longest = max(length for length, _ in rows.spans)
        return 1 if self._window else max(1, min(PROMPT_GROUPS // groups, longest // LEAST_PROMPT_SPLIT))

    @property
    def widths(self) -> list[int]:
        """For each kernel that it attends with, the most queries of a row that this one is for, or more than any."""
        few = sorted({self._part(width): width for width in WIDTHS}.values())
        return [*few, *([3 * MOST_QUERIES] if self.takes_prompts else [])]

    def _part(self, width: int) -> tuple[int, int]:
        return self._tuning.part(width * self._shape.group, self._shape, self._dtype)

    @property
    def shape(self) -> AttentionShape:
        return self._shape

    @property
    def dtype(self) -> mx.Dtype:
        return self._dtype

    @property
    def tuning(self) -> AttentionTuning:
        return self._tuning

    def coded_widths(self, coded: CodedShape) -> list[int]:
        """Like `widths`, of the kernels that read such pages."""
        return sorted({self._cut(width, coded).attend: width for width in WIDTHS}.values())

    def reads(self, coded: CodedShape) -> bool:
        """Whether there is a kernel for pages in fewer bits; whether it is right, `check_coded` says."""
        cut = self._tuning
        if cut.matrix is None or self._dtype.size != 2 or cut.slabs or self._window:
            return False
        return coded.unsupported(self._shape) is None

    def unpacks(self, coded: CodedShape) -> bool:
        """The same for more than `MOST_QUERIES` of a row."""
        return self.takes_prompts and self.reads(coded)

    def store(self, pages: mx.array, numbers: mx.array, addresses: mx.array, after: mx.array) -> mx.array:
        """Put pages in fewer bits, int32 [pages, kv_heads, words], into slabs that are found by their addresses, where
        the numbers say. Gives a token, like `write`."""
        words = pages.shape[2]
        [done] = self._run(
            paged_kernel("store"),
            [pages, numbers, after, addresses],
            LaunchConfig(
                template=(("KV_HEADS", self._shape.kv_heads), ("WORDS", words), ("THREADS", _THREADS)),
                groups=(pages.shape[0], self._shape.kv_heads, 1),
                threads=_THREADS,
                outputs=(OutputSpec((1,), mx.int32),),
            ),
        )
        return done

    def locate(self, slabs: Sequence[mx.array]) -> mx.array:
        """Where slabs of pages in fewer bits lie."""
        work = LaunchConfig((("T", mx.int32),), (1, 1, 1), 32, (OutputSpec((4,), mx.int32),))
        found = [self._run(paged_kernel("locate"), [slab, slab], work)[0][:2] for slab in slabs]
        return mx.concatenate([*found, *[mx.zeros(2, mx.int32)] * max(0, 4 - len(found))])

    def _cut(self, count: int, coded: CodedShape | None = None) -> _AttentionCut:
        if count > MOST_QUERIES:
            raise ValueError(f"{count} queries in a row: at most {MOST_QUERIES}")
        width, tuning = next(width for width in WIDTHS if width >= count), self._tuning
        part, unroll = self._part(width)
        part = part if coded is None else CODED_PART
        seen = (*self.splits.template, ("WINDOW", self._window), ("GROUP", self._shape.group))
        merge = (*self._merging, *seen, ("SINKS", self._sinks), ("THREADS", _THREADS))
        if self._matrix_kernel == "attend_large":
            cut = self._large_cut(part, self.splits)._replace(merge=merge)
        else:
            matrix = None if self._matrix_kernel is None else tuning.matrix
            pieces = (
                (("UNROLL", unroll), ("RUN", tuning.run), ("LATENT", self._shape.latent))
                if matrix is None
                else self._pieces(matrix, part)
            )
            ends = ("CAPPED", self._capped), ("SINKS", self._sinks), ("PART", part), ("WARPS", tuning.warps)
            attend = (*self._pages, *seen, *ends, *pieces)
            if coded is not None and matrix is not None:
                halves = 1 if width * self._shape.group <= CODED_PART // 2 else 2
                attend = (*attend, *coded.template, ("AT_ONCE", matrix.coded), ("HALVES", halves))
            name = "attend" if matrix is None else "attend_wide" if coded is None else "attend_coded"
            cut = _AttentionCut(name, part, tuning.warps, attend, merge)
        self._cuts[count, coded] = cut
        return cut

    def _large_cut(self, part: int, splits: KVSplits | None) -> _AttentionCut:
        """For `attend_large`; without splits, a group goes through all that its queries see."""
        slots, lent = MatrixTuning.large_slots(self._shape, part)
        cut = KVSplits(0, False) if splits is None else splits
        seen = (*cut.template, ("WINDOW", self._window), ("GROUP", self._shape.group))
        ends = ("CAPPED", self._capped), ("SINKS", self._sinks), ("PART", part), ("WARPS", LARGE_WARPS)
        attend = (*self._pages, *seen, *ends, ("LATENT", self._shape.latent), ("SLOTS", slots))
        return _AttentionCut("attend_large", part, LARGE_WARPS, attend, (), lent)

    @property
    def _merging(self) -> KernelTemplate:
        shape = self._shape
        return ("T", self._dtype), ("VALUE_SIZE", shape.output_size), ("KV_HEADS", shape.kv_heads)

    def _pieces(self, matrix: MatrixTuning, part: int) -> KernelTemplate:
        size = max(self._shape.key_size, self._shape.value_size)
        return ("KEYS", matrix.keys(size)), ("SLOTS", matrix.slots_for(size, part, self.splits.most))

    def _in_place(self, kernel: str, given: list[mx.array], slabs: KVSlabs, count: int) -> mx.array:
        taken = self._tuning.taken(len(slabs.keys))
        [done] = self._run(
            paged_kernel(kernel, taken),
            [*given, *slabs.found(taken, self._run)],
            LaunchConfig(
                template=(*self._pages, ("THREADS", _THREADS)),
                groups=(count, self._shape.kv_heads, 1),
                threads=_THREADS,
                outputs=(OutputSpec((1,), mx.int32),),
            ),
        )
        return done

    def addresses(self, slabs: KVSlabs) -> mx.array:
        """Where kernels find them, if they do so by address."""
        return slabs.addresses(self._run)

    def found(self, slabs: KVSlabs) -> list[mx.array]:
        """What kernels find them by: their addresses, or themselves."""
        return slabs.found(len(slabs.keys) if self._tuning.slabs else 0, self._run)

    @property
    def most_slabs(self) -> int | None:
        """How many there may be; None: any number."""
        return self._tuning.slabs[-1] if self._tuning.slabs else None

    def _check(self, *dtypes: mx.Dtype) -> None:
        for dtype in dtypes:
            if dtype != self._dtype:
                raise ValueError(f"{dtype} where {self._dtype} was said")


def has_paged_kernels(device: Device) -> bool:
    """Whether kernels run there at all; whether they are right, `selfcheck` says."""
    return kernel_launcher(device) is not None


def paged_attention(
    device: Device,
    shape: AttentionShape,
    dtype: mx.Dtype,
    *,
    scale: float,
    cap: float | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    tuning: AttentionTuning | None = None,
) -> PagedAttention:
    """Attention by this device's kernels, cut as is best there or as `tuning` says. Only where `has_paged_kernels`;
    raises ValueError as `PagedAttention` does."""
    tuning = tuning or TUNINGS[device.kind]
    return PagedAttention(
        required_launcher(device), tuning, shape, dtype, scale=scale, cap=cap, sinks=sinks, window=window
    )
