"""Attention over all launches of a mixed one as one native operation, on CPUs.

The operation norms and turns queries and keys, writes keys and values to their pages and attends. Norms and rotations
that it does not know are computed by the module's own code before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState, Choice
from ingot.cache.forward_batch import Masks, Mixed, Parted
from ingot.cache.reserved import ReservedStorage
from ingot.kernels import native
from ingot.models.families.registry import norm_of
from ingot.models.layers.modules import PositionedRope
from ingot.models.layers.norms import factor, is_rms


def head_norm(norm: nn.Module, *, whole: bool) -> native.HeadNorm | None:
    """A norm of queries or keys as the operation takes it; None where it does not know it."""
    if is_rms(norm):
        weight = factor(norm)
        return None if weight is None else (weight, norm.eps, whole, False)
    described = norm_of(norm)
    if described is not None and described.of_heads:
        return norm.weight, norm.eps, whole, True
    return None


class Rotations:
    """The different rotations of one model, as the native kernels take them."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Any] = {}

    def of(self, rope: PositionedRope) -> Any:
        rotation = rope._rotation
        angles = rotation.scale / rotation.periods
        key = (rotation.dims, rotation.traditional, rotation.gain, tuple(angles.tolist()))  # type: ignore[arg-type]
        if key not in self._known:
            self._known[key] = native.rotation(
                angles, dims=rotation.dims, neighbours=rotation.traditional, gain=rotation.gain
            )
        return self._known[key]


def spans_of(state: AppendState, heads: int, choice: Choice | None) -> Any:
    """Where the tokens of what is open stand, as the native kernels take it; made once for all layers of a group.

    So many heads share keys. Tokens that may be taken back are few at a time: many would be computed in another way
    than one is. By a `choice` each layer chooses what they see.
    """
    opened, few = state.opened, max(1, native.FEW_QUERIES // heads)
    limits = None if choice is None else choice.limits
    parts = opened.parts if isinstance(opened, Mixed) else (opened,)
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
        stated: Any = opened.explicit.tolist() if opened.is_stated and not opened.three_axes else None
        positions = None if stated is None else array("i", stated)
        opened.memo[key] = native.spans(spans, [state.group.native_table(table) for table in tables], positions, limits)
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
        rotations: Rotations,
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
        self._operation: native.Attention | None = None

    def covers(self, x: mx.array, masks: Parted | None, state: AppendState, mixed: Mixed) -> bool:
        """Whether this launch is one that it computes as the module would."""
        storage = state.storage
        if x.dtype != mx.float32 or not isinstance(storage, ReservedStorage | None):
            return False
        if isinstance(storage, ReservedStorage) and not storage.is_readable:
            return False
        if masks is None:
            return all(part.width == 1 for part in mixed.parts)
        return isinstance(masks, Masks)

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        masks: Parted | None,
        state: AppendState,
        mixed: Mixed,
    ) -> mx.array:
        """What queries [1, tokens, heads * size] attend to; keys and values are written to the state."""
        size = keys.shape[-1] // self._kv_heads
        storage = state.reserve(self._kv_heads, size, mx.float32)
        assert storage is not None
        window = masks.window if isinstance(masks, Masks) else state.window
        attended, storage.keys[0], storage.values[0] = self._operate(size)(
            queries,
            keys,
            values,
            storage.keys[0],
            storage.values[0],
            spans_of(state, self._heads // self._kv_heads, None if window else state.choice),
            window or 0,
            storage.native_coded,
        )
        return attended

    def _operate(self, size: int) -> native.Attention:
        if self._operation is None:
            self._operation = native.Attention(
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
