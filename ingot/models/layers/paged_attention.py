"""Attention by the kernels of a GPU, over the pages as they lie."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import Masks, Mixed, Parted
from ingot.cache.kv_storage import KernelStorage
from ingot.cache.pages import PAGE
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.paged.coded_check import CodedSample
from ingot.kernels.paged_attention.inputs import MOST_QUERIES
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.shapes import Shape


class KernelAttention:
    """One layer's. Masks that do not say what they show are not its own, nor are prompts that no kernel is for."""

    def __init__(
        self,
        kernels: CheckedKernels,
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        cap: float | None,
        sinks: mx.array | None,
    ) -> None:
        self._kernels, self._heads, self._kv_heads = kernels, heads, kv_heads
        self._scale, self._cap, self._sinks = scale, cap, sinks
        self._made: dict[tuple[int | None, mx.Dtype], PagedAttention | None] = {}

    def __call__(
        self, queries: mx.array, masks: Parted | None, state: AppendState, mixed: Mixed
    ) -> dict[int, mx.array] | mx.array:
        """What the queries [tokens, heads, size] of those launches attend to that are the kernels': by the launch's
        number, [rows, heads, width, size]; or [tokens, heads, size] where one call is all of them. Rows that decode and
        rows that verify, whatever their widths, are one call; prompts are another.
        """
        storage = state.storage
        if not isinstance(storage, KernelStorage) or not isinstance(masks, Masks | None):
            return {}
        kernel = self._of(storage, state.window if masks is None else masks.window, queries.dtype)
        if kernel is None:
            return {}
        found: dict[int, mx.array] = {}
        for numbers in _calls(mixed):
            if mixed.parts[numbers[0]].width <= MOST_QUERIES or kernel.takes_prompts:
                rows = state.kernel_rows(storage, mixed, numbers)
                if not storage.reads(rows):
                    continue
                attended = storage.attend(kernel, _taken(queries, mixed, numbers), rows)
                if len(numbers) == len(mixed.parts):
                    return attended
                found |= _parted(attended, mixed, numbers)
        return found

    @property
    def gathers(self) -> tuple[bool, bool]:
        """Whether pages have to be gathered for launches of few tokens a row, and of more: as it was probed."""
        kernels = self._made.values()
        few = not kernels or None in kernels
        return few, few or not all(kernel is not None and kernel.takes_prompts for kernel in kernels)

    def check_coded(self, sample: CodedSample) -> None:
        """Compare what its tokens that see all places read of pages like these: of what it was probed with."""
        for (window, _), kernel in self._made.items():
            if window is None and kernel is not None:
                self._kernels.check_coded(kernel, sample, scale=self._scale, cap=self._cap)

    def _of(self, storage: KernelStorage, window: int | None, dtype: mx.Dtype) -> PagedAttention | None:
        if (window, dtype) not in self._made:
            shape = Shape(self._heads, self._kv_heads, *storage.sizes, PAGE)
            self._made[window, dtype] = self._kernels.attention(
                shape, dtype, scale=self._scale, cap=self._cap, sinks=self._sinks, window=window
            )
        return self._made[window, dtype]


def _calls(mixed: Mixed) -> Sequence[tuple[int, ...]]:
    """The launches whose rows have few tokens each, and the others: found once for all layers."""
    if "calls" not in mixed.memo:
        wide = [part.width > MOST_QUERIES for part in mixed.parts]
        each = (tuple(number for number, is_wide in enumerate(wide) if is_wide is many) for many in (False, True))
        mixed.memo["calls"] = tuple(numbers for numbers in each if numbers)
    calls: Sequence[tuple[int, ...]] = mixed.memo["calls"]
    return calls


def _taken(queries: mx.array, mixed: Mixed, numbers: Sequence[int]) -> mx.array:
    """The tokens of some launches, one behind another."""
    if len(numbers) == len(mixed.parts):
        return queries
    begins, ends = zip(*(mixed.bounds[number] for number in numbers), strict=True)
    if begins[1:] == ends[:-1]:
        return mx.contiguous(queries[begins[0] : ends[-1]])
    return mx.concatenate([queries[begin:end] for begin, end in zip(begins, ends, strict=True)])


def _parted(attended: mx.array, mixed: Mixed, numbers: Sequence[int]) -> dict[int, mx.array]:
    """What tokens [tokens, heads, size] of some launches attend to, launch by launch."""
    found, begin = {}, 0
    for number in numbers:
        part = mixed.parts[number]
        own = attended if part.tokens == attended.shape[0] else attended[begin : begin + part.tokens]
        rows = own[:, None] if part.width == 1 else own.reshape(part.count, part.width, *own.shape[1:])
        found[number] = rows.swapaxes(1, 2)
        begin += part.tokens
    return found
