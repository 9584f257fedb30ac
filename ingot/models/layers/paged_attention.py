"""Attention by the kernels of a GPU, over the pages as they lie."""

from __future__ import annotations

import mlx.core as mx

from ingot.cache.launch import Masks, Mixed, Parted
from ingot.cache.layers import AppendState
from ingot.cache.pages import PAGE
from ingot.cache.slabs import KernelStorage
from ingot.kernels.paged.checked import CheckedKernels
from ingot.kernels.paged.kernels import MOST_QUERIES, PagedAttention, Shape


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
    ) -> dict[int, mx.array]:
        """What the queries [tokens, heads, 1, size] of those launches attend to that are the kernels': by the launch's
        number, [rows, heads, width, size]. Rows that decode and rows that verify, whatever their widths, are one call;
        prompts are another.
        """
        storage = state.storage
        if not isinstance(storage, KernelStorage) or not isinstance(masks, Masks | None):
            return {}
        window = masks.window if masks is not None else state.window
        kernel = self._of(storage, window, queries.dtype)
        if kernel is None:
            return {}
        few, many = (
            [number for number, part in enumerate(mixed.parts) if (part.width > MOST_QUERIES) is wide]
            for wide in (False, True)
        )
        found: dict[int, mx.array] = {}
        for numbers in (few, many if kernel.takes_prompts else []):
            if numbers:
                taken = _taken(queries[:, :, 0], mixed, numbers)
                attended = storage.attend(kernel, taken, state.kernel_rows(storage, mixed, numbers))
                found |= _parted(attended, mixed, numbers)
        return found

    def _of(self, storage: KernelStorage, window: int | None, dtype: mx.Dtype) -> PagedAttention | None:
        if (window, dtype) not in self._made:
            shape = Shape(self._heads, self._kv_heads, *storage.sizes, PAGE)
            self._made[window, dtype] = self._kernels.attention(
                shape, dtype, scale=self._scale, cap=self._cap, sinks=self._sinks, window=window
            )
        return self._made[window, dtype]


def _taken(queries: mx.array, mixed: Mixed, numbers: list[int]) -> mx.array:
    """The tokens of some launches, one behind another."""
    if len(numbers) == len(mixed.parts):
        return queries
    begins, ends = zip(*(mixed.bounds[number] for number in numbers), strict=True)
    if begins[1:] == ends[:-1]:
        return queries[begins[0] : ends[-1]]
    return mx.concatenate([queries[begin:end] for begin, end in zip(begins, ends, strict=True)])


def _parted(attended: mx.array, mixed: Mixed, numbers: list[int]) -> dict[int, mx.array]:
    """What tokens [tokens, heads, size] of some launches attend to, launch by launch."""
    found, begin = {}, 0
    for number in numbers:
        part = mixed.parts[number]
        own = attended if part.tokens == attended.shape[0] else attended[begin : begin + part.tokens]
        rows = own[:, None] if part.width == 1 else own.reshape(part.count, part.width, *own.shape[1:])
        found[number] = rows.swapaxes(1, 2)
        begin += part.tokens
    return found
