"""Each kernel over pages against plain MLX operations, on the device at hand: attention, attention over pages in fewer
bits against what they are decoded to, and rope. What differs must not be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gpu.launcher import Launcher, compile_kernels
from ingot.kernels.paged_attention.inputs import (
    MOST_QUERIES,
    PAGE_LIMIT,
    KernelRows,
    KVSlabs,
    page_copies,
    page_number,
    token_slots,
)
from ingot.kernels.paged_attention.kernels import PagedAttention, has_paged_kernels, paged_attention
from ingot.kernels.paged_attention.rope import HeadRmsNorm, RopeKernel, RopeShape, rope_angles, rope_kernel
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape, AttentionTuning, CodedPages, CodedShape

BOUNDS = {mx.float32: 1e-4, mx.float16: 2**-9, mx.bfloat16: 2**-6}
"""Of the largest number, by which an output may be off. It is rounded once, and its weights are those of float32."""
_BEYOND_A_SPLIT = (1, 65)
"""Places, so few that any window reaches over its end."""


def slab_counts(device: Device) -> tuple[int, ...]:
    """So many slabs show all kernels of a device."""
    return TUNINGS[device.kind].slabs or (3,)


def check_paged_attention(
    device: Device,
    shape: AttentionShape,
    dtype: mx.Dtype,
    *,
    scale: float,
    cap: float | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    slabs: int = 2,
    tuning: AttentionTuning | None = None,
) -> str | None:
    """What is wrong with the kernels for such layers on this device, over so many slabs; None where they are right.
    Compiles them all, so that none is compiled while somebody waits for an answer."""
    if not has_paged_kernels(device):
        return f"no kernels for {device.name}"

    def rehearse(run: Launcher) -> None:
        cut = tuning or TUNINGS[device.kind]
        rehearsed = PagedAttention(run, cut, shape, dtype, scale=scale, cap=cap, sinks=sinks, window=window)
        _AttentionTrial(rehearsed, shape, dtype, slabs).launch_each()

    try:
        compile_kernels(device, rehearse)
        attention = paged_attention(
            device, shape, dtype, scale=scale, cap=cap, sinks=sinks, window=window, tuning=tuning
        )
        trial = _AttentionTrial(attention, shape, dtype, slabs)
        attended = (trial.attending(width, scale, cap, sinks, window) for width in attention.widths)
        return trial.writing() or trial.copying() or next((wrong for wrong in attended if wrong is not None), None)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"


class _AttentionTrial:
    """Rows of awkward lengths in pages that lie anywhere."""

    def __init__(self, attention: PagedAttention, shape: AttentionShape, dtype: mx.Dtype, slabs: int) -> None:
        self._attention, self._shape, self._dtype = attention, shape, dtype
        self._random = np.random.default_rng(7)
        longer = [attention.stretch + beyond for beyond in _BEYOND_A_SPLIT]
        self._lengths = [8, shape.page, shape.page + 9, *longer]
        needed = [-(-length // shape.page) for length in self._lengths]
        each = (sum(needed) + 1) // slabs + 1
        free = [page_number(int(at) // each, int(at) % each) for at in self._random.permutation(each * slabs)]
        self._tables = [[free.pop() for _ in range(count)] for count in needed]
        self._spare = free.pop()
        self._slabs = KVSlabs(
            [self._zeros(each, shape.key_size) for _ in range(slabs)],
            [self._zeros(each, shape.value_size) for _ in range(slabs)],
        )
        tokens = sum(self._lengths)
        self._keys = [self._drawn(tokens, shape.kv_heads, size) for size in (shape.key_size, shape.value_size)]
        mx.eval(self._slabs.keys, self._slabs.values, self._keys)
        self._token = mx.zeros(1, mx.int32)
        self._slots = [
            (table[place // shape.page], place % shape.page)
            for table, length in zip(self._tables, self._lengths, strict=True)
            for place in range(length)
        ]

    def launch_each(self) -> None:
        self._write()
        self._copy(self._tables[-1][0], 1)
        for width in self._attention.widths:
            self._attend(width, len(self._lengths))

    def writing(self) -> str | None:
        self._write()
        mx.eval(self._token)
        wanted = self._expected()
        return None if all(map(_arrays_equal, (*self._slabs.keys, *self._slabs.values), wanted)) else "write differs"

    def copying(self) -> str | None:
        source, places = self._tables[-1][0], self._shape.page - 3
        self._copy(source, places)
        mx.eval(self._token)
        for slabs in (self._slabs.keys, self._slabs.values):
            copied, rest = self._page(slabs, self._spare)[:, :places], self._page(slabs, self._spare)[:, places:]
            if not _arrays_equal(copied, self._page(slabs, source)[:, :places]) or mx.any(rest != 0).item():
                return "copy differs"
        return None

    def attending(
        self, width: int, scale: float, cap: float | None, sinks: mx.array | None, window: int | None
    ) -> str | None:
        """All rows at once, and those that are no longer than a stretch, which are not merged."""
        rows = (len(self._lengths), len(self._lengths) - len(_BEYOND_A_SPLIT))
        failed = (self._attending(count, width, scale, cap, sinks, window) for count in rows)
        return next((wrong for wrong in failed if wrong is not None), None)

    def _attending(
        self, rows: int, width: int, scale: float, cap: float | None, sinks: mx.array | None, window: int | None
    ) -> str | None:
        counts, queries, attended = self._attend(width, rows)
        mx.eval(attended)
        begin = 0
        for table, length, count in zip(self._tables, self._lengths, counts, strict=False):
            keys, values = (
                mx.concatenate([self._page(slabs, page) for page in table], axis=1)[:, :length]
                for slabs in (self._slabs.keys, self._slabs.values)
            )
            mine = slice(begin, begin + count)
            begin += count
            wanted = plain_attention(queries[mine], keys, values, scale=scale, cap=cap, sinks=sinks, window=window)
            off = float(mx.abs(attended[mine] - wanted).max() / mx.abs(wanted).max())
            if not off <= BOUNDS[self._dtype]:  # nor what is not a number
                return f"attend differs by {off:.2g} for {count} queries over {length} places"
        return None

    def _write(self) -> None:
        keys, values = self._keys
        self._token = self._attention.write(keys, values, token_slots(self._slots), self._slabs, self._token)

    def _copy(self, source: int, places: int) -> None:
        copies = page_copies([(source, self._spare, places)])
        self._token = self._attention.copy(copies, self._slabs, self._token)

    def _attend(self, width: int, rows: int) -> tuple[list[int], mx.array, mx.array]:
        """How many queries each of the first so many rows has, up to `width`, those queries, and what they saw after a
        write that nobody has waited for."""
        shape, tables, lengths = self._shape, self._tables[:rows], self._lengths[:rows]
        counts = [min(width, lengths[0]), *[1, width] * rows][:rows]
        queries = self._drawn(sum(counts), shape.heads, shape.key_size)
        last = [(table[-1], (length - 1) % shape.page) for table, length in zip(tables, lengths, strict=True)]
        new = [self._drawn(rows, shape.kv_heads, size) for size in (shape.key_size, shape.value_size)]
        self._token = self._attention.write(new[0], new[1], token_slots(last), self._slabs, self._token)
        laid = KernelRows.of(tables, lengths, counts=counts)
        return counts, queries, self._attention.attend(queries, laid, self._slabs, self._token).astype(mx.float32)

    def _expected(self) -> list[mx.array]:
        """The slabs, as numpy would have written them."""
        made = [np.zeros(slab.shape, np.float32) for slab in (*self._slabs.keys, *self._slabs.values)]
        for kind, tokens in enumerate(self._keys):
            numbers = np.array(tokens.astype(mx.float32))
            for token, (page, place) in enumerate(self._slots):
                slab = made[kind * len(self._slabs.keys) + page // PAGE_LIMIT]
                slab[page % PAGE_LIMIT, :, place] = numbers[token]
        return [mx.array(slab).astype(self._dtype) for slab in made]

    def _page(self, slabs: Sequence[mx.array], page: int) -> mx.array:
        return slabs[page // PAGE_LIMIT][page % PAGE_LIMIT]

    def _drawn(self, *sizes: int) -> mx.array:
        return mx.array(self._random.standard_normal(sizes, np.float32)).astype(self._dtype)

    def _zeros(self, pages: int, size: int) -> mx.array:
        return mx.zeros((pages, self._shape.kv_heads, self._shape.page, size), self._dtype)


def plain_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    cap: float | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
) -> mx.array:
    """One row's attention by plain operations, in float32: queries [count, heads, size] are the last places of keys and
    values [kv_heads, places, size]. Products are added up one by one, as matrix products of GPUs round their inputs."""
    count, heads, _ = queries.shape
    group, length = heads // keys.shape[0], keys.shape[1]
    q, k, v = (x.astype(mx.float32) for x in (queries, mx.repeat(keys, group, 0), mx.repeat(values, group, 0)))
    scores = mx.sum(q.transpose(1, 0, 2)[:, :, None] * k[:, None], axis=-1) * scale
    scores = scores if cap is None else cap * mx.tanh(scores / cap)
    limits, places = mx.arange(length - count + 1, length + 1)[:, None], mx.arange(length)
    seen = places < limits if window is None else (places < limits) & (places >= limits - window)
    scores = mx.where(seen, scores, -mx.inf)
    if sinks is not None:
        extra = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (heads, count, 1))
        scores = mx.concatenate([scores, extra], axis=-1)
    weights = mx.softmax(scores, axis=-1)[:, :, :length]
    return mx.sum(weights[..., None] * v[:, None], axis=2).transpose(1, 0, 2)


def _arrays_equal(one: mx.array, other: mx.array) -> bool:
    return bool(mx.array_equal(one, other).item())


SAMPLED_PAGES = 10
"""Pages: one is read by itself, and the others reach over the end of a stretch."""
_RAW_TAIL = 50
"""Places behind them, which are raw: more than a row has queries."""
_PROMPT_QUERIES = 3 * MOST_QUERIES


class CodedSample(NamedTuple):
    """Pages in fewer bits, and what they are decoded to."""

    shape: CodedShape
    pages: mx.array  # int32 [SAMPLED, kv_heads, words]
    keys: mx.array  # [SAMPLED, kv_heads, page, size]
    values: mx.array

    def suits(self, attention: PagedAttention) -> bool:
        """Whether such an attention is there to read pages like these."""
        shape, (_, heads, _, size) = attention.shape, self.keys.shape
        sizes = (heads, size, self.values.shape[3], self.keys.dtype)
        return sizes == (shape.kv_heads, shape.key_size, shape.value_size, attention.dtype)


def check_coded(
    device: Device, attention: PagedAttention, sample: CodedSample, *, scale: float, cap: float | None
) -> str | None:
    """What is wrong with the kernels of an attention that reads such pages; None where they are right. Compiles them
    all."""
    return _check_coded_attention(device, attention, sample, attention.coded_widths(sample.shape), scale, cap)


def check_unpacked(
    device: Device, attention: PagedAttention, sample: CodedSample, *, scale: float, cap: float | None
) -> str | None:
    """The same of those that unpack such pages for prompts."""
    return _check_coded_attention(device, attention, sample, [_PROMPT_QUERIES], scale, cap)


def _check_coded_attention(
    device: Device,
    attention: PagedAttention,
    sample: CodedSample,
    widths: Sequence[int],
    scale: float,
    cap: float | None,
) -> str | None:
    def rehearse(run: Launcher) -> None:
        trial = _CodedTrial(attention.by(run), sample)
        for width in widths:
            trial.attend(width, 2)

    try:
        compile_kernels(device, rehearse)
        trial = _CodedTrial(attention, sample)
        failed = (trial.attending(width, rows, scale, cap) for width in widths for rows in (1, 2))
        return trial.storing() or next((wrong for wrong in failed if wrong is not None), None)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"


class _CodedTrial:
    """Two rows of coded pages with raw ones behind them: one within a stretch, one beyond it."""

    def __init__(self, attention: PagedAttention, sample: CodedSample) -> None:
        self._attention, self._sample, self._shape = attention, sample, attention.shape
        self._random = np.random.default_rng(7)
        places = self._random.permutation(SAMPLED_PAGES)
        each = -(-SAMPLED_PAGES // 2)
        self._numbers = [page_number(int(place) // each, int(place) % each) for place in places]
        self._coded = [mx.zeros((each, *sample.pages.shape[1:]), mx.int32) for _ in range(2)]
        self._wanted = mx.zeros((2 * each, *sample.pages.shape[1:]), mx.int32)
        self._wanted[mx.array(places.astype(np.int32))] = sample.pages
        shape = self._shape
        self._raw = [self._drawn(2, shape.kv_heads, shape.page, size) for size in (shape.key_size, shape.value_size)]
        self._slabs = KVSlabs([self._raw[0]], [self._raw[1]])
        mx.eval(self._coded, self._raw, self._wanted)
        addresses = attention.locate(self._coded)
        self._token = attention.store(sample.pages, mx.array(self._numbers, mx.int32), addresses, mx.zeros(1, mx.int32))
        self._pages = CodedPages(sample.shape, sample.shape.constants(shape.value_size), addresses)
        self._rows = (range(1), range(1, SAMPLED_PAGES))  # of the sample, what each row has

    def storing(self) -> str | None:
        mx.eval(self._token)
        return None if mx.array_equal(mx.concatenate(self._coded), self._wanted).item() else "store differs"

    def attend(self, width: int, rows: int) -> tuple[mx.array, mx.array]:
        """Queries of the first so many rows, `width` each, and what they see."""
        queries = self._drawn(rows * width, self._shape.heads, self._shape.key_size)
        tables = [[*(~self._numbers[page] for page in own), raw] for raw, own in enumerate(self._rows)]
        lengths = [len(own) * self._shape.page + _RAW_TAIL for own in self._rows]
        laid = KernelRows.of(tables[:rows], lengths[:rows], counts=[width] * rows, coded=True)
        return queries, self._attention.attend(queries, laid, self._slabs, self._token, self._pages)

    def attending(self, width: int, rows: int, scale: float, cap: float | None) -> str | None:
        queries, attended = self.attend(width, rows)
        for row in range(rows):
            mine = slice(row * width, (row + 1) * width)
            keys, values = (self._seen(row, side) for side in range(2))
            wanted = plain_attention(queries[mine], keys, values, scale=scale, cap=cap)
            off = float(mx.abs(attended[mine].astype(mx.float32) - wanted).max() / mx.abs(wanted).max())
            if not off <= BOUNDS[attended.dtype]:  # nor what is not a number
                return f"attend differs by {off:.2g} for {width} queries over {keys.shape[1]} places in fewer bits"
        return None

    def _seen(self, row: int, side: int) -> mx.array:
        """A row's keys, or its values, as they are decoded, and those behind them: [kv_heads, places, size]."""
        decoded = (self._sample.keys, self._sample.values)[side]
        return mx.concatenate(
            [*(decoded[page] for page in self._rows[row]), self._raw[side][row, :, :_RAW_TAIL]], axis=1
        )

    def _drawn(self, *sizes: int) -> mx.array:
        return mx.array(self._random.standard_normal(sizes, np.float32)).astype(self._attention.dtype)


