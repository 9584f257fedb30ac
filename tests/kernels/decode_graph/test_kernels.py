"""What a stack of layers needs besides products and attention, against plain operations."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from ingot.kernels.decode_graph.kernels import (
    Gate,
    JointNorm,
    NormWeights,
    ResidualNorm,
    add_bias,
    gate_heads,
    gate_states,
    take_heads,
)
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
    weight = drawn(size, dtype=dtype, seed=2)
    sums, normed = ResidualNorm(NormWeights(weight, 1e-5))(Emulator(seed=3), states, added)
    assert mx.array_equal(sums, states + added)
    assert off(normed, mx.fast.rms_norm(sums, weight, 1e-5)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [96, 1500])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norms_take_the_mean_from_sums_first(biased: bool, size: int, dtype: mx.Dtype) -> None:
    states, added = 3 + drawn(3, size, dtype=dtype), drawn(3, size, dtype=dtype, seed=1)
    weight, bias = drawn(size, dtype=dtype, seed=2), drawn(size, dtype=dtype, seed=3) if biased else None
    norm = ResidualNorm(NormWeights(weight, 1e-5, centred=True, bias=bias))
    sums, normed = norm(Emulator(seed=3), states, added)
    assert mx.array_equal(sums, states + added)
    assert off(normed, mx.fast.layer_norm(sums, weight, bias, 1e-5)) < 2 * BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [96, 1500])
def test_what_is_added_is_normed_first_where_a_family_does_so(size: int, dtype: mx.Dtype) -> None:
    states, added = drawn(3, size, dtype=dtype), 5 * drawn(3, size, dtype=dtype, seed=1)
    before, after = drawn(size, dtype=dtype, seed=2), drawn(size, dtype=dtype, seed=4)
    norm = ResidualNorm(NormWeights(before, 1e-5), NormWeights(after, 0.5))
    sums, normed = norm(Emulator(seed=3), states, added)
    wanted = states + mx.fast.rms_norm(added, after, 0.5)
    assert off(sums, wanted) < BOUNDS[dtype]
    assert off(normed, mx.fast.rms_norm(wanted, before, 1e-5)) < 2 * BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_added_is_multiplied_as_plain_operations_do(dtype: mx.Dtype) -> None:
    states, added = drawn(3, 64, dtype=dtype), drawn(3, 64, dtype=dtype, seed=1)
    sums, _ = ResidualNorm(None, multiplier=0.22)(Emulator(), states, added)
    assert mx.array_equal(sums, states + added * 0.22)


def test_sums_in_float16_are_kept_finite_where_a_family_does_so() -> None:
    states, added = mx.full((2, 64), 6e4, mx.float16), mx.full((2, 64), 6e4, mx.float16)
    clipped, _ = ResidualNorm(None, clipped=True)(Emulator(), -states, -added)
    assert mx.array_equal(clipped, mx.full((2, 64), -65504, mx.float16))
    assert mx.isinf(ResidualNorm(None)(Emulator(), states, added)[0]).all()


def test_the_first_norm_adds_nothing() -> None:
    states, norm = drawn(2, 64, dtype=mx.float32), ResidualNorm(NormWeights(mx.ones(64), 1e-5))
    same, normed = norm(Emulator(), states, None)
    assert same is states
    assert off(normed, mx.fast.rms_norm(states, None, 1e-5)) < BOUNDS[mx.float32]


def test_the_last_sum_is_not_normed() -> None:
    states, added = drawn(2, 64, dtype=mx.bfloat16), drawn(2, 64, dtype=mx.bfloat16, seed=1)
    sums, same = ResidualNorm(None)(Emulator(), states, added)
    assert mx.array_equal(sums, states + added) and same is sums


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "gelu"])
def test_gates_are_those_of_plain_operations(gate: Gate, dtype: mx.Dtype) -> None:
    both = drawn(3, 2 * 300, dtype=dtype)
    curve = {"silu": nn.silu, "gelu_tanh": nn.gelu_approx, "gelu": nn.gelu}[gate]
    wanted = curve(both[:, :300]) * both[:, 300:]
    assert off(gate_states(Emulator(), both, gate), wanted) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squares_of_what_is_above_zero_are_those_of_plain_operations(dtype: mx.Dtype) -> None:
    x = drawn(3, 300, dtype=dtype)
    assert off(gate_states(Emulator(), x, "relu2"), nn.relu2(x)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_are_normed_as_one_and_so_are_keys(dtype: mx.Dtype) -> None:
    projected, weights = drawn(3, 600 + 2 * 96, dtype=dtype), drawn(696, dtype=dtype, seed=1)
    norm = JointNorm(NormWeights(weights[:600], 1e-5), NormWeights(weights[600:], 0.5))
    queries, keys, values = mx.split(projected, [600, 696], axis=-1)
    wanted = [mx.fast.rms_norm(queries, weights[:600], 1e-5), mx.fast.rms_norm(keys, weights[600:], 0.5), values]
    found = norm(Emulator(seed=3), projected)
    assert off(found, mx.concatenate(wanted, axis=-1)) < BOUNDS[dtype]
    assert mx.array_equal(found[:, 696:], values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_gated_by_what_is_behind_each_heads_queries(dtype: mx.Dtype) -> None:
    attended, projected = drawn(3, 5, 24, dtype=dtype), drawn(3, 5 * 48 + 2 * 48, dtype=dtype, seed=1)
    gates = projected[:, : 5 * 48].reshape(3, 5, 2, 24)[:, :, 1]
    found = gate_heads(Emulator(), attended, projected, behind_queries=True)
    assert off(found, attended * mx.sigmoid(gates)) < BOUNDS[dtype]


@pytest.mark.parametrize("each", [1, 24], ids=["a head", "a number"])
def test_attention_is_gated_by_one_number_for_each_head_or_each_number(each: int) -> None:
    attended, gates = drawn(3, 5, 24, dtype=mx.float32), 4 * drawn(3, 5 * each, dtype=mx.float32, seed=1)
    opened = nn.softplus(gates).reshape(3, 5, each)
    assert off(gate_heads(Emulator(), attended, gates, "softplus"), attended * opened) < BOUNDS[mx.float32]


def test_the_first_numbers_of_heads_are_taken_head_by_head() -> None:
    projected = drawn(3, 4 * 40 + 24, dtype=mx.bfloat16)
    wanted = projected[:, :160].reshape(3, 4, 40)[..., :25].swapaxes(0, 1)
    assert mx.array_equal(take_heads(Emulator(), projected, 4, 40, 25), wanted)


def test_biases_are_added() -> None:
    product, bias = drawn(3, 300, dtype=mx.float16), drawn(300, dtype=mx.float16, seed=1)
    assert mx.array_equal(add_bias(Emulator(), product, bias), product + bias)
