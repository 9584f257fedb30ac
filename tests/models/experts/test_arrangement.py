"""The order of the native kernels by plain operations on bytes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native
from ingot.models.experts.arrangement import as_floats, find_arrangement

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not installed")
PACKINGS = [
    {"bits": 4, "group_size": 64, "mode": "affine"},
    {"bits": 8, "group_size": 32, "mode": "affine"},
    {"bits": 4, "group_size": 32, "mode": "mxfp4"},
]


def bytes_of(array: mx.array) -> Any:
    return np.asarray(array.view(mx.uint8)).reshape(-1)


@pytest.mark.parametrize("rows", [64, 70])
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_it_gives_the_kernels_own_bytes(packing: dict[str, Any], rows: int) -> None:
    weight = mx.random.normal((1, rows, 128), key=mx.random.key(rows)).astype(mx.bfloat16)
    quanta, scales, *biases = mx.quantize(weight, **packing)
    arranged = native.packed_weights(
        quanta, scales, biases[0] if biases else None, None, packing["group_size"], packing["bits"]
    ).arrays
    found = find_arrangement(packing, rows, bytes_of(quanta), bytes_of(arranged[0]))
    assert found is not None
    made = [np.full(array.size, 7, np.float32) for array in arranged[1:3]]
    if found.mxfp4:
        found.mxfp4_factors(bytes_of(scales), *made)
    else:
        for stored, out in zip((scales, biases[0]), made, strict=True):
            found.factors(bytes_of(stored), stored.dtype, out)
    for out, expected in zip(made, arranged[1:3], strict=True):
        assert np.array_equal(out, np.array(expected.astype(mx.float32)).reshape(-1))


def test_other_bits_are_left_to_the_kernels() -> None:
    nothing = np.zeros(64, np.uint8)
    assert find_arrangement({"bits": 6, "group_size": 64, "mode": "affine"}, 8, nothing, nothing) is None


def test_numbers_of_16_bits_lose_nothing() -> None:
    for dtype in (mx.bfloat16, mx.float16):
        numbers = mx.random.normal((33,), key=mx.random.key(1)).astype(dtype)
        assert np.array_equal(
            as_floats(bytes_of(numbers), dtype).astype(np.float32), np.array(numbers.astype(mx.float32))
        )
