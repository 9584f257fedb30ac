"""Filters over time, and the curve in front of them, as native operations, against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native

pytestmark = pytest.mark.skipif(not native.can_convolve(), reason=f"{native.advice() or 'an older build'}")


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def expected(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, dilation: int, front: int, count: int) -> np.ndarray:
    taps = weight.shape[0]
    behind = max(0, count + dilation * (taps - 1) - front - len(x))
    padded = np.pad(x.astype(np.float64), ((front, behind), (0, 0)))
    seen = [padded[tap * dilation : tap * dilation + count] @ weight[tap].astype(np.float64) for tap in range(taps)]
    found: np.ndarray = bias + sum(seen)
    return found


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "taps", "dilation", "front", "count"),
    [
        (1, 1, 1, 1, 1, 0, 1),
        (40, 3, 5, 3, 1, 1, 40),
        (40, 16, 8, 11, 5, 25, 40),
        (3, 4, 4, 11, 5, 25, 3),  # most taps see nothing
        (700, 8, 24, 7, 3, 9, 700),  # several tasks
        (90, 16, 600, 3, 1, 1, 90),  # and so they are where columns are many
        (50, 4, 4, 3, 1, 0, 48),  # from the middle of a sound
        (20, 4, 4, 3, 1, 2, 30),  # beyond its end
    ],
)
def test_rows_follow_from_their_neighbours(
    rows: int, inputs: int, outputs: int, taps: int, dilation: int, front: int, count: int
) -> None:
    x, weight, bias = drawn(1, rows, inputs), drawn(2, taps, inputs, outputs), drawn(3, outputs)
    given = (mx.array(each) for each in (x, weight, bias))
    found = np.array(native.convolve_rows(*given, dilation=dilation, front=front, count=count))
    right = expected(x, weight, bias, dilation, front, count)
    assert found.shape == right.shape
    assert np.abs(found - right).max() < 2e-6 * max(1.0, np.abs(right).max())


def test_parts_of_arrays_are_taken_as_they_lie() -> None:
    x, weight, bias = drawn(1, 60, 4), drawn(2, 8, 4, 3), drawn(3, 8)
    given = mx.array(x)[10:50], mx.array(weight).transpose(2, 1, 0), mx.array(bias)
    found = np.array(native.convolve_rows(*given, front=1, count=40))
    assert np.abs(found - expected(x[10:50], weight.transpose(2, 1, 0), bias, 1, 1, 40)).max() < 2e-5


@pytest.mark.parametrize(
    ("x", "weight", "bias", "count"),
    [
        ((4, 3), (3, 2, 5), (5,), 4),
        ((4, 3), (3, 3, 5), (4,), 4),
        ((4, 3), (3, 5), (5,), 4),
        ((0, 3), (3, 3, 5), (5,), 4),
        ((4, 3), (3, 3, 5), (5,), 0),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused(
    x: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...], count: int
) -> None:
    with pytest.raises(ValueError, match=r"takes|nothing|makes rows"):
        native.convolve_rows(mx.zeros(x), mx.zeros(weight), mx.zeros(bias), count=count)


@pytest.mark.parametrize("width", [1, 7, 16, 130])
@pytest.mark.parametrize("reach", [1.0, 300.0])
def test_a_curve_is_right_far_from_zero_too(width: int, reach: float) -> None:
    x, scale, shift = drawn(1, 50, width) * np.float32(reach), drawn(2, width), drawn(3, width)
    alpha = 0.5 + np.abs(drawn(4, width))
    found = np.array(native.snake_activation(*(mx.array(each) for each in (x, scale, shift, alpha))))
    value = x.astype(np.float64) * scale + shift
    # The sine's own argument is rounded, which is what it cannot be righter than.
    bound = 1e-6 + 1e-7 * np.abs(alpha * value).max()
    right = value + np.sin(alpha * value) ** 2 / alpha
    assert np.abs(found - right).max() < 2 * bound + 1e-6 * np.abs(value).max()
