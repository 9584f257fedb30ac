"""Attention within segments as a native operation, against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native

pytestmark = pytest.mark.skipif(not native.can_attend_segments(), reason=f"{native.advice() or 'an older build'}")

BOUND = 2e-6


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def expected(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    scores = scale * np.einsum("sqhd,skhd->shqk", queries.astype(np.float64), keys)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found: np.ndarray = np.einsum("shqk,skhd->sqhd", weights / weights.sum(axis=-1, keepdims=True), values)
    return found


@pytest.mark.parametrize(
    ("segments", "rows", "keys", "heads", "size"),
    [
        (1, 1, 1, 1, 8),
        (3, 5, 9, 2, 72),
        (1, 200, 200, 4, 16),
        (7, 64, 64, 2, 80),
        (2, 16, 9000, 1, 8),
        (1, 90, 3, 3, 1),
    ],
)
def test_it_is_right_for_any_rows_and_keys(segments: int, rows: int, keys: int, heads: int, size: int) -> None:
    q, k, v = (drawn(seed, segments, count, heads, size) for seed, count in enumerate((rows, keys, keys)))
    found = np.array(native.attend_segments(mx.array(q), mx.array(k), mx.array(v), size**-0.5))
    assert np.abs(found - expected(q, k, v, size**-0.5)).max() < BOUND


def test_scores_that_are_far_apart_leave_one_key() -> None:
    q, k, v = drawn(1, 1, 20, 2, 16), drawn(2, 1, 30, 2, 16), drawn(3, 1, 30, 2, 16)
    found = np.array(native.attend_segments(mx.array(q), mx.array(k), mx.array(v), 1000.0))
    assert np.abs(found - expected(q, k, v, 1000.0)).max() < 1e-4


def test_parts_of_one_product_are_taken_as_they_lie() -> None:
    joint = drawn(4, 60, 3, 2, 16)
    parts = [mx.array(joint)[12:52, part].reshape(2, 20, 2, 16) for part in range(3)]
    found = np.array(native.attend_segments(*parts, 0.25))
    q, k, v = (joint[12:52, part].reshape(2, 20, 2, 16) for part in range(3))
    assert np.abs(found - expected(q, k, v, 0.25)).max() < BOUND


def test_so_are_heads_that_lie_otherwise() -> None:
    q, k, v = (drawn(seed, 2, 3, 25, 16) for seed in range(3))
    found = native.attend_segments(*(mx.array(part).swapaxes(1, 2) for part in (q, k, v)), 0.25)
    right = expected(*(part.swapaxes(1, 2) for part in (q, k, v)), 0.25)
    assert np.abs(np.array(found) - right).max() < BOUND


@pytest.mark.parametrize(
    ("queries", "keys", "values"),
    [
        ((1, 4, 2, 8), (2, 4, 2, 8), (2, 4, 2, 8)),
        ((1, 4, 2, 8), (1, 4, 2, 16), (1, 4, 2, 16)),
        ((1, 4, 2, 8), (1, 4, 2, 8), (1, 5, 2, 8)),
        ((4, 2, 8), (4, 2, 8), (4, 2, 8)),
        ((1, 4, 2, 8), (1, 0, 2, 8), (1, 0, 2, 8)),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused(
    queries: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"segments|alike|nothing"):
        native.attend_segments(mx.zeros(queries), mx.zeros(keys), mx.zeros(values), 1.0)
