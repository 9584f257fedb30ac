"""The kernel that turns against plain operations, on the device at hand."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gpu.launchers import prepare
from ingot.kernels.paged.slabs import Slabs, page_number
from ingot.kernels.paged.tuning import TUNINGS
from ingot.kernels.paged_attention.inputs import token_slots
from ingot.kernels.paged_attention.kernels import available
from ingot.kernels.paged_attention.rope import Norm, Turning, TurnShape, turning, turns
from ingot.kernels.paged_attention.selfcheck import BOUNDS

TOKENS, SPARE = 11, 3


def check_turning(device: Device, shape: TurnShape, dtype: mx.Dtype, norms: Sequence[Norm], slabs: int) -> str | None:
    """What is wrong with the kernel for such layers over so many slabs; None where it is right."""
    if not available(device):
        return f"no kernels for {device.name}"
    try:
        return _differs(device, shape, dtype, norms, slabs)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"


def _differs(device: Device, shape: TurnShape, dtype: mx.Dtype, norms: Sequence[Norm], slabs: int) -> str | None:
    heads, random = shape.heads, np.random.default_rng(5)
    sizes = (heads.key_size, heads.value_size)
    made = [[mx.zeros((SPARE, heads.kv_heads, heads.page, size), dtype) for _ in range(slabs)] for size in sizes]
    places = [(number % slabs, number % SPARE, (7 * number) % heads.page) for number in range(TOKENS)]
    slots = token_slots([*((page_number(slab, page), place) for slab, page, place in places[1:]), (-1, 0)])
    row = heads.heads * shape.query_step + heads.kv_heads * sum(sizes)
    projected = mx.array(random.standard_normal((TOKENS, row), np.float32)).astype(dtype)
    positions, speeds = mx.arange(TOKENS) * 97, 10000.0 ** (-mx.arange(shape.dims // 2) / max(1, shape.dims // 2))
    angles = turns(positions, speeds, 1.25)

    def launched(turn: Turning) -> tuple[mx.array, mx.array]:
        return turn(projected, angles, slots, Slabs(*made), mx.zeros(1, mx.int32))

    prepare(device, lambda run: launched(Turning(run, TUNINGS[device.kind], shape, dtype, norms)))
    turned, done = launched(turning(device, shape, dtype, norms))
    mx.eval(turned, done)
    wanted = plain_turns(shape, projected, angles, norms)
    written = [mx.stack([slot[page, :, place] for slot, page, place in _laid(kind, places)]) for kind in made]
    for name, one, other in zip(("queries", "keys", "values"), (turned, *written), wanted, strict=True):
        other = other if name == "queries" else other[: TOKENS - 1]
        off = float(mx.abs(one.astype(mx.float32) - other).max() / mx.abs(other).max())
        if not off <= BOUNDS[dtype]:
            return f"turn differs by {off:.2g} in {name}"
    return None


def _laid(slabs: list[mx.array], places: list[tuple[int, int, int]]) -> list[tuple[mx.array, int, int]]:
    return [(slabs[slab], page, place) for slab, page, place in places[1:]]


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
