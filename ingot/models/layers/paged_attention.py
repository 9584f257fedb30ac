"""Attention of rows that decode by the kernels of a GPU, over the pages as they lie."""

from __future__ import annotations

import mlx.core as mx

from ingot.cache.launch import Launch, Masks, Parted
from ingot.cache.layers import AppendState
from ingot.cache.pages import PAGE
from ingot.cache.slabs import KernelStorage
from ingot.kernels.paged.checked import CheckedKernels
from ingot.kernels.paged.kernels import PagedAttention, Shape


class KernelAttention:
    """One layer's. Longer launches, and masks that do not say what they show, are not its own."""

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

    def __call__(self, queries: mx.array, masks: Parted | None, state: AppendState, launch: Launch) -> mx.array | None:
        """What queries [tokens, heads, 1, size] of a launch attend to, [rows, heads, width, size]; None where this is
        not for the kernels."""
        storage = state.storage
        # A prompt's last few tokens are few too; but a kernel is compiled for each number of them.
        if launch.width > 1 or not isinstance(storage, KernelStorage):
            return None
        if not isinstance(masks, Masks | None):
            return None
        window = masks.window if masks is not None else state.window
        kernel = self._of(storage, window, queries.dtype)
        if kernel is None:
            return None
        return storage.attend(kernel, queries[:, :, 0], state.kernel_rows(storage, launch))[:, :, None]

    def _of(self, storage: KernelStorage, window: int | None, dtype: mx.Dtype) -> PagedAttention | None:
        if (window, dtype) not in self._made:
            shape = Shape(self._heads, self._kv_heads, *storage.sizes, PAGE)
            self._made[window, dtype] = self._kernels.attention(
                shape, dtype, scale=self._scale, cap=self._cap, sinks=self._sinks, window=window
            )
        return self._made[window, dtype]
