"""Attention backends: native kernels on CPUs, and GPU kernels over the KV pages as they lie.

On CPUs one operation norms and rotates queries and keys, writes keys and values to their pages and attends, for all
parts of a mixed batch. Norms and rotations that it does not know are computed by the module's own code before it. On
GPUs, masks that do not say what they show and prompts that no kernel is for are left to MLX.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState, PageChooser
from ingot.cache.forward_batch import BatchMasks, MixedBatch, PerBatch
from ingot.cache.kv_storage import KernelStorage, ReservedStorage
from ingot.cache.pages import PAGE
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.cpu import native
from ingot.kernels.paged_attention.inputs import MOST_QUERIES
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.selfcheck import CodedSample
from ingot.kernels.paged_attention.shapes import AttentionShape
from ingot.models.families.registry import norm_spec_of
from ingot.models.layers.modules import PositionedRope
from ingot.models.layers.norms import is_rms_norm, norm_factor


def native_head_norm(norm: nn.Module, *, whole: bool) -> native.HeadNorm | None:
    """A norm of queries or keys as the operation takes it; None where it does not know it."""
    if is_rms_norm(norm):
        weight = norm_factor(norm)
        return None if weight is None else (weight, norm.eps, whole, False)
    described = norm_spec_of(norm)
    if described is not None and described.of_heads:
        return norm.weight, norm.eps, whole, True
    return None


class NativeRotations:
    """The different rotations of one model, as the native kernels take them."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Any] = {}

    def of(self, rope: PositionedRope) -> Any:
        rotation = rope._rotation
        angles = rotation.scale / rotation.periods
        key = (rotation.dims, rotation.traditional, rotation.gain, tuple(angles.tolist()))  # type: ignore[arg-type]
        if key not in self._known:
            self._known[key] = native.rope_rotation(
                angles, dims=rotation.dims, neighbours=rotation.traditional, gain=rotation.gain
            )
        return self._known[key]


def native_spans_of(state: AppendState, heads: int, choice: PageChooser | None) -> Any:
    """Where the tokens of what is open stand, as the native kernels take it; made once for all layers of a group.

    So many heads share keys. Tokens that may be taken back are few at a time: many would be computed in another way
    than one is. By a `choice` each layer chooses what they see.
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
        # Those of three axes are turned before.
        stated: Any = opened.explicit.tolist() if opened.has_stated_positions and not opened.three_axes else None
        positions = None if stated is None else array("i", stated)
        opened.memo[key] = native.attention_spans(
            spans, [state.group.native_table(table) for table in tables], positions, limits
        )
    return opened.memo[key]


class RaggedAttention:
    """One layer's attention. Computes float32 alone; keys and values may be kept in 16 bits."""

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
        """`prepares` is False where it is to be given queries and keys that are normed and turned."""
        turns = rope is None or isinstance(rope, PositionedRope)
        self.prepares = prepares and turns and all(norm is not None for norm in norms)
        """Whether it norms and turns queries and keys, and gates what comes out; else it is given them so."""
        self._heads, self._kv_heads, self._scale, self._cap, self._sinks = heads, kv_heads, scale, cap, sinks
        self._norms = (norms[0], norms[1]) if norms and self.prepares else (None, None)
        self._rotation = rotations.of(rope) if isinstance(rope, PositionedRope) and self.prepares else None
        self._gated = gated and self.prepares
        self._operation: native.NativeAttention | None = None

    def covers(self, x: mx.array, masks: PerBatch | None, state: AppendState, mixed: MixedBatch) -> bool:
        """Whether this launch is one that it computes as the module would."""
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
        """What queries [1, tokens, heads * size] attend to; keys and values are written to the state."""
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
        self, queries: mx.array, masks: PerBatch | None, state: AppendState, mixed: MixedBatch
    ) -> dict[int, mx.array] | mx.array:
        """What the queries [tokens, heads, size] of those launches attend to that are the kernels': by the launch's
        number, [rows, heads, width, size]; or [tokens, heads, size] where one call is all of them. Rows that decode and
        rows that verify, whatever their widths, are one call; prompts are another.
        """
        storage = state.storage
        if not isinstance(storage, KernelStorage) or not isinstance(masks, BatchMasks | None):
            return {}
        kernel = self._of(storage, state.window if masks is None else masks.window, queries.dtype)
        if kernel is None:
            return {}
        found: dict[int, mx.array] = {}
        for numbers in _kernel_calls(mixed):
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
            shape = AttentionShape(self._heads, self._kv_heads, *storage.sizes, PAGE)
            self._made[window, dtype] = self._kernels.attention(
                shape, dtype, scale=self._scale, cap=self._cap, sinks=self._sinks, window=window
            )
        return self._made[window, dtype]


def _kernel_calls(mixed: MixedBatch) -> Sequence[tuple[int, ...]]:
    """The launches whose rows have few tokens each, and the others: found once for all layers."""
    if "calls" not in mixed.memo:
        wide = [part.width > MOST_QUERIES for part in mixed.parts]
        each = (tuple(number for number, is_wide in enumerate(wide) if is_wide is many) for many in (False, True))
        mixed.memo["calls"] = tuple(numbers for numbers in each if numbers)
    calls: Sequence[tuple[int, ...]] = mixed.memo["calls"]
    return calls


def _take_tokens(queries: mx.array, mixed: MixedBatch, numbers: Sequence[int]) -> mx.array:
    """The tokens of some launches, one behind another."""
    if len(numbers) == len(mixed.parts):
        return queries
    begins, ends = zip(*(mixed.bounds[number] for number in numbers), strict=True)
    if begins[1:] == ends[:-1]:
        return mx.contiguous(queries[begins[0] : ends[-1]])
    return mx.concatenate([queries[begin:end] for begin, end in zip(begins, ends, strict=True)])


def _split_by_part(attended: mx.array, mixed: MixedBatch, numbers: Sequence[int]) -> dict[int, mx.array]:
    """What tokens [tokens, heads, size] of some launches attend to, launch by launch."""
    found, begin = {}, 0
    for number in numbers:
        part = mixed.parts[number]
        own = attended if part.tokens == attended.shape[0] else attended[begin : begin + part.tokens]
        rows = own[:, None] if part.width == 1 else own.reshape(part.count, part.width, *own.shape[1:])
        found[number] = rows.swapaxes(1, 2)
        begin += part.tokens
    return found
