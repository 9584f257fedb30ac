"""Experts that a thread has read become what the kernels make of them when they are loaded, byte for byte."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not installed")
PACKINGS = [
    {"bits": 4, "group_size": 64, "mode": "affine"},
    {"bits": 8, "group_size": 32, "mode": "affine"},
    {"bits": 4, "group_size": 32, "mode": "mxfp4"},
]


def bytes_of(array: mx.array) -> Any:
    return np.array(array.view(mx.uint8)).reshape(-1)


@pytest.mark.parametrize("rows", [64, 70, 3])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_packed_weights_are_those_that_the_kernels_were_given(
    packing: dict[str, Any], dtype: mx.Dtype, rows: int
) -> None:
    weight = mx.random.normal((1, rows, 192), key=mx.random.key(rows)).astype(dtype)
    quanta, scales, *biases = mx.quantize(weight, **packing)
    expected = native.packed_weights(
        quanta, scales, biases[0] if biases else None, None, packing["group_size"], packing["bits"]
    ).arrays
    made = [np.full((2, array.nbytes), 7, np.uint8) for array in expected]
    arrival = native.expert_arrival()
    assert arrival is not None and native.arrives(**packing)
    arrival.add_packed(
        rows=rows,
        columns=192,
        group=packing["group_size"],
        bits=packing["bits"],
        mxfp4=packing["mode"] == "mxfp4",
        given=[1, 0, 2][: 2 + len(biases)],
        factors=native.number_format(scales.dtype),
        to=[(array.ctypes.data, array.strides[0]) for array in made],
        stored=native.number_format(expected[1].dtype),
    )
    given = [bytes_of(array) for array in (scales, quanta, *biases)]
    arrival.fill([array.ctypes.data for array in given], 1)
    for array, wanted in zip(made, expected, strict=True):
        assert np.array_equal(array[1], bytes_of(wanted))
        assert (array[0] == 7).all()


@pytest.mark.parametrize("wanted", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("stored", [mx.bfloat16, mx.float16, mx.float32], ids=str)
def test_plain_numbers_are_copied_or_become_floats(stored: mx.Dtype, wanted: mx.Dtype) -> None:
    if not native.becomes(stored, wanted):
        assert wanted == mx.bfloat16 or stored == wanted
        return
    numbers = (mx.random.normal((50,), key=mx.random.key(3)) * 3).astype(stored)
    is_same, given = stored == wanted, bytes_of(numbers)
    expected = bytes_of(numbers.astype(wanted))
    made = np.zeros((3, expected.size), np.uint8)
    arrival = native.expert_arrival()
    arrival.add_plain(
        count=given.size if is_same else 50,
        given=0,
        from_=native.number_format(None if is_same else stored),
        to=(made.ctypes.data, made.strides[0]),
        stored=native.number_format(None if is_same else wanted),
    )
    arrival.fill([given.ctypes.data], 2)
    assert np.array_equal(made[2], expected)


def test_what_is_not_known_is_refused() -> None:
    assert not native.arrives(group_size=64, bits=6, mode="affine")
    arrival = native.expert_arrival()
    with pytest.raises(ValueError, match="4 or 8"):
        arrival.add_packed(
            rows=8,
            columns=64,
            group=64,
            bits=6,
            mxfp4=False,
            given=[0, 1, 2],
            factors=native.number_format(mx.float32),
            to=[(0, 0)] * 3,
            stored=native.number_format(mx.float32),
        )
