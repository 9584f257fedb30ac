"""Attention as one operation, with what comes right before it, and within segments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ingot.kernels.cpu import fastblas
from ingot.kernels.native.extension import available, extension

if TYPE_CHECKING:
    import mlx.core as mx

FEW_QUERIES = 47
"""Queries, times the heads that share keys, that attention still takes as it takes one (native/src/attend.cpp)."""
HeadNorm = tuple["mx.array", float, bool, bool]
"""(weight, eps, whether all heads of a token are normed as one, whether the mean is taken off) of queries or keys."""


def rotation(angles: mx.array, *, dims: int, neighbours: bool, gain: float) -> Any:
    """Rotary positions: `angles` [dims / 2] are what pairs turn by from one position to the next.

    Attention of a model that turns alike should share one: it computes a launch's angles once.
    """
    return extension().Rotation(angles, dims=dims, neighbours=neighbours, gain=gain)


class Attention:
    """Attention over live states in one operation, with what comes right before it; only where `available`."""

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        size: int,
        scale: float,
        cap: float | None,
        sinks: mx.array | None,
        norms: tuple[HeadNorm | None, HeadNorm | None],
        rotation: Any,
        gated: bool,
    ) -> None:
        """With `cap` a score s counts as cap * tanh(s / cap). `gated`: each head of a query brings a gate behind it."""
        self._attention = extension().Attention(
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            scale=scale,
            cap=cap or 0.0,
            sinks=sinks,
            q_norm=norms[0],
            k_norm=norms[1],
            rotation=rotation,
            gated=gated,
        )

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        keys: mx.array,
        values: mx.array,
        spans: Any,
        window: int = 0,
        coded: tuple[mx.array, Any] | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """What queries [..., heads * size] attend to, and the states [pages, kv_heads, page, size] after it.

        `spans` are what `spans()` made. A token sees the `window` newest ones, itself among them, or all where it is 0.
        The states are written in place: what is given must not be used any more. `coded` are pages in fewer bits, where
        tables have some, and their form.
        """
        attended, keys, values = self._attention(q, k, v, keys, values, spans, window, coded)
        return attended, keys, values


def attends_segments() -> bool:
    """Whether `attend_segments` is there, and a BLAS for it."""
    return available() and fastblas.single_threaded_sgemm() is not None


def attend_segments(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """What queries [segments, rows, heads, size] find in the keys and values [segments, keys, heads, size] of their own
    segment, as float32. Few scores exist at a time. Only where `attends_segments`."""
    found: mx.array = extension().attend_segments(queries, keys, values, scale)
    return found
