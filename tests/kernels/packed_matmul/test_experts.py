"""Experts of many tokens: sorted by expert, and multiplied by packed weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.launcher import Launcher
from ingot.kernels.packed_matmul.experts import (
    DTYPES,
    GROUPED_TUNING,
    ExpertWeights,
    GroupedExperts,
    GroupedTuning,
    arrange_columns,
)
from ingot.kernels.packed_matmul.kernels import MXFP4, PackedFormat
from tests.kernels.packed_matmul.weights import PACKINGS
from tests.kernels.paged_attention.memory import emulated

pytestmark = emulated

FOURS = PackedFormat(4, 64)
BOUNDS = {mx.float16: 2**-8, mx.bfloat16: 2**-5}
"""Of the largest number: weights, activations and products are rounded."""


def projection(
    packing: PackedFormat, shape: tuple[int, int, int], dtype: mx.Dtype, *, seed: int = 0, biased: bool = False
) -> ExpertWeights:
    """Of so many experts, outputs and columns."""
    count, outputs, columns = shape
    drawn = np.random.default_rng(seed).standard_normal((count, outputs, columns + 1), np.float32)
    weight, bias = mx.array(drawn[..., 1:] * columns**-0.5).astype(dtype), mx.array(drawn[..., 0]).astype(dtype)
    words, scales, *biases = mx.quantize(weight, packing.group, packing.bits, packing.mode)
    return ExpertWeights(packing, words, scales, biases[0] if biases else None, bias if biased else None)


def layer(
    packing: PackedFormat,
    dtype: mx.Dtype = mx.bfloat16,
    *,
    count: int = 5,
    hidden: int = 128,
    inner: int = 192,
    biased: bool = False,
    run: Launcher | None = None,
    **options: Any,
) -> GroupedExperts:
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    parts = (projection(packing, (count, *size), dtype, seed=i, biased=biased) for i, size in enumerate(sizes))
    return GroupedExperts(run or Emulator(3), *parts, dtype=dtype, **options)


def tokens(experts: GroupedExperts, count: int, each: int = 2, seed: int = 1) -> tuple[mx.array, mx.array]:
    """And the experts that they choose: never the one before the last."""
    drawn, total = np.random.default_rng(seed), experts.gate.experts
    x = mx.array(drawn.standard_normal((count, experts.gate.columns), np.float32)).astype(experts.dtype)
    others = [expert for expert in range(total) if expert != total - 2]
    chosen = np.stack([drawn.permutation(others)[:each] for _ in range(count)])
    return x, mx.array(chosen.astype(np.int32))


ACTIVATIONS = {
    "silu": lambda gate, up: nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: nn.gelu_approx(gate) * up,
    "swiglu_oai": lambda gate, up: (
        (mx.clip(up, -7, 7) + 1) * mx.minimum(gate, 7) * mx.sigmoid(1.702 * mx.minimum(gate, 7))
    ),
}


def off(experts: GroupedExperts, x: mx.array, chosen: mx.array, activation: str = "silu") -> float:
    found, wanted = np.array(experts(x, chosen).astype(mx.float32)), np.zeros((*chosen.shape, experts.down.outputs))
    for at, expert in np.ndenumerate(np.array(chosen)):
        row = x[at[0]][None]
        gate, up = experts.gate.multiplied(row, expert), experts.up.multiplied(row, expert)
        wanted[at] = np.array(experts.down.multiplied(ACTIVATIONS[activation](gate, up), expert))[0]
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_every_packing_is_multiplied_rightly(packing: PackedFormat, dtype: mx.Dtype) -> None:
    experts = layer(packing, dtype, inner=128)
    assert off(experts, *tokens(experts, 23)) < BOUNDS[dtype]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("packing", [FOURS, MXFP4], ids=str)
def test_every_activation_with_biases_is_computed_rightly(
    packing: PackedFormat, activation: Any, dtype: mx.Dtype
) -> None:
    experts = layer(packing, dtype, hidden=64 * 3, biased=True, activation=activation)
    assert off(experts, *tokens(experts, 20), activation) < BOUNDS[dtype]


def test_an_activation_that_kernels_do_not_know_is_computed_behind_the_projections() -> None:
    experts = layer(FOURS, activation=ACTIVATIONS["silu"])
    assert off(experts, *tokens(experts, 20)) < BOUNDS[mx.bfloat16]


@pytest.mark.parametrize(
    "tuning",
    [
        *(GroupedTuning((32,)), GroupedTuning((128,), stages=3), GroupedTuning((128,), fours=2, stages=5)),
        GroupedTuning((64,), units=False),
    ],
)
def test_a_tokens_bits_depend_on_nothing_but_its_experts(tuning: GroupedTuning) -> None:
    experts = layer(FOURS, count=3)
    x, chosen = tokens(experts, 170)
    wanted = experts.with_rows(64)(x, chosen)
    other = layer(FOURS, count=3, tuning=tuning, run=Emulator(11))
    assert mx.array_equal(other(x, chosen), wanted), "however rows are cut"
    few = [7, 160, 3]
    assert mx.array_equal(other(x[few], chosen[few]), wanted[few]), "alone"
    assert mx.array_equal(other(x[::-1], chosen[::-1]), wanted[::-1]), "in another order"


@pytest.mark.parametrize(("count", "total", "each"), [(1, 3, 1), (37, 6, 4), (300, 4, 3), (5, 130, 8)])
def test_pairs_are_sorted_by_expert_in_their_order(count: int, total: int, each: int) -> None:
    experts = layer(PackedFormat(8, 64), count=total, hidden=64, inner=64)
    x, chosen = tokens(experts, count, min(each, total - 1))
    arranged, order, offsets = experts.sorted_rows(x, chosen)
    flat = np.array(chosen).reshape(-1)
    assert np.array(order).tolist() == np.argsort(flat, kind="stable").tolist()
    assert np.array(offsets).tolist() == np.searchsorted(np.sort(flat), np.arange(total + 1)).tolist()
    assert mx.array_equal(arranged, arrange_columns(x))


def test_how_many_rows_are_cut_follows_how_many_an_expert_has() -> None:
    assert GROUPED_TUNING.rows_of(pairs=512 * 8, experts=128) == 32
    assert GROUPED_TUNING.rows_of(pairs=2048 * 8, experts=128) == 128
    assert GROUPED_TUNING.rows_of(pairs=65536 * 8, experts=8) == 128


@pytest.mark.parametrize(
    ("packing", "dtype", "sizes", "said"),
    [
        (PackedFormat(4, 32, "mxfp6"), mx.bfloat16, (64, 64), "experts of 4 bits in groups of 32, mxfp6"),
        (FOURS, mx.float32, (64, 64), "experts for activations in mlx.core.float32"),
        (PackedFormat(4, 32), mx.bfloat16, (64, 96), "experts of 64x96: there are kernels for multiples of 64"),
    ],
)
def test_experts_without_a_kernel_are_named(
    packing: PackedFormat, dtype: mx.Dtype, sizes: tuple[int, int], said: str
) -> None:
    weights = replace(projection(PackedFormat(4, packing.group), (2, *sizes), dtype), packing=packing)
    assert str(weights.unsupported(dtype)).startswith(said)
    with pytest.raises(ValueError, match=said):
        GroupedExperts(Emulator(), weights, weights, weights, dtype=dtype)


def test_gate_and_up_projections_are_of_one_kind() -> None:
    gate = projection(FOURS, (2, 64, 64), mx.bfloat16)
    for other in (replace(gate, bias=mx.zeros((2, 64), mx.bfloat16)), projection(FOURS, (2, 128, 64), mx.bfloat16)):
        with pytest.raises(ValueError, match="they are multiplied at once"):
            GroupedExperts(Emulator(), gate, other, gate, dtype=mx.bfloat16)
