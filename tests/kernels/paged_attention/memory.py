"""Pages with random numbers in them, and attention over them in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.launcher import Launcher
from ingot.kernels.paged_attention.inputs import PAGE_LIMIT, KernelRows, KVSlabs, page_number
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape, AttentionTuning

emulated = pytest.mark.skipif(
    mx.default_device() != mx.cpu or not Emulator.available(), reason="the emulator needs a CPU and g++"
)
BOUNDS = {mx.float32: 2e-6, mx.float16: 2**-10, mx.bfloat16: 2**-7}
"""Of the largest number, by which what is rounded once may be off."""
START = mx.zeros(1, mx.int32)
VECTORS = replace(TUNINGS["cuda"], matrix=None)
"""As CUDA attends without matrix units."""


@dataclass
class Variant:
    """A layer's attention, and how it is cut."""

    shape: AttentionShape
    dtype: mx.Dtype = mx.bfloat16
    cap: float | None = None
    sinks: bool = False
    window: int | None = None
    tuning: AttentionTuning = VECTORS

    def attention(self, run: Launcher | None = None) -> PagedAttention:
        sinks = mx.array(self.sink_scores()) if self.sinks else None
        options = {"scale": self.scale, "cap": self.cap, "sinks": sinks, "window": self.window}
        return PagedAttention(run or Emulator(), self.tuning, self.shape, self.dtype, **options)  # type: ignore[arg-type]

    @property
    def scale(self) -> float:
        return 1.3 * self.shape.query_size**-0.5

    def sink_scores(self) -> np.ndarray:
        return np.linspace(-2, 3, self.shape.heads, dtype=np.float32)


class Memory:
    """Rows of given lengths in pages that lie anywhere in a few slabs. What no row holds is NaN: reading it shows."""

    def __init__(
        self,
        variant: Variant,
        lengths: Sequence[int],
        *,
        counts: Sequence[int] | None = None,
        shared: int = 0,
        seed: int = 0,
        slabs: int = 3,
    ) -> None:
        """The first `shared` pages of each row are those of the longest, as far as they have so many."""
        shape = variant.shape
        self.variant, self.lengths, self.counts = variant, list(lengths), list(counts or [1] * len(lengths))
        self._random = np.random.default_rng(seed)
        needed = [-(-length // shape.page) for length in lengths]
        each = sum(needed) // slabs + 1
        free = [page_number(int(at) // each, int(at) % each) for at in self._random.permutation(slabs * each)]
        self.tables = [[free.pop() for _ in range(count)] for count in needed]
        self.free = free
        longest = self.tables[int(np.argmax(lengths))]
        for table, length in zip(self.tables, lengths, strict=True):
            whole = min(shared, length // shape.page)
            table[:whole] = longest[:whole]
        self._sizes = (shape.key_size, shape.value_size)
        numbers = [np.full((slabs, each, shape.kv_heads, shape.page, size), np.nan, np.float32) for size in self._sizes]
        for table, length in zip(self.tables, lengths, strict=True):
            for number, page in enumerate(table):
                held = min(shape.page, length - number * shape.page)
                for kind in numbers:
                    part = kind[page // PAGE_LIMIT, page % PAGE_LIMIT, :, :held]
                    part[np.isnan(part)] = self._random.standard_normal(int(np.isnan(part).sum()), np.float32)
        self.slabs = KVSlabs(*([mx.array(slab).astype(variant.dtype) for slab in kind] for kind in numbers))
        self.queries = self.drawn(sum(self.counts), shape.heads, shape.query_size)
        mx.eval(self.slabs.keys, self.slabs.values, self.queries)

    def drawn(self, *sizes: int) -> mx.array:
        return mx.array(self._random.standard_normal(sizes, np.float32)).astype(self.variant.dtype)

    def firsts(self) -> list[int]:
        """The first page that a row's window needs."""
        window, page = self.variant.window, self.variant.shape.page
        return [
            0 if window is None else max(length - count + 1 - window, 0) // page
            for length, count in zip(self.lengths, self.counts, strict=True)
        ]

    def rows(self, *, trimmed: bool = False) -> KernelRows:
        """With `trimmed`, tables begin where windows do."""
        firsts = self.firsts() if trimmed else [0] * len(self.lengths)
        tables = [table[first:] for table, first in zip(self.tables, firsts, strict=True)]
        return KernelRows.of(tables, self.lengths, firsts=firsts, counts=self.counts)

    def expected(self) -> np.ndarray:
        """Attention in float64."""
        made, at = [], 0
        for table, length, count in zip(self.tables, self.lengths, self.counts, strict=True):
            states = [
                np.concatenate([doubles(slabs[page // PAGE_LIMIT][page % PAGE_LIMIT]) for page in table], axis=1)[
                    :, :length
                ]
                for slabs in (self.slabs.keys, self.slabs.values)
            ]
            if self.variant.shape.latent:
                states = [np.concatenate(states, axis=-1), states[0]]
            made.append(_attended(self.variant, doubles(self.queries[at : at + count]), *states))
            at += count
        return np.concatenate(made)


def _attended(variant: Variant, queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[count, heads, size] over [kv_heads, places, size]: queries are the last places."""
    shape, (count, length) = variant.shape, (queries.shape[0], keys.shape[1])
    scores = np.einsum("chd,hkd->chk", queries, np.repeat(keys, shape.group, 0)) * variant.scale
    if variant.cap is not None:
        scores = variant.cap * np.tanh(scores / variant.cap)
    limits, places = np.arange(length - count + 1, length + 1)[:, None, None], np.arange(length)
    seen = (places < limits) & (places >= limits - (variant.window or length))
    scores = np.where(seen, scores, -np.inf)
    if variant.sinks:
        extra = np.broadcast_to(variant.sink_scores()[None, :, None], (count, shape.heads, 1))
        scores = np.concatenate([scores, extra], axis=-1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., :length]
    return np.einsum("chk,hkd->chd", weights, np.repeat(values, shape.group, 0))


def doubles(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def check(memory: Memory, attended: mx.array) -> None:
    """That this is what the memory's queries see."""
    wanted = memory.expected()
    assert np.abs(doubles(attended) - wanted).max() <= BOUNDS[memory.variant.dtype] * np.abs(wanted).max()