TRIAL_TOKENS, TRIAL_PAGES = 11, 3


def check_rope(
    device: Device, shape: RopeShape, dtype: mx.Dtype, norms: Sequence[HeadRmsNorm], slabs: int
) -> str | None:
    """What is wrong with the kernel for such layers over so many slabs; None where it is right."""
    if not has_paged_kernels(device):
        return f"no kernels for {device.name}"
    try:
        return _rope_differs(device, shape, dtype, norms, slabs)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"


def _rope_differs(
    device: Device, shape: RopeShape, dtype: mx.Dtype, norms: Sequence[HeadRmsNorm], slabs: int
) -> str | None:
    heads, random = shape.heads, np.random.default_rng(5)
    sizes = (heads.key_size, heads.value_size)
    made = [[mx.zeros((TRIAL_PAGES, heads.kv_heads, heads.page, size), dtype) for _ in range(slabs)] for size in sizes]
    places = [(number % slabs, number % TRIAL_PAGES, (7 * number) % heads.page) for number in range(TRIAL_TOKENS)]
    slots = token_slots([*((page_number(slab, page), place) for slab, page, place in places[1:]), (-1, 0)])
    row = heads.heads * shape.query_step + heads.kv_heads * sum(sizes)
    projected = mx.array(random.standard_normal((TRIAL_TOKENS, row), np.float32)).astype(dtype)
    positions, speeds = mx.arange(TRIAL_TOKENS) * 97, 10000.0 ** (-mx.arange(shape.dims // 2) / max(1, shape.dims // 2))
    angles = rope_angles(positions, speeds, 1.25)

    def launched(turn: RopeKernel) -> tuple[mx.array, mx.array]:
        return turn(projected, angles, slots, KVSlabs(*made), mx.zeros(1, mx.int32))

    compile_kernels(device, lambda run: launched(RopeKernel(run, TUNINGS[device.kind], shape, dtype, norms)))
    turned, done = launched(rope_kernel(device, shape, dtype, norms))
    mx.eval(turned, done)
    wanted = plain_rope(shape, projected, angles, norms)
    written = [mx.stack([slot[page, :, place] for slot, page, place in _slots_in_slabs(kind, places)]) for kind in made]
    for name, one, other in zip(("queries", "keys", "values"), (turned, *written), wanted, strict=True):
        other = other if name == "queries" else other[: TRIAL_TOKENS - 1]
        off = float(mx.abs(one.astype(mx.float32) - other).max() / mx.abs(other).max())
        if not off <= BOUNDS[dtype]:
            return f"turn differs by {off:.2g} in {name}"
    return None


def _slots_in_slabs(slabs: list[mx.array], places: list[tuple[int, int, int]]) -> list[tuple[mx.array, int, int]]:
    return [(slabs[slab], page, place) for slab, page, place in places[1:]]


def plain_rope(
    shape: RopeShape, projected: mx.array, angles: mx.array, norms: Sequence[HeadRmsNorm]
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values [tokens, heads, size] by plain operations, in float32."""
    heads, tokens = shape.heads, projected.shape[0]
    ends = [heads.heads * shape.query_step, heads.heads * shape.query_step + heads.kv_heads * heads.key_size]
    queries, keys, values = mx.split(projected.astype(mx.float32), ends, axis=-1)
    queries = queries.reshape(tokens, heads.heads, -1)[:, :, : heads.key_size]
    keys, values = (part.reshape(tokens, heads.kv_heads, -1) for part in (keys, values))
    if norms:
        queries, keys = (_plain_norm(part, *norm) for part, norm in zip((queries, keys), norms, strict=True))
    if shape.dims:
        queries, keys = (_plain_rotation(part, shape, angles) for part in (queries, keys))
    return queries, keys, values


def _plain_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    normed = x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight.astype(mx.float32)


def _plain_rotation(x: mx.array, shape: RopeShape, angles: mx.array) -> mx.array:
    cosine, sine = mx.split(angles[:, None], 2, axis=-1)
    inner, rest = x[..., : shape.dims], x[..., shape.dims :]
    one, two = (inner[..., 0::2], inner[..., 1::2]) if shape.neighbours else mx.split(inner, 2, axis=-1)
    pair = [one * cosine - two * sine, one * sine + two * cosine]
    turned = mx.stack(pair, axis=-1).reshape(inner.shape) if shape.neighbours else mx.concatenate(pair, axis=-1)
    return mx.concatenate([turned, rest], axis=-1)
