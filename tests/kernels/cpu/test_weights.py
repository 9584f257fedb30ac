"""Products with packed and plain weights against float64, on every instruction set that can be asked for here."""

from __future__ import annotations

import os
import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native
from tests.kernels.cpu.rounding import WIDE_BOUND, half_steps
from tests.memory import settled

# Where everything is expected to be built, missing kernels are a failure and not a reason to skip.
EXPECTED = sys.platform == "linux" and "CI" in os.environ
pytestmark = pytest.mark.skipif(not native.available() and not EXPECTED, reason=f"{native.advice()}")

# Of the products' magnitudes, besides the rounding of activations: sums are float32.
BOUND = 2e-6


def packed(
    rows: int, columns: int, bits: int, group: int, seed: int, *, halves: bool = False
) -> tuple[Any, np.ndarray]:
    """Random weights as the kernels take them, and in float64. Scales of 16 bits are kept in 16 bits."""
    weights = mx.random.normal((rows, columns), key=mx.random.key(seed))
    quanta, scales, biases = mx.quantize(weights, group_size=group, bits=bits)
    if halves:
        scales, biases = scales.astype(mx.float16), biases.astype(mx.float16)
    return native.packed_weights(quanta, scales, biases, None, group, bits), exact(quanta, scales, biases, group, bits)


def exact(quanta: mx.array, scales: mx.array, biases: mx.array, group: int, bits: int) -> np.ndarray:
    """The weights in float64, unpacked here by hand: a row is one stream of bits, the lowest first."""
    stream = np.unpackbits(np.array(quanta).view(np.uint8), axis=1, bitorder="little")
    values = stream.reshape(stream.shape[0], -1, bits).astype(np.int64) @ (1 << np.arange(bits))
    wide = lambda array: np.repeat(np.array(array, dtype=np.float64), group, axis=1)  # noqa: E731
    return values * wide(scales) + wide(biases)


def activations(count: int, columns: int, seed: int, outlier: float) -> mx.array:
    """Random rows, in each of which some numbers are that many times as large."""
    x = np.array(mx.random.normal((count, columns), key=mx.random.key(seed)))
    large = np.random.default_rng(seed).random(x.shape) < 2 / columns
    return mx.array(np.where(large, outlier * x, x))


@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 5),
    count=st.sampled_from([1, 2, 3, 4, 5, 8, 16, 17, 40, 300]),
    bits=st.sampled_from(native.BITS),
    group=st.sampled_from(native.GROUPS),
    halves=st.booleans(),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([1e-6, 1.0, 1e4]),
    outlier=st.sampled_from([1.0, 10.0, 1000.0]),
)
def test_products_are_right_for_any_shape(
    rows: int, width: int, count: int, bits: int, group: int, halves: bool, seed: int, spread: float, outlier: float
) -> None:
    columns = width * 128
    weights, values = packed(rows, columns, bits, group, seed, halves=halves)
    x = spread * activations(count, columns, seed + 1, outlier)
    y = native.linear(x, weights)
    wide = np.array(x, dtype=np.float64)
    assert y.shape == (count, rows) and y.dtype == mx.float32
    assert np.all(np.abs(np.array(y) - wide @ values.T) <= allowed(wide, values))


