"""Products of few rows with packed weights, against float64."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import Kernel, LaunchConfig
from ingot.kernels.packed_matmul.kernels import (
    DTYPES,
    FLOAT_FORMATS,
    MXFP4,
    NVFP4,
    PACKED_TUNING,
    ExpertCurve,
    GatedExpertWeights,
    PackedCut,
    PackedFormat,
    PackedProduct,
    PackedTuning,
    PackedWeights,
)
from ingot.upstream import import_upstream
from tests.kernels.packed_matmul.weights import BOUNDS, PACKINGS, activations, exact, experts, off, packed, product
from tests.kernels.paged_attention.memory import emulated

pytestmark = emulated
FOURS = PackedFormat(4, 64)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_every_packing_is_multiplied_rightly(packing: PackedFormat, dtype: mx.Dtype) -> None:
    weights = packed(packing, 21, packing.held * 5, dtype)
    x = activations(3, weights.columns, dtype)
    assert off(product(packing, dtype)(x, weights), exact(x, weights)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", FLOAT_FORMATS, ids=str)
def test_every_float_is_the_number_that_mlx_unpacks(packing: PackedFormat, dtype: mx.Dtype) -> None:
    """Each code with large and small scales, but none that is no number."""
    codes = np.where(np.arange(256) % 128 == 127, 0, np.arange(256)) if packing.bits == 8 else np.arange(32) * 17 % 256
    words = mx.array(np.tile(codes.astype(np.uint8), (8, 1)).view(np.uint32))
    columns = words.shape[1] * 32 // packing.bits
    large_and_small = (
        [0, 1, 40, 56, 64, 100, 120, 126] if packing == NVFP4 else [117, 120, 126, 127, 128, 129, 131, 134]
    )
    scales = mx.contiguous(mx.repeat(mx.array(large_and_small, mx.uint8)[:, None], columns // packing.group, axis=1))
    weights = PackedWeights.of(packing, words, scales, dtype=dtype)
    found = product(packing, dtype)(mx.eye(columns, dtype=dtype), weights)
    assert mx.array_equal(found.T, weights.unpacked(dtype))


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), outputs=st.integers(1, 70), groups=st.integers(1, 40), seed=st.integers(0, 99))
def test_any_number_of_rows_outputs_and_groups_is_multiplied_rightly(
    rows: int, outputs: int, groups: int, seed: int
) -> None:
    weights = packed(FOURS, outputs, groups * 64, mx.bfloat16, seed)
    x = activations(rows, weights.columns, mx.bfloat16, seed)
    assert off(product(FOURS, mx.bfloat16)(x, weights), exact(x, weights)) < BOUNDS[mx.bfloat16]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", [FOURS, *FLOAT_FORMATS], ids=str)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(packing: PackedFormat, dtype: mx.Dtype) -> None:
    weights = packed(packing, 40, packing.held * 19, dtype)
    x, multiply = activations(33, weights.columns, dtype), product(packing, dtype)
    together = multiply(x, weights)
    for rows in (1, 2, 8, 9, 16, 17):
        assert mx.array_equal(multiply(x[-rows:], weights), together[-rows:])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", [FOURS, *FLOAT_FORMATS], ids=str)
def test_experts_multiply_as_each_would_alone(packing: PackedFormat, dtype: mx.Dtype) -> None:
    weights = experts(packing, 5, 24, packing.held * 7, dtype)
    x, multiply, chosen = activations(3, weights.columns, dtype), product(packing, dtype), [4, 0, 2, 2, 1, 4]
    found = multiply.gather(x, weights, mx.array(chosen, mx.int32))
    for number, expert in enumerate(chosen):
        row = x[number // 2 : number // 2 + 1]
        assert mx.array_equal(found[number : number + 1], multiply(row, weights.part(expert)))


def curve_of(curve: ExpertCurve, gate: mx.array, up: mx.array) -> mx.array:
    """As mlx-lm's experts compute it."""
    activations = import_upstream("mlx_lm.models.activations")
    if curve == "clipped":
        found: mx.array = activations.swiglu_oai(gate, up, 1.5, 2.0)
        return found
    return (nn.silu(gate) if curve == "silu" else nn.gelu_approx(gate)) * up


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("curve", ["silu", "gelu_tanh", "clipped"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("packing", "outputs", "groups"),
    [(FOURS, 24, 7), (FOURS, 37, 16), (PackedFormat(8, 32), 40, 10), (MXFP4, 40, 10), (MXFP4, 37, 16), (NVFP4, 24, 14)],
)
def test_experts_gate_what_they_let_through(
    packing: PackedFormat, outputs: int, groups: int, biased: bool, curve: ExpertCurve, dtype: mx.Dtype
) -> None:
    gate, up = (experts(packing, 5, outputs, packing.group * groups, dtype, seed) for seed in (0, 1))
    x, multiply, chosen = activations(3, gate.columns, dtype) / 8, product(packing, dtype), [4, 0, 2, 2, 1, 4]
    biases = (activations(5, outputs, dtype, 5), activations(5, outputs, dtype, 6)) if biased else None
    numbers, picked = mx.array([1.5, 2.0]), mx.array(chosen, mx.int32)
    found = multiply.gather_gated(x, GatedExpertWeights(gate, up, curve, numbers, biases), picked)
    parts = [multiply.gather(x, weights, picked) for weights in (gate, up)]
    if biases is not None:
        parts = [part + bias[picked] for part, bias in zip(parts, biases, strict=True)]
    wanted = curve_of(curve, *(part.astype(mx.float32) for part in parts)).astype(dtype)
    assert off(found, np.array(wanted.astype(mx.float32))) < 4 * BOUNDS[dtype]
    for number in range(len(chosen)):
        row = x[number // 2 : number // 2 + 1]
        alone = multiply.gather_gated(
            row, GatedExpertWeights(gate, up, curve, numbers, biases), picked[number : number + 1]
        )
        assert mx.array_equal(alone[0], found[number])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_without_a_gate_square_what_is_above_zero(dtype: mx.Dtype) -> None:
    weights, chosen = experts(FOURS, 3, 24, 64 * 5, dtype), mx.array([2, 0, 1, 2], mx.int32)
    x, multiply = activations(2, weights.columns, dtype), product(FOURS, dtype)
    wanted = mx.square(mx.maximum(multiply.gather(x, weights, chosen), 0))
    assert mx.array_equal(multiply.gather_squared(x, weights, chosen), wanted)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "cut", [PackedCut(8, 2, stages=2), PackedCut(8, 1, stages=4, ahead=False), PackedCut(8, 4)], ids=str
)
@pytest.mark.parametrize("rows", [5, 13])
@pytest.mark.parametrize("groups", [64, 37])
def test_how_many_outputs_and_stages_there_are_changes_no_bits(cut: PackedCut, rows: int, groups: int) -> None:
    weights = packed(FOURS, 50, 64 * groups, mx.bfloat16)
    x = activations(rows, weights.columns, mx.bfloat16)
    found = product(FOURS, mx.bfloat16, PackedTuning(wide=1, many=(cut, cut)))(x, weights)
    assert mx.array_equal(
        found, product(FOURS, mx.bfloat16, PackedTuning(few=(PackedCut(8, 1), PackedCut(8, 1))))(x, weights)
    )
    assert off(found, exact(x, weights)) < BOUNDS[mx.bfloat16]


@pytest.mark.parametrize(
    "cut", [PackedCut(4, 2, fetch=128), PackedCut(4, 4, fetch=32), PackedCut(16, 1, fetch=256)], ids=str
)
def test_columns_may_be_dealt_out_to_any_number_of_warps(cut: PackedCut) -> None:
    weights = packed(FOURS, 50, 64 * 37, mx.bfloat16)
    multiply, x = (
        product(FOURS, mx.bfloat16, PackedTuning(few=(cut, cut))),
        activations(11, weights.columns, mx.bfloat16),
    )
    assert off(multiply(x, weights), exact(x, weights)) < BOUNDS[mx.bfloat16]
    assert mx.array_equal(multiply(x[3:4], weights), multiply(x, weights)[3:4])


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("outputs", [4096, 28672])
def test_every_packing_has_memory_for_enough_stages_and_is_summed_alike(packing: PackedFormat, outputs: int) -> None:
    bits, group = packing.bits, packing.held
    cuts = [PACKED_TUNING.cut_of(bits, group, outputs, eights) for eights in (1, 2)]
    for cut in cuts:
        stage = cut.tiles * 16 * cut.depth_of(bits, group) * group * bits // 8
        assert cut.stages >= 3 and cut.warps * cut.stages * stage <= 48 * 1024
    assert len({(cut.warps, cut.depth_of(bits, group)) for cut in cuts}) == 1, "for any number of rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "packing"), [(1, FOURS), (11, FOURS), (3, MXFP4)], ids=str)
def test_what_is_added_is_added_to_the_rounded_product(packing: PackedFormat, rows: int, dtype: mx.Dtype) -> None:
    weights, multiply = packed(packing, 40, packing.held * 7, dtype), product(packing, dtype)
    x, residual = activations(rows, weights.columns, dtype), activations(rows, 40, dtype, 5)
    assert mx.array_equal(multiply(x, weights, residual), multiply(x, weights) + residual)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tuning", [PACKED_TUNING, PackedTuning(wide=1)], ids=["few outputs", "many"])
@pytest.mark.parametrize("outputs", [64, 88])
@pytest.mark.parametrize("rows", [1, 11])
def test_a_gate_and_what_it_lets_through_are_rounded_as_operations_of_their_own(
    rows: int, outputs: int, tuning: PackedTuning
) -> None:
    weights, multiply = packed(FOURS, outputs, 64 * 7, mx.bfloat16), product(FOURS, mx.bfloat16, tuning)
    x = activations(rows, weights.columns, mx.bfloat16)
    gate, other = mx.split(multiply(x, weights), 2, axis=-1)
    grown = mx.exp(mx.abs(gate).astype(mx.float32)).astype(mx.bfloat16)
    less = (1 / (1 + grown)).astype(mx.bfloat16)
    wanted = gate * mx.where(gate < 0, less, 1 - less) * other
    found = multiply.gated(x, weights)
    assert found.shape == (rows, outputs // 2)
    # The exponential itself may be rounded otherwise.
    assert mx.mean(found == wanted) > 0.98 and mx.allclose(found, wanted, rtol=0.02, atol=1e-3)


def test_what_is_no_number_stays_in_its_own_row() -> None:
    weights = packed(FOURS, 18, 256, mx.bfloat16)
    x = activations(2, 256, mx.bfloat16)
    x[1, 7] = float("nan")
    found = product(FOURS, mx.bfloat16)(x, weights)
    assert mx.all(mx.isnan(found[1])) and not mx.any(mx.isnan(found[0]))


@pytest.mark.parametrize("seed", [1, 2])
def test_threads_may_run_in_any_order(seed: int) -> None:
    weights = packed(FOURS, 40, 64 * 9, mx.bfloat16)
    x = activations(9, weights.columns, mx.bfloat16)
    found = product(FOURS, mx.bfloat16, PACKED_TUNING, Emulator(seed))(x, weights)
    assert mx.array_equal(found, product(FOURS, mx.bfloat16)(x, weights))


@pytest.mark.parametrize(
    ("packing", "said"),
    [
        (PackedFormat(4, 64, "mxfp4"), "packed as mxfp4"),
        (PackedFormat(1, 64), "of 1 bits"),
        (PackedFormat(4, 16), "groups of 16"),
    ],
    ids=str,
)
def test_a_packing_without_a_kernel_is_named(packing: PackedFormat, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PackedProduct(Emulator(), packing, mx.bfloat16)


def test_how_a_product_is_cut_is_chosen_once_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[int, ...]] = []
    choose = PackedTuning.cut_of

    def counted(self: PackedTuning, bits: int, group: int, outputs: int, eights: int) -> PackedCut:
        chosen.append((outputs, eights))
        return choose(self, bits, group, outputs, eights)

    monkeypatch.setattr(PackedTuning, "cut_of", counted)
    some, others = packed(FOURS, 24, 64 * 2, mx.bfloat16), packed(FOURS, 40, 64 * 3, mx.bfloat16)
    multiply = product(FOURS, mx.bfloat16, run=_unrun)
    for _ in range(3):
        for weights in (some, others):
            for rows in (1, 9):
                given = activations(rows, weights.columns, mx.bfloat16)
                assert multiply(given, weights).shape == (rows, weights.outputs)
                multiply.by(_unrun)(given, weights)
    assert sorted(chosen) == [(24, 1), (24, 2), (40, 1), (40, 2)]


def _unrun(kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
    """What a launcher is given, without a launch."""
    return [mx.zeros(output.shape, output.dtype) for output in work.outputs]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(
    "packing", [FOURS, PackedFormat(3, 64), PackedFormat(8, 32), PackedFormat(4, 128), MXFP4, NVFP4]
)
def test_rows_of_a_prompt_have_the_bits_that_they_have_among_few(packing: PackedFormat, dtype: mx.Dtype) -> None:
    weights = packed(packing, 90, packing.held * 10, dtype)
    x, residual = activations(75, weights.columns, dtype), activations(75, 90, dtype, seed=3)
    multiply = PackedProduct(Emulator(), packing, dtype)

    def found(begin: int, end: int) -> list[mx.array]:
        own = mx.contiguous(x[begin:end])
        return [multiply(own, weights), multiply(own, weights, residual[begin:end]), multiply.gated(own, weights)]

    few = [found(begin, min(begin + 15, 75)) for begin in range(0, 75, 15)]
    for many, parts in zip(found(0, 75), zip(*few, strict=True), strict=True):
        assert mx.array_equal(many, mx.concatenate(parts))
