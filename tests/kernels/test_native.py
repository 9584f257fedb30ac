"""The native kernels against float64, on every instruction set that can be asked for here."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels import native

# Where everything is expected to be built, missing kernels are a failure and not a reason to skip.
EXPECTED = sys.platform == "linux" and "CI" in os.environ
pytestmark = pytest.mark.skipif(not native.available() and not EXPECTED, reason=f"{native.advice()}")

# Of the products' magnitudes: activations are rounded to 16 bits, many rows are multiplied in float32.
BOUND = 4e-5


def packed(rows: int, columns: int, bits: int, group: int, seed: int) -> tuple[mx.array, mx.array, mx.array]:
    weights = mx.random.normal((rows, columns), key=mx.random.key(seed))
    return mx.quantize(weights, group_size=group, bits=bits)


def exact(quanta: mx.array, scales: mx.array, biases: mx.array, group: int, bits: int) -> np.ndarray:
    """The weights in float64, unpacked here by hand."""
    words = np.array(quanta).astype(np.uint64)
    shifts = np.arange(0, 32, bits, dtype=np.uint64)
    values = ((words[..., None] >> shifts) & np.uint64((1 << bits) - 1)).reshape(words.shape[0], -1)
    wide = lambda array: np.repeat(np.array(array, dtype=np.float64), group, axis=1)  # noqa: E731
    return values * wide(scales) + wide(biases)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 5),
    count=st.sampled_from([1, 2, 3, 4, 5, 16, 17, 40]),
    bits=st.sampled_from(native.BITS),
    group=st.sampled_from(native.GROUPS),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_products_are_right_for_any_shape(
    rows: int, width: int, count: int, bits: int, group: int, seed: int, spread: float
) -> None:
    columns = width * 128
    quanta, scales, biases = packed(rows, columns, bits, group, seed)
    x = spread * mx.random.normal((count, columns), key=mx.random.key(seed + 1))
    y = native.linear(x, quanta, scales, biases, group, bits)
    weights, wide = exact(quanta, scales, biases, group, bits), np.array(x, dtype=np.float64)
    magnitude = np.abs(wide) @ np.abs(weights).T
    assert y.shape == (count, rows) and y.dtype == mx.float32
    assert np.all(np.abs(np.array(y) - wide @ weights.T) <= BOUND * magnitude)


def test_leading_axes_and_any_strides_are_kept() -> None:
    quanta, scales, biases = packed(24, 128, 4, 32, 1)
    x = mx.random.normal((3, 128, 2), key=mx.random.key(2)).transpose(2, 0, 1)
    y = native.linear(x, quanta, scales, biases, 32, 4)
    assert y.shape == (2, 3, 24)
    assert mx.array_equal(y, native.linear(mx.contiguous(x), quanta, scales, biases, 32, 4)).item()


def test_a_row_does_not_depend_on_which_rows_are_beside_it() -> None:
    quanta, scales, biases = packed(50, 256, 4, 64, 3)
    x = mx.random.normal((8, 256), key=mx.random.key(4))
    together = native.linear(x, quanta, scales, biases, 64, 4)
    backwards = native.linear(x[::-1], quanta, scales, biases, 64, 4)[::-1]
    assert mx.array_equal(together, backwards).item()


def test_zeros_and_an_empty_batch_are_fine() -> None:
    quanta, scales, biases = packed(8, 128, 8, 32, 5)
    assert mx.array_equal(native.linear(mx.zeros((2, 128)), quanta, scales, biases, 32, 8), mx.zeros((2, 8))).item()
    assert native.linear(mx.zeros((0, 128)), quanta, scales, biases, 32, 8).shape == (0, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits"),
        ({"group_size": 16}, "group size"),
        ({"group_size": 64}, "width"),
        ({"x": mx.zeros((1, 96))}, "width"),
        ({"scales": mx.zeros((8, 4), mx.float16)}, "float32"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, object], message: str) -> None:
    quanta, scales, biases = packed(8, 128, 4, 32, 5)
    given_: dict[str, object] = {"x": mx.zeros((1, 128)), "scales": scales, "group_size": 32, "bits": 4, **change}
    with pytest.raises(ValueError, match=message):
        native.linear(
            given_["x"],
            quanta,
            given_["scales"],
            biases,
            given_["group_size"],
            given_["bits"],  # type: ignore[arg-type]
        )


def test_no_memory_is_lost() -> None:
    quanta, scales, biases = packed(64, 256, 4, 32, 6)
    x = mx.random.normal((4, 256))
    mx.eval(native.linear(x, quanta, scales, biases, 32, 4))
    before = mx.get_active_memory()
    for _ in range(200):
        mx.eval(native.linear(x, quanta, scales, biases, 32, 4))
    assert mx.get_active_memory() <= before + 4 * 64 * 4


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_slower_instruction_sets_give_the_same_numbers(isa: str) -> None:
    if os.environ.get("INGOT_ISA"):
        pytest.skip("already running with another instruction set")
    environment = {**os.environ, "INGOT_ISA": isa}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "right_for_any_shape", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:]
