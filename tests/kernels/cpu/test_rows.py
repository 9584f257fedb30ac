"""Norms and gates as native operations, against float64."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")

BOUND = 2e-6  # of the largest value


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@given(rows=st.integers(1, 40), width=st.integers(1, 700), shift=st.sampled_from([0.0, 3.0]))
def test_an_rms_norm_is_right_at_any_width(rows: int, width: int, shift: float) -> None:
    x, weight = drawn(1, rows, width) + np.float32(shift), drawn(2, width)
    found = np.array(native.rms_norm(mx.array(x), mx.array(weight), 1e-5))
    exact = x.astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-5) * weight
    assert np.abs(found - expected).max() <= BOUND * max(1.0, np.abs(expected).max())


@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 700),
    shift=st.sampled_from([0.0, 3.0]),
    weighted=st.booleans(),
    biased=st.booleans(),
)
def test_a_layer_norm_is_right_at_any_width(rows: int, width: int, shift: float, weighted: bool, biased: bool) -> None:
    x, weight, bias = drawn(1, rows, width) + np.float32(shift), drawn(2, width), drawn(3, width)
    given_weight, given_bias = mx.array(weight) if weighted else None, mx.array(bias) if biased else None
    found = np.array(native.layer_norm(mx.array(x), given_weight, given_bias, 1e-3))
    exact = x.astype(np.float64)
    expected = (exact - exact.mean(axis=-1, keepdims=True)) / np.sqrt(exact.var(axis=-1, keepdims=True) + 1e-3)
    expected = expected * (weight if weighted else 1.0) + (bias if biased else 0.0)
    # A mean that is far from zero takes digits off what is left of it.
    assert np.abs(found - expected).max() <= 20 * BOUND * max(1.0, np.abs(expected).max())


ACTS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("act", ACTS)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 30), width=st.integers(1, 700), scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_a_gate_is_right_apart_from_and_joined_to_what_it_gates(act: str, rows: int, width: int, scale: float) -> None:
    gate, up = drawn(1, rows, width) * np.float32(scale), drawn(2, rows, width)
    expected = ACTS[act](np.clip(gate.astype(np.float64), -700, 700)) * up
    apart = np.array(native.gated_activation(act, mx.array(gate), mx.array(up)))
    joined = np.array(native.gated_activation(act, mx.array(np.concatenate([gate, up], axis=-1))))
    assert np.abs(apart - expected).max() <= BOUND * max(1.0, np.abs(expected).max())
    assert np.array_equal(apart, joined)


def test_gates_of_huge_numbers_do_not_overflow() -> None:
    gate = mx.array([-3e38, -1e10, -100.0, 100.0, 1e10, 3e38])
    for act in ("silu", "gelu", "sigmoid"):
        found = np.array(native.gated_activation(act, gate, mx.ones(6)))
        assert np.isfinite(found).all() and np.allclose(found[:3], 0, atol=1e-30)


def test_inputs_of_any_strides_are_understood() -> None:
    x = mx.array(drawn(1, 6, 8)).T
    assert mx.allclose(native.rms_norm(x, mx.ones(6), 1e-5), mx.fast.rms_norm(x, mx.ones(6), 1e-5), atol=1e-6).item()
    assert mx.allclose(
        native.gated_activation("silu", x, x), native.gated_activation("silu", mx.contiguous(x), mx.contiguous(x))
    ).item()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="wrong size"):
        native.rms_norm(mx.ones((2, 3)), mx.ones(4), 1e-5)
    with pytest.raises(ValueError, match="wrong size"):
        native.layer_norm(mx.ones((2, 3)), None, mx.ones(4), 1e-5)
    with pytest.raises(ValueError, match="alike"):
        native.gated_activation("silu", mx.ones((2, 3)), mx.ones((2, 4)))
    with pytest.raises(ValueError, match="alike"):
        native.gated_activation("silu", mx.ones((2, 3)))
