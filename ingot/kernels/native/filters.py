"""Filters over time, and the curve in front of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ingot.kernels.cpu import fastblas
from ingot.kernels.native.extension import available, extension

if TYPE_CHECKING:
    import mlx.core as mx


def convolves() -> bool:
    """Whether `convolve` and `snake` are there, and a BLAS for them."""
    return available() and fastblas.single_threaded_sgemm() is not None


def convolve(
    x: mx.array, weight: mx.array, bias: mx.array, *, dilation: int = 1, front: int = 0, count: int
) -> mx.array:
    """`count` rows over time, each from its neighbours: row r sees x[r + tap * dilation - front] by weight[tap], and
    zeros where x [rows, inputs] has none; weight is [taps, inputs, outputs]. Only where `convolves`."""
    found: mx.array = extension().convolve(x, weight, bias, dilation, front, count)
    return found


def snake(x: mx.array, scale: mx.array, shift: mx.array, alpha: mx.array) -> mx.array:
    """v + sin(alpha * v)^2 / alpha for v = x * scale + shift. Only where `convolves`."""
    found: mx.array = extension().snake(x, scale, shift, alpha)
    return found
