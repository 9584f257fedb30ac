"""Blocks of GGUF files as the native kernels take and read them, against the gguf package's own numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native
from ingot.models.gguf.quant_types import BLOCK_BITS, PACKED_BITS, SMALL_BLOCKS
from tests.kernels.cpu.test_weights import activations, allowed
from tests.models.gguf.making import random_rows

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")

KINDS = sorted(BLOCK_BITS)


def blocks(kind: Kind, rows: int, columns: int, seed: int) -> tuple[Any, np.ndarray, int]:
    """Random weights as the kernels take them, as plain numbers, and their bytes in a file."""
    raw = random_rows(np.random.default_rng(seed), kind, rows, columns)
    return native.block_weights(mx.array(raw), None, BLOCK_BITS[kind]), dequantize(raw, kind), raw.nbytes


@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 70),
    width=st.integers(1, 3),
    count=st.sampled_from([1, 2, 3, 4, 5, 8, 16, 17, 40, 300]),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([1e-6, 1.0, 1e4]),
    outlier=st.sampled_from([1.0, 10.0, 1000.0]),
)
def test_products_with_blocks_are_right_for_any_shape(
    kind: Kind, rows: int, width: int, count: int, seed: int, spread: float, outlier: float
) -> None:
    weights, values, _ = blocks(kind, rows, 256 * width, seed)
    x = spread * activations(count, 256 * width, seed + 1, outlier)
    y = native.linear(x, weights)
    wide = np.array(x, dtype=np.float64)
    # Sums are of quanta, which are counted from nought or from the least number on: half of them may cancel out.
    slack = 2e-6 * np.abs(wide) @ (2 * np.abs(values).max(axis=1, keepdims=True) * np.ones_like(values)).T
    assert np.all(np.abs(np.array(y) - wide @ values.astype(np.float64).T) <= allowed(wide, values) + slack)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_blocks_are_looked_up_exactly(kind: Kind) -> None:
    weights, values, _ = blocks(kind, 21, 512, kind)
    ids = mx.array([[0, 20], [3, 3]])
    assert np.array_equal(np.array(native.lookup_rows(ids, weights)), values[np.array(ids)])
    assert not np.array(native.lookup_rows(mx.array([21, -1]), weights)).any()


@pytest.mark.usefixtures("one_path")
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_neither_on_which_rows_are_beside_it_nor_on_how_many(kind: Kind) -> None:
    weights, _, _ = blocks(kind, 50, 512, 3)
    x = activations(300, 512, 4, 20.0)
    together = native.linear(x, weights)
    assert mx.array_equal(together, native.linear(x[::-1], weights)[::-1]).item()
    for count in (1, 2, 3, 7):
        assert mx.array_equal(together[:count], native.linear(x[:count], weights)).item()


@pytest.mark.usefixtures("one_path")
@pytest.mark.parametrize("kind", KINDS)
def test_one_large_number_takes_no_bits_from_the_others(kind: Kind) -> None:
    weights, values, _ = blocks(kind, 40, 512, 7)
    x = np.array(mx.random.normal((4, 512), key=mx.random.key(8)))
    errors = []
    for large in (25.0, 0.0):
        x[:, 100] = large
        exact = x.astype(np.float64) @ values.T
        errors.append(np.linalg.norm(np.array(native.linear(mx.array(x), weights)) - exact) / np.linalg.norm(exact))
    assert errors[0] < 1.6 * errors[1]  # without a rest it would be more than twice as much


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_number_is_not_hidden(kind: Kind) -> None:
    weights, _, _ = blocks(kind, 8, 256, 5)
    for odd in (float("nan"), float("inf")):
        x = mx.ones((2, 256))
        x[1, 77] = odd
        y = np.array(native.linear(x, weights))
        assert np.isfinite(y[0]).all() and not np.isfinite(y[1]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_take_hardly_more_memory_than_in_the_file(kind: Kind) -> None:
    weights, _, size = blocks(kind, 64, 1024, 6)
    assert sum(array.nbytes for array in weights.arrays) <= 1.04 * size


@pytest.mark.parametrize("kind", KINDS)
def test_experts_have_blocks_of_their_own(kind: Kind) -> None:
    raw = random_rows(np.random.default_rng(9), kind, 3 * 20, 256)
    values = dequantize(raw, kind).reshape(3, 20, 256)
    experts = native.block_weights(mx.array(raw.reshape(3, 20, -1)), None, BLOCK_BITS[kind])
    x = mx.random.normal((2, 256), key=mx.random.key(1))
    y = np.array(native.gather_experts(x, mx.array([[2, 0], [1, 2]]), experts))
    for token, chosen in enumerate([[2, 0], [1, 2]]):
        for place, expert in enumerate(chosen):
            expected = np.array(x)[token].astype(np.float64) @ values[expert].T
            assert np.abs(y[token, place] - expected).max() <= 0.02 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("given", "bits", "message"),
    [
        (mx.zeros((8, 210), mx.uint8), 7, "bits"),
        (mx.zeros((8, 144), mx.uint8), 6, "divide"),
        (mx.zeros((8, 210), mx.int32), 6, "bytes"),
        (mx.zeros((210,), mx.uint8), 6, "bytes"),
        (mx.zeros((8, 0), mx.uint8), 6, "columns"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(given: mx.array, bits: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.block_weights(given, None, bits)


@pytest.mark.parametrize("kind", sorted(SMALL_BLOCKS), ids=lambda kind: kind.name)
@pytest.mark.parametrize("head", [0, 8])
def test_rows_of_a_file_are_read_as_its_own_numbers(kind: Kind, head: int, tmp_path: Path) -> None:
    rows, columns, before = 48, 96, 37
    pieces = [random_rows(np.random.default_rng(seed), kind, rows, columns) for seed in (1, 2)]
    file = tmp_path / "any.gguf"
    file.write_bytes(b"GGUF".ljust(before) + b"".join(raw.tobytes() for raw in pieces))
    status = file.stat()
    opened = native.gguf_file(str(file), status.st_size, status.st_mtime_ns)
    size = pieces[0].shape[1]
    places = [(opened, before), (opened, before + rows * size)]
    both = np.concatenate(pieces)
    order = np.arange(2 * rows) if not head else np.arange(2 * rows).reshape(-1, head // 2, 2).swapaxes(1, 2).ravel()
    assert np.array_equal(native.file_bytes(places, rows, size, head), both[order])
    packed = native.file_packed(places, rows, size, head, PACKED_BITS[kind], minima=SMALL_BLOCKS[kind])
    found = mx.dequantize(
        *(part.astype(mx.float32) if part.dtype == mx.float16 else part for part in packed), 32, PACKED_BITS[kind]
    )
    expected = dequantize(both, kind)[order]
    np.testing.assert_allclose(found, expected, rtol=0, atol=np.abs(expected).max() * 2**-22)


def test_threads_share_a_file_of_more_than_they_read_at_once(tmp_path: Path) -> None:
    raw = random_rows(np.random.default_rng(3), Kind.Q8_0, 5000, 512)
    file = tmp_path / "any.gguf"
    file.write_bytes(b"GGUF" + raw.tobytes())
    opened = native.gguf_file(str(file), file.stat().st_size, file.stat().st_mtime_ns)
    assert np.array_equal(native.file_bytes([(opened, 4)], *raw.shape, 0), raw)


def test_a_file_that_ends_before_its_tensor_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "any.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    opened = native.gguf_file(str(file), file.stat().st_size, file.stat().st_mtime_ns)
    with pytest.raises(RuntimeError, match="ends before its tensors do"):
        mx.eval(native.file_bytes([(opened, 4)], 10, 11, 0))