def allowed(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """How far products may be off."""
    magnitude = np.abs(x) @ np.abs(values).T
    rounded = half_steps(x) @ np.abs(values).T + BOUND * magnitude
    return np.maximum(rounded, WIDE_BOUND * magnitude * native.has_wide())


def test_products_are_as_exact_as_8_bits_allow() -> None:
    weights, values = packed(64, 1024, 4, 32, 9)
    x = mx.random.normal((8, 1024), key=mx.random.key(10))
    exact = np.array(x, dtype=np.float64) @ values.T
    error = np.linalg.norm(np.array(native.linear(x, weights)) - exact) / np.linalg.norm(exact)
    assert error < 6e-3


@pytest.mark.usefixtures("one_path")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_one_large_number_takes_no_bits_from_the_others(bits: int, count: int) -> None:
    weights, values = packed(40, 512, bits, 32, 7, halves=True)
    x = np.array(mx.random.normal((count, 512), key=mx.random.key(8)))
    x[:, 100] = 25.0
    exact = x.astype(np.float64) @ values.T
    error = np.linalg.norm(np.array(native.linear(mx.array(x), weights)) - exact) / np.linalg.norm(exact)
    alone = np.where(np.arange(512) == 100, 0, x)
    exact = alone.astype(np.float64) @ values.T
    usual = np.linalg.norm(np.array(native.linear(mx.array(alone), weights)) - exact) / np.linalg.norm(exact)
    assert error < 1.3 * usual


@pytest.mark.usefixtures("one_path")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_block_of_large_numbers_is_rounded_like_any_other(bits: int) -> None:
    weights, values = packed(9, 1024, bits, 32, 7, halves=True)
    x = np.zeros((8, 1024), np.float32)
    x[:, 64:96] = 1e3
    x[:, 64:96:3] *= -1
    assert np.all(np.abs(np.array(native.linear(mx.array(x), weights)) - x @ values.T) <= allowed(x, values))


def test_what_is_not_a_number_is_not_hidden() -> None:
    weights, _ = packed(8, 128, 4, 32, 5)
    for odd in (float("nan"), float("inf")):
        x = mx.ones((2, 128))
        x[1, 77] = odd
        y = np.array(native.linear(x, weights))
        assert np.isfinite(y[0]).all() and not np.isfinite(y[1]).any()
        x[1] = odd
        y = np.array(native.linear(x, weights))
        assert np.isfinite(y[0]).all() and not np.isfinite(y[1]).any()


@pytest.mark.parametrize("size", [1e-30, 1e-37, 1e-40])
def test_numbers_near_the_smallest_give_next_to_nothing(size: float) -> None:
    weights, _ = packed(8, 128, 4, 32, 5)
    assert np.abs(np.array(native.linear(mx.full((3, 128), size), weights))).max() < 1e-27


@given(rows=st.integers(1, 70), columns=st.integers(1, 150), count=st.sampled_from([1, 3, 4, 9, 40]))
def test_products_with_plain_weights_are_right_for_any_shape(rows: int, columns: int, count: int) -> None:
    weight = mx.random.normal((rows, columns), key=mx.random.key(rows))
    bias = mx.random.normal((rows,), key=mx.random.key(columns))
    x = mx.random.normal((count, columns), key=mx.random.key(count))
    y = native.linear(x, native.plain_weights(weight, bias))
    wide, values = np.array(x, dtype=np.float64), np.array(weight, dtype=np.float64)
    magnitude = np.abs(wide) @ np.abs(values).T + np.abs(np.array(bias))
    assert np.all(np.abs(np.array(y) - (wide @ values.T + np.array(bias))) <= 1e-6 * magnitude)


@pytest.mark.parametrize("bits", native.BITS)
def test_rows_are_looked_up_as_they_are(bits: int) -> None:
    weights, values = packed(21, 256, bits, 64, bits)
    ids = mx.array([[0, 20], [3, 3]])
    rows = native.lookup_rows(ids, weights)
    assert rows.shape == (2, 2, 256)
    assert np.allclose(np.array(rows), values[np.array(ids)], rtol=1e-6, atol=1e-6)
    assert not np.array(native.lookup_rows(mx.array([21, -1]), weights)).any()


def test_leading_axes_and_any_strides_are_kept() -> None:
    weights, _ = packed(24, 128, 4, 32, 1)
    x = mx.random.normal((3, 128, 2), key=mx.random.key(2)).transpose(2, 0, 1)
    y = native.linear(x, weights)
    assert y.shape == (2, 3, 24)
    assert mx.array_equal(y, native.linear(mx.contiguous(x), weights)).item()


@pytest.mark.usefixtures("one_path")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", native.GROUPS)
@pytest.mark.parametrize("halves", [False, True])
def test_a_row_depends_neither_on_which_rows_are_beside_it_nor_on_how_many(bits: int, group: int, halves: bool) -> None:
    weights, _ = packed(50, 384, bits, group, 3, halves=halves)
    x = activations(300, 384, 4, 20.0)
    together = native.linear(x, weights)
    assert mx.array_equal(together, native.linear(x[::-1], weights)[::-1]).item()
    for count in (1, 2, 3, 7):
        assert mx.array_equal(together[:count], native.linear(x[:count], weights)).item()


def test_zeros_and_an_empty_batch_are_fine() -> None:
    weights, _ = packed(8, 128, 8, 32, 5)
    assert mx.array_equal(native.linear(mx.zeros((2, 128)), weights), mx.zeros((2, 8))).item()
    assert native.linear(mx.zeros((0, 128)), weights).shape == (0, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 7}, "bits"),
        ({"group_size": 16}, "group size"),
        ({"bits": 8}, "disagree"),
        ({"scales": mx.zeros((7, 4))}, "matrices"),
        ({"quanta": mx.zeros((8, 16), mx.int32)}, "uint32"),
    ],
)
def test_weights_that_do_not_fit_together_are_refused(change: dict[str, Any], message: str) -> None:
    quanta, scales, biases = mx.quantize(mx.zeros((8, 128)), group_size=32, bits=4)
    asked = {"quanta": quanta, "scales": scales, "biases": biases, "bias": None, "group_size": 32, "bits": 4, **change}
    with pytest.raises(ValueError, match=message):
        native.packed_weights(**asked)


def test_weights_without_columns_are_refused() -> None:
    quanta, scales, biases = (part[:, :0] for part in mx.quantize(mx.zeros((8, 128)), group_size=32, bits=4))
    with pytest.raises(ValueError, match="columns"):
        native.packed_weights(quanta, scales, biases, None, group_size=32, bits=4)
    with pytest.raises(ValueError, match="columns"):
        native.plain_weights(mx.zeros((8, 0)), None)


def test_an_x_of_another_width_is_refused() -> None:
    weights, _ = packed(8, 128, 4, 32, 5)
    with pytest.raises(ValueError, match="width"):
        native.linear(mx.zeros((1, 96)), weights)


def test_no_memory_is_lost() -> None:
    weights, _ = packed(64, 256, 4, 32, 6)
    x = mx.random.normal((4, 256))
    mx.eval(native.linear(x, weights))
    before = settled()
    for _ in range(200):
        mx.eval(native.linear(x, weights))
    assert mx.get_active_memory() <= before + 4 * 64 * 4
