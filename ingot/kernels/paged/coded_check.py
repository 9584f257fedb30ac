"""Attention over pages in fewer bits against plain MLX operations over what they are decoded to, on the device at
hand: what differs must not be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gpu.launchers import Launcher, prepare
from ingot.kernels.paged.slabs import Slabs, page_number
from ingot.kernels.paged_attention.inputs import MOST_QUERIES, Rows
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.selfcheck import BOUNDS, plain
from ingot.kernels.paged_attention.shapes import CodedPages, CodedShape

SAMPLED = 10
"""Pages: one is read by itself, and the others reach over the end of a stretch."""
_TAIL = 50
"""Places behind them, which are raw: more than a row has queries."""
_MANY = 3 * MOST_QUERIES


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
    return _check(device, attention, sample, attention.coded_widths(sample.shape), scale, cap)


def check_unpacked(
    device: Device, attention: PagedAttention, sample: CodedSample, *, scale: float, cap: float | None
) -> str | None:
    """The same of those that unpack such pages for prompts."""
    return _check(device, attention, sample, [_MANY], scale, cap)


def _check(
    device: Device,
    attention: PagedAttention,
    sample: CodedSample,
    widths: Sequence[int],
    scale: float,
    cap: float | None,
) -> str | None:
    def rehearse(run: Launcher) -> None:
        trial = _Trial(attention.by(run), sample)
        for width in widths:
            trial.attend(width, 2)

    try:
        prepare(device, rehearse)
        trial = _Trial(attention, sample)
        failed = (trial.attending(width, rows, scale, cap) for width in widths for rows in (1, 2))
        return trial.storing() or next((wrong for wrong in failed if wrong is not None), None)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"


class _Trial:
    """Two rows of coded pages with raw ones behind them: one within a stretch, one beyond it."""

    def __init__(self, attention: PagedAttention, sample: CodedSample) -> None:
        self._attention, self._sample, self._shape = attention, sample, attention.shape
        self._random = np.random.default_rng(7)
        places = self._random.permutation(SAMPLED)
        each = -(-SAMPLED // 2)
        self._numbers = [page_number(int(place) // each, int(place) % each) for place in places]
        self._coded = [mx.zeros((each, *sample.pages.shape[1:]), mx.int32) for _ in range(2)]
        self._wanted = mx.zeros((2 * each, *sample.pages.shape[1:]), mx.int32)
        self._wanted[mx.array(places.astype(np.int32))] = sample.pages
        shape = self._shape
        self._raw = [self._drawn(2, shape.kv_heads, shape.page, size) for size in (shape.key_size, shape.value_size)]
        self._slabs = Slabs([self._raw[0]], [self._raw[1]])
        mx.eval(self._coded, self._raw, self._wanted)
        addresses = attention.locate(self._coded)
        self._token = attention.store(sample.pages, mx.array(self._numbers, mx.int32), addresses, mx.zeros(1, mx.int32))
        self._pages = CodedPages(sample.shape, sample.shape.constants(shape.value_size), addresses)
        self._rows = (range(1), range(1, SAMPLED))  # of the sample, what each row has

    def storing(self) -> str | None:
        mx.eval(self._token)
        return None if mx.array_equal(mx.concatenate(self._coded), self._wanted).item() else "store differs"

    def attend(self, width: int, rows: int) -> tuple[mx.array, mx.array]:
        """Queries of the first so many rows, `width` each, and what they see."""
        queries = self._drawn(rows * width, self._shape.heads, self._shape.key_size)
        tables = [[*(~self._numbers[page] for page in own), raw] for raw, own in enumerate(self._rows)]
        lengths = [len(own) * self._shape.page + _TAIL for own in self._rows]
        laid = Rows.of(tables[:rows], lengths[:rows], counts=[width] * rows, coded=True)
        return queries, self._attention.attend(queries, laid, self._slabs, self._token, self._pages)

    def attending(self, width: int, rows: int, scale: float, cap: float | None) -> str | None:
        queries, attended = self.attend(width, rows)
        for row in range(rows):
            mine = slice(row * width, (row + 1) * width)
            keys, values = (self._seen(row, side) for side in range(2))
            wanted = plain(queries[mine], keys, values, scale=scale, cap=cap)
            off = float(mx.abs(attended[mine].astype(mx.float32) - wanted).max() / mx.abs(wanted).max())
            if not off <= BOUNDS[attended.dtype]:  # nor what is not a number
                return f"attend differs by {off:.2g} for {width} queries over {keys.shape[1]} places in fewer bits"
        return None

    def _seen(self, row: int, side: int) -> mx.array:
        """A row's keys, or its values, as they are decoded, and those behind them: [kv_heads, places, size]."""
        decoded = (self._sample.keys, self._sample.values)[side]
        return mx.concatenate([*(decoded[page] for page in self._rows[row]), self._raw[side][row, :, :_TAIL]], axis=1)

    def _drawn(self, *sizes: int) -> mx.array:
        return mx.array(self._random.standard_normal(sizes, np.float32)).astype(self._attention.dtype)
