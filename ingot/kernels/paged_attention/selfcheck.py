"""Each kernel against plain MLX operations, on the device at hand: what differs must not be used."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gpu.launchers import Launcher, prepare
from ingot.kernels.paged.slabs import PAGE_LIMIT, Slabs, page_number
from ingot.kernels.paged.tuning import TUNINGS, Tuning
from ingot.kernels.paged_attention.inputs import Rows, page_copies, token_slots
from ingot.kernels.paged_attention.kernels import PagedAttention, available, paged_attention
from ingot.kernels.paged_attention.shapes import Shape

BOUNDS = {mx.float32: 1e-4, mx.float16: 2**-9, mx.bfloat16: 2**-6}
"""Of the largest number, by which an output may be off. It is rounded once, and its weights are those of float32."""
_BEYOND_A_STRETCH = (1, 65)
"""Places, so few that any window reaches over its end."""


def slab_counts(device: Device) -> tuple[int, ...]:
    """So many slabs show all kernels of a device."""
    return TUNINGS[device.kind].slabs or (3,)


def selfcheck(
    device: Device,
    shape: Shape,
    dtype: mx.Dtype,
    *,
    scale: float,
    cap: float | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    slabs: int = 2,
    tuning: Tuning | None = None,
) -> str | None:
    """What is wrong with the kernels for such layers on this device, over so many slabs; None where they are right.
    Compiles them all, so that none is compiled while somebody waits for an answer."""
    if not available(device):
        return f"no kernels for {device.name}"

    def rehearse(run: Launcher) -> None:
        cut = tuning or TUNINGS[device.kind]
        rehearsed = PagedAttention(run, cut, shape, dtype, scale=scale, cap=cap, sinks=sinks, window=window)
        _Trial(rehearsed, shape, dtype, slabs).launch_each()

    try:
        prepare(device, rehearse)
        attention = paged_attention(
            device, shape, dtype, scale=scale, cap=cap, sinks=sinks, window=window, tuning=tuning
        )
        trial = _Trial(attention, shape, dtype, slabs)
        attended = (trial.attending(width, scale, cap, sinks, window) for width in attention.widths)
        return trial.writing() or trial.copying() or next((wrong for wrong in attended if wrong is not None), None)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"


class _Trial:
    """Rows of awkward lengths in pages that lie anywhere."""

    def __init__(self, attention: PagedAttention, shape: Shape, dtype: mx.Dtype, slabs: int) -> None:
        self._attention, self._shape, self._dtype = attention, shape, dtype
        self._random = np.random.default_rng(7)
        longer = [attention.stretch + beyond for beyond in _BEYOND_A_STRETCH]
        self._lengths = [8, shape.page, shape.page + 9, *longer]
        needed = [-(-length // shape.page) for length in self._lengths]
        each = (sum(needed) + 1) // slabs + 1
        free = [page_number(int(at) // each, int(at) % each) for at in self._random.permutation(each * slabs)]
        self._tables = [[free.pop() for _ in range(count)] for count in needed]
        self._spare = free.pop()
        self._slabs = Slabs(
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
        return None if all(map(_same, (*self._slabs.keys, *self._slabs.values), wanted)) else "write differs"

    def copying(self) -> str | None:
        source, places = self._tables[-1][0], self._shape.page - 3
        self._copy(source, places)
        mx.eval(self._token)
        for slabs in (self._slabs.keys, self._slabs.values):
            copied, rest = self._page(slabs, self._spare)[:, :places], self._page(slabs, self._spare)[:, places:]
            if not _same(copied, self._page(slabs, source)[:, :places]) or mx.any(rest != 0).item():
                return "copy differs"
        return None

    def attending(
        self, width: int, scale: float, cap: float | None, sinks: mx.array | None, window: int | None
    ) -> str | None:
        """All rows at once, and those that are no longer than a stretch, which are not merged."""
        rows = (len(self._lengths), len(self._lengths) - len(_BEYOND_A_STRETCH))
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
            wanted = plain(queries[mine], keys, values, scale=scale, cap=cap, sinks=sinks, window=window)
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
        laid = Rows.of(tables, lengths, counts=counts)
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


def plain(
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


def _same(one: mx.array, other: mx.array) -> bool:
    return bool(mx.array_equal(one, other).item())
