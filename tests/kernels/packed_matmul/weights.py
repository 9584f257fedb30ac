"""Packed weights of random numbers, and what they multiply to in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.launcher import Launcher
from ingot.kernels.packed_matmul.kernels import (
    BITS,
    FLOAT_FORMATS,
    GROUPS,
    PACKED_TUNING,
    PackedFormat,
    PackedProduct,
    PackedTuning,
    PackedWeights,
)

PACKINGS = [*(PackedFormat(bits, group) for bits in BITS for group in GROUPS), *FLOAT_FORMATS]
BOUNDS = {mx.float32: 4e-6, mx.float16: 2**-10, mx.bfloat16: 2**-7}
"""Of the largest number, by which what is rounded once may be off."""


def packed(packing: PackedFormat, outputs: int, columns: int, dtype: mx.Dtype, seed: int = 0) -> PackedWeights:
    drawn = np.random.default_rng(seed).standard_normal((outputs, columns), np.float32)
    quantized = mx.quantize(mx.array(drawn).astype(dtype), packing.group, packing.bits, packing.mode)
    return PackedWeights.of(packing, *quantized, dtype=dtype)


def experts(
    packing: PackedFormat, count: int, outputs: int, columns: int, dtype: mx.Dtype, seed: int = 0
) -> PackedWeights:
    flat = packed(packing, count * outputs, columns, dtype, seed)
    parts = (flat.weight, flat.scales) if flat.biases is None else (flat.weight, flat.scales, flat.biases)
    return PackedWeights.of(packing, *(part.reshape(count, outputs, -1) for part in parts), dtype=dtype)


def activations(rows: int, columns: int, dtype: mx.Dtype, seed: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal((rows, columns), np.float32)).astype(dtype)


def product(
    packing: PackedFormat, dtype: mx.Dtype, tuning: PackedTuning = PACKED_TUNING, run: Launcher | None = None
) -> PackedProduct:
    return PackedProduct(run or Emulator(), packing, dtype, tuning)


def exact(x: mx.array, weights: PackedWeights) -> np.ndarray:
    """In float64, of the whole numbers that the weights are packed as, or of the floats that MLX unpacks, which float32
    holds."""
    if weights.biases is None:
        return _wide(x) @ _wide(weights.unpacked(mx.float32)).T
    factors = (np.repeat(_wide(part), weights.packing.group, axis=1) for part in (weights.scales, weights.biases))
    scales, biases = factors
    return _wide(x) @ (_whole(weights) * scales + biases).T


def _whole(weights: PackedWeights) -> np.ndarray:
    """A number is so many bits of a row's, one behind another, the lowest first."""
    bits = np.unpackbits(np.asarray(weights.weight.view(mx.uint8)), axis=1, bitorder="little")
    numbers = bits.reshape(weights.outputs, weights.columns, weights.packing.bits).astype(np.float64)
    return numbers @ 2.0 ** np.arange(weights.packing.bits)


def _wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def off(found: mx.array, wanted: np.ndarray) -> float:
    return float(np.abs(_wide(found) - wanted).max() / np.abs(wanted).max())
