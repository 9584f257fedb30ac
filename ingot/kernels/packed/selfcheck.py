"""Products with packed weights against MLX's own, on the device at hand: what differs must not be used."""

from __future__ import annotations

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.packed.kernels import PackedWeights, packed_product

BOUNDS = {mx.float32: 1e-4, mx.float16: 2**-8, mx.bfloat16: 2**-5}
"""Of the largest product, by which another may be off: MLX rounds weights, too."""
ROWS = (11, 3, 1)


def selfcheck(device: Device, weights: PackedWeights) -> str | None:
    """What is wrong with the products of a layer on this device; None where they are right. Compiles their kernels."""
    dtype = weights.scales.dtype
    try:
        product = packed_product(device, weights.packing, dtype)
        x = mx.random.normal((max(ROWS), weights.columns), key=mx.random.key(7)).astype(dtype)
        found = [product(x[:rows], weights) for rows in ROWS]
        wanted = weights.by_mlx(x)
        mx.eval(found, wanted)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"
    gap = mx.abs(found[0].astype(mx.float32) - wanted.astype(mx.float32)).max() / mx.abs(wanted).max()
    if not float(gap) <= BOUNDS[dtype]:  # nor what is not a number
        return f"multiply differs for {weights}"
    if not all(mx.array_equal(some, found[0][: some.shape[0]]).item() for some in found):
        return f"a row's product depends on how many rows there are, for {weights}"
    return None
