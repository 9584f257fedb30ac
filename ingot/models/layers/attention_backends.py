"""Attention backends: native kernels on CPUs, and GPU kernels over the KV pages as they lie.

On CPUs one operation norms and rotates queries and keys, writes keys and values to their pages and attends, for all
parts of a mixed batch. Norms and rotations that it does not support are computed before it by the module's own code. On
GPUs, masks given as arrays and prompts that no kernel supports are left to MLX.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState, PageChooser
from ingot.cache.forward_batch import AttentionMask, BatchMasks, MixedBatch, PerBatch
from ingot.cache.kv_storage import KernelStorage, ReservedStorage
from ingot.cache.pages import PAGE
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.cpu import native
from ingot.kernels.paged_attention.inputs import MOST_QUERIES
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.selfcheck import CodedSample
from ingot.kernels.paged_attention.shapes import AttentionShape
from ingot.models.families.registry import norm_spec_of
from ingot.models.layers.norms import is_rms_norm, norm_factor
from ingot.models.layers.rope import PositionedRope


def native_head_norm(norm: nn.Module, *, whole: bool) -> native.HeadNorm | None:
    """A norm of queries or keys as the native operation takes it; None where it does not support it."""
    if is_rms_norm(norm):
        weight = norm_factor(norm)
        return None if weight is None else (weight, norm.eps, whole, False)
    spec = norm_spec_of(norm)
    if spec is not None and spec.of_heads:
        return norm.weight, norm.eps, whole, True
    return None


class NativeRotations:
    """The different rotations of one model, as the native kernels take them."""

    def __init__(self) -> None:
        self._rotations: dict[tuple[object, ...], Any] = {}

    def rotation_for(self, rope: PositionedRope) -> Any:
        rotation = rope.rotation
        if rotation.key not in self._rotations:
            self._rotations[rotation.key] = native.rope_rotation(
                rotation.scale / rotation.periods,
                dims=rotation.dims,
                neighbours=rotation.traditional,
                gain=rotation.gain,
            )
        return self._rotations[rotation.key]


def native_spans_of(state: AppendState, heads: int, choice: PageChooser | None) -> Any:
    """The positions and pages of the open batch's tokens, as the native kernels take them; the same for all layers of a
    group.

    So many `heads` share keys. Tentative tokens come few at a time: many would be computed by another path than one is.
    With a `choice` each layer chooses the pages that they see.
    """
    opened, few = state.opened, max(1, native.FEW_QUERIES // heads)
    limits = None if choice is None else choice.limits
    parts = opened.parts if isinstance(opened, MixedBatch) else (opened,)
    key = ("spans", state.group.number, few if any(part.tentative for part in parts) else None, limits)
    if key not in opened.memo:
        rows = [each for part in parts for each in zip(part.rows, part.starts, part.positions, strict=True)]
        widths = [(part.width, few if part.tentative else part.width) for part in parts for _ in part.rows]
        firsts = [0, *accumulate(width for width, _ in widths)]
        spans = [
            (first + at, min(most, width - at), number, start + at, position + at)
            for number, (first, (width, most), (_, start, position)) in enumerate(
                zip(firsts, widths, rows, strict=False)
            )
            for at in range(0, width, most)
        ]
        tables = [row.tables[state.group.number] for row, _, _ in rows]
        # Positions of three axes are rotated before.
        stated: Any = opened.explicit.tolist() if opened.has_stated_positions and not opened.three_axes else None
        positions = None if stated is None else array("i", stated)
        opened.memo[key] = native.attention_spans(
            spans, [state.group.native_table(table) for table in tables], positions, limits
        )
    return opened.memo[key]


class RaggedAttention:
    """One layer's attention, in float32 alone; keys and values may be stored in 16 bits."""

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        cap: float | None,
        sinks: mx.array | None,
        norms: Sequence[native.HeadNorm | None],
        rope: nn.Module | None,
        rotations: NativeRotations,
        gated: bool,
        prepares: bool = True,
    ) -> None:
        """`prepares` is False where its queries and keys will be normed and rotated already."""
        supports_rope = rope is None or isinstance(rope, PositionedRope)
        self.prepares = prepares and supports_rope and all(norm is not None for norm in norms)
        """Whether it norms and rotates queries and keys, and gates its output."""
        self._heads, self._kv_heads, self._scale, self._cap, self._sinks = heads, kv_heads, scale, cap, sinks
        self._norms = (norms[0], norms[1]) if norms and self.prepares else (None, None)
        self._rotation = rotations.rotation_for(rope) if isinstance(rope, PositionedRope) and self.prepares else None
        self._gated = gated and self.prepares
        self._operation: native.NativeAttention | None = None

    def covers(self, x: mx.array, masks: PerBatch | None, state: AppendState, mixed: MixedBatch) -> bool:
        """Whether it computes this batch as the module would."""
        storage = state.storage
        if x.dtype != mx.float32 or not isinstance(storage, ReservedStorage | None):
            return False
        if isinstance(storage, ReservedStorage) and not storage.is_readable:
            return False
        if masks is None:
            return all(part.width == 1 for part in mixed.parts)
        return isinstance(masks, BatchMasks)

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        masks: PerBatch | None,
        state: AppendState,
        mixed: MixedBatch,
    ) -> mx.array:
        """The attention of queries [1, tokens, heads * size]; keys and values are written to the state."""
        size = keys.shape[-1] // self._kv_heads
        storage = state.reserve(self._kv_heads, size, mx.float32)
        assert storage is not None
        window = masks.window if isinstance(masks, BatchMasks) else state.window
        attended, storage.keys[0], storage.values[0] = self._operate(size)(
            queries,
            keys,
            values,
            storage.keys[0],
            storage.values[0],
            native_spans_of(state, self._heads // self._kv_heads, None if window else state.choice),
            window or 0,
            storage.native_coded,
        )
        return attended

    def _operate(self, size: int) -> native.NativeAttention:
        if self._operation is None:
            self._operation = native.NativeAttention(
                heads=self._heads,
                kv_heads=self._kv_heads,
                size=size,
                scale=self._scale,
                cap=self._cap,
                sinks=self._sinks,
                norms=self._norms,
                rotation=self._rotation,
                gated=self._gated,
            )
        return self._operation


class PagedKernelAttention:
    """One layer's attention by kernels of a GPU. Masks that are arrays and prompts without a kernel are left to MLX."""

    def __init__(
        self,
        kernels: CheckedKernels,
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        cap: float | None,
        sinks: mx.array | None,
        latent: bool = False,
    ) -> None:
        """`latent`: pages store latents, and what is rotated."""
        self._kernels, self._heads, self._kv_heads, self._latent = kernels, heads, kv_heads, latent
        self._scale, self._cap, self._sinks = scale, cap, sinks
        self._by_window: dict[tuple[int | None, mx.Dtype], PagedAttention | None] = {}

    def __call__(
        self,
        queries: mx.array,
        masks: PerBatch | None,
        state: AppendState,
        mixed: MixedBatch,
        without: Collection[int] = (),
    ) -> dict[int, mx.array] | mx.array:
        """The attention of the queries [tokens, heads, size] of the parts that kernels compute: by the part's number,
        [rows, heads, width, size]; or [tokens, heads, size] where one call computes all of them. Rows that decode and
        rows that verify, whatever their widths, are one call; prompts are another. The parts `without` are left out.
        """
        storage = state.storage
        if not isinstance(storage, KernelStorage) or not isinstance(masks, BatchMasks | None):
            return {}
        kernel = self.kernel_for(storage, state.window if masks is None else masks.window, queries.dtype)
        if kernel is None:
            return {}
        found: dict[int, mx.array] = {}
        for each in _kernel_calls(mixed):
            numbers = tuple(number for number in each if number not in without)
            if not numbers:
                continue
            if mixed.parts[numbers[0]].width <= MOST_QUERIES or kernel.takes_prompts:
                rows = state.kernel_rows(storage, mixed, numbers)
                if not storage.reads(rows):
                    continue
                attended = storage.attend(kernel, _take_tokens(queries, mixed, numbers), rows)
                if len(numbers) == len(mixed.parts):
                    return attended
                found |= _split_by_part(attended, mixed, numbers)
        return found

    @property
    def gathers(self) -> tuple[bool, bool]:
        """Whether pages have to be gathered for batches of few tokens a row, and of more: as it was probed."""
        kernels = self._by_window.values()
        few = not kernels or None in kernels
        return few, few or not all(kernel is not None and kernel.takes_prompts for kernel in kernels)

    def check_coded(self, sample: CodedSample) -> None:
        """Check the kernels without a window, of those that it was probed with, on pages like these."""
        for (window, _), kernel in self._by_window.items():
            if window is None and kernel is not None:
                self._kernels.check_coded(kernel, sample, scale=self._scale, cap=self._cap)

    def kernel_for(self, storage: KernelStorage, window: int | None, dtype: mx.Dtype) -> PagedAttention | None:
        """None where no kernel is correct."""
        if (window, dtype) not in self._by_window:
            shape = AttentionShape(self._heads, self._kv_heads, *storage.sizes, PAGE, self._latent)
            self._by_window[window, dtype] = self._kernels.attention(
                shape, dtype, scale=self._scale, cap=self._cap, sinks=self._sinks, window=window
            )
        return self._by_window[window, dtype]


def _kernel_calls(mixed: MixedBatch) -> Sequence[tuple[int, ...]]:
    """The parts whose rows have few tokens each, and the others: the same for all layers."""
    if "calls" not in mixed.memo:
        wide = [part.width > MOST_QUERIES for part in mixed.parts]
        each = (tuple(number for number, is_wide in enumerate(wide) if is_wide is many) for many in (False, True))
        mixed.memo["calls"] = tuple(numbers for numbers in each if numbers)
    calls: Sequence[tuple[int, ...]] = mixed.memo["calls"]
    return calls


def _take_tokens(queries: mx.array, mixed: MixedBatch, numbers: Sequence[int]) -> mx.array:
    """The tokens of some parts, concatenated."""
    if len(numbers) == len(mixed.parts):
        return queries
    begins, ends = zip(*(mixed.bounds[number] for number in numbers), strict=True)
    if begins[1:] == ends[:-1]:
        return mx.contiguous(queries[begins[0] : ends[-1]])
    return mx.concatenate([queries[begin:end] for begin, end in zip(begins, ends, strict=True)])


def _split_by_part(attended: mx.array, mixed: MixedBatch, numbers: Sequence[int]) -> dict[int, mx.array]:
    """The attention [tokens, heads, size] of some parts, by their numbers."""
    found, begin = {}, 0
    for number in numbers:
        part = mixed.parts[number]
        own = attended if part.tokens == attended.shape[0] else attended[begin : begin + part.tokens]
        rows = own[:, None] if part.width == 1 else own.reshape(part.count, part.width, *own.shape[1:])
        found[number] = rows.swapaxes(1, 2)
        begin += part.tokens
    return found


def attend_capped(
    queries: mx.array, keys: mx.array, values: mx.array, mask: AttentionMask, *, scale: float, cap: float
) -> mx.array:
    """Attention whose scores have a soft cap, by plain operations."""
    rows, heads, width, size = queries.shape
    kv_heads, keyed = keys.shape[1:3]
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, width, size) * scale
    scores = cap * mx.tanh(grouped @ keys[:, :, None].swapaxes(-1, -2) / cap)
    if isinstance(mask, str):
        mask = mx.arange(keyed) <= mx.arange(keyed - width, keyed)[:, None]
    elif mask is not None:
        mask = mask[:, :, None]
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return (mx.softmax(scores, axis=-1, precise=True) @ values[:, :, None]).reshape(*queries.shape[:3], -1)
