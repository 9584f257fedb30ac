"""Products with packed weights against plain operations, on the device at hand: what differs must not be used."""

from __future__ import annotations

import math

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.packed.kernels import PackedWeights, packed_product

BOUNDS = {mx.float32: 1e-4, mx.float16: 2**-9, mx.bfloat16: 2**-6}
"""Of the largest product, by which another may be off. It is rounded once."""
ROWS = (11, 3, 1)
ENDS = 128
"""Outputs at both ends that are compared: unpacked as float32, all of them might not fit beside a model."""


def selfcheck(device: Device, weights: PackedWeights) -> str | None:
    """What is wrong with the products of a layer on this device; None where they are right. Compiles their kernels."""
    dtype = weights.scales.dtype
    try:
        product = packed_product(device, weights.packing, dtype)
        x = mx.random.normal((max(ROWS), weights.columns), key=mx.random.key(7)).astype(dtype)
        found = [product(x[:rows], weights) for rows in ROWS]
        mx.eval(found)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"
    for ends in (slice(None, ENDS), slice(-ENDS, None)):
        if _apart(found[0][:, ends], x, weights.part(ends)) > BOUNDS[dtype]:
            return f"multiply differs for {weights}"
    if not all(mx.array_equal(some, found[0][: some.shape[0]]).item() for some in found):
        return f"a row's product depends on how many rows there are, for {weights}"
    return None


def _apart(found: mx.array, x: mx.array, weights: PackedWeights) -> float:
    """From plain operations in float32, of the largest product."""
    wanted = x.astype(mx.float32) @ weights.unpacked(mx.float32).T
    gap = float(mx.abs(found.astype(mx.float32) - wanted).max() / mx.abs(wanted).max())
    return math.inf if math.isnan(gap) else gap
