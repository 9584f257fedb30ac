"""The kernel that turns against plain operations, on the device at hand."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gpu.launchers import Launcher
from ingot.kernels.paged.kernels import Slabs, available, page_number, token_slots
from ingot.kernels.paged.selfcheck import BOUNDS, slab_counts
from ingot.kernels.paged.tuning import TUNINGS
from ingot.kernels.paged.turning import Norm, Turning, TurnShape, turning, turns

TOKENS, SPARE = 11, 3


def check_turning(device: Device, shape: TurnShape, dtype: mx.Dtype, norms: Sequence[Norm], slabs: int) -> str | None:
    """What is wrong with the kernel for such layers over so many slabs; None where it is right."""
    if not available(device):
        return f"no kernels for {device.name}"
    try:
        return _differs(device, shape, dtype, norms, slabs)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"


def rehearse_turning(run: Launcher, device: Device, shape: TurnShape, dtype: mx.Dtype, norms: Sequence[Norm]) -> None:
    """Launch the kernel for such layers once, over each number of slabs. Raises ValueError where there is none."""
    kernel = Turning(run, TUNINGS[device.kind], shape, dtype, norms)
    for slabs in slab_counts(device):
        _Trial(shape, dtype, slabs).turned(kernel)


def _differs(device: Device, shape: TurnShape, dtype: mx.Dtype, norms: Sequence[Norm], slabs: int) -> str | None:
    trial = _Trial(shape, dtype, slabs)
    found = trial.turned(turning(device, shape, dtype, norms))
    wanted = plain_turns(shape, trial.projected, trial.angles, norms)
    for name, one, other in zip(("queries", "keys", "values"), found, wanted, strict=True):
        shown = other[: one.shape[0]]
        off = float(mx.abs(one.astype(mx.float32) - shown).max() / mx.abs(shown).max())
        if not off <= BOUNDS[dtype]:
            return f"turn differs by {off:.2g} in {name}"
    return None


class _Trial:
    """Some tokens whose places lie anywhere, but for the last, which has none."""

    def __init__(self, shape: TurnShape, dtype: mx.Dtype, slabs: int) -> None:
        heads, random = shape.heads, np.random.default_rng(5)
        sizes = (heads.key_size, heads.value_size)
        self._slabs = Slabs(
            *([mx.zeros((SPARE, heads.kv_heads, heads.page, size), dtype) for _ in range(slabs)] for size in sizes)
        )
        self._places = [(number % slabs, number % SPARE, (7 * number) % heads.page) for number in range(1, TOKENS)]
        row = heads.heads * shape.query_step + heads.kv_heads * sum(sizes)
        self.projected = mx.array(random.standard_normal((TOKENS, row), np.float32)).astype(dtype)
        speeds = 10000.0 ** (-mx.arange(shape.dims // 2) / max(1, shape.dims // 2))
        self.angles = turns(mx.arange(TOKENS) * 97, speeds, 1.25)

    def turned(self, kernel: Turning) -> tuple[mx.array, mx.array, mx.array]:
        """Queries of all tokens; keys and values of those that have a place."""
        slots = token_slots([*((page_number(slab, page), place) for slab, page, place in self._places), (-1, 0)])
        queries, done = kernel(self.projected, self.angles, slots, self._slabs, mx.zeros(1, mx.int32))
        mx.eval(queries, done)
        keys, values = (
            mx.stack([slabs[slab][page, :, place] for slab, page, place in self._places])
            for slabs in (self._slabs.keys, self._slabs.values)
        )
        return queries, keys, values


def plain_turns(
    shape: TurnShape, projected: mx.array, angles: mx.array, norms: Sequence[Norm]
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values [tokens, heads, size] by plain operations, in float32."""
    heads, tokens = shape.heads, projected.shape[0]
    ends = [heads.heads * shape.query_step, heads.heads * shape.query_step + heads.kv_heads * heads.key_size]
    queries, keys, values = mx.split(projected.astype(mx.float32), ends, axis=-1)
    queries = queries.reshape(tokens, heads.heads, -1)[:, :, : heads.key_size]
    keys, values = (part.reshape(tokens, heads.kv_heads, -1) for part in (keys, values))
    if norms:
        queries, keys = (_normed(part, *norm) for part, norm in zip((queries, keys), norms, strict=True))
    if shape.dims:
        queries, keys = (_turned(part, shape, angles) for part in (queries, keys))
    return queries, keys, values


def _normed(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    normed = x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight.astype(mx.float32)


def _turned(x: mx.array, shape: TurnShape, angles: mx.array) -> mx.array:
    cosine, sine = mx.split(angles[:, None], 2, axis=-1)
    inner, rest = x[..., : shape.dims], x[..., shape.dims :]
    one, two = (inner[..., 0::2], inner[..., 1::2]) if shape.neighbours else mx.split(inner, 2, axis=-1)
    pair = [one * cosine - two * sine, one * sine + two * cosine]
    turned = mx.stack(pair, axis=-1).reshape(inner.shape) if shape.neighbours else mx.concatenate(pair, axis=-1)
    return mx.concatenate([turned, rest], axis=-1)
