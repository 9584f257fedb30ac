"""What a stack of layers needs besides products and attention, against plain operations."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from ingot.kernels.decode_graph.kernels import RmsNormKernel, add_bias, add_residual, gate_states
from ingot.kernels.gpu.emulator import Emulator
from tests.kernels.paged_attention.memory import BOUNDS, emulated

pytestmark = emulated
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def drawn(*shape: int, dtype: mx.Dtype, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def off(found: mx.array, wanted: mx.array) -> float:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    wide = found.astype(mx.float32), wanted.astype(mx.float32)
    return float(mx.abs(wide[0] - wide[1]).max() / mx.abs(wide[1]).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 96, 1024, 1500])
def test_sums_are_normed(size: int, dtype: mx.Dtype) -> None:
    states, added = drawn(3, size, dtype=dtype), drawn(3, size, dtype=dtype, seed=1)
    norm = RmsNormKernel(drawn(size, dtype=dtype, seed=2), 1e-5)
    sums, normed = norm(Emulator(seed=3), states, added)
    assert mx.array_equal(sums, states + added)
    assert off(normed, mx.fast.rms_norm(sums, norm.weight, 1e-5)) < BOUNDS[dtype]


def test_the_first_norm_adds_nothing() -> None:
    states, norm = drawn(2, 64, dtype=mx.float32), RmsNormKernel(mx.ones(64), 1e-5)
    same, normed = norm(Emulator(), states, None)
    assert same is states
    assert off(normed, mx.fast.rms_norm(states, norm.weight, 1e-5)) < BOUNDS[mx.float32]


def test_the_last_sum_is_not_normed() -> None:
    states, added = drawn(2, 64, dtype=mx.bfloat16), drawn(2, 64, dtype=mx.bfloat16, seed=1)
    assert mx.array_equal(add_residual(Emulator(), states, added, RmsNormKernel(mx.ones(64), 1e-5)), states + added)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_are_those_of_plain_operations(dtype: mx.Dtype) -> None:
    both = drawn(3, 2 * 300, dtype=dtype)
    wanted = nn.silu(both[:, :300]) * both[:, 300:]
    assert off(gate_states(Emulator(), both), wanted) < BOUNDS[dtype]


def test_biases_are_added() -> None:
    product, bias = drawn(3, 300, dtype=mx.float16), drawn(300, dtype=mx.float16, seed=1)
    assert mx.array_equal(add_bias(Emulator(), product, bias), product + bias)
