"""Products of few rows with weights of 16 bits, against float64."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.kernels.dense_matmul.kernels import (
    DENSE_TUNING,
    DTYPES,
    SMALL_TILE,
    WIDTHS,
    DenseProduct,
    DenseTuning,
    DenseWeights,
    RegisterCut,
    StreamCut,
    TileCut,
)
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import Kernel, LaunchConfig
from tests.kernels.paged_attention.memory import BOUNDS, emulated

pytestmark = emulated
CUTS = [
    *(RegisterCut(4, 2, 3), RegisterCut(2, 1, 2), RegisterCut(1, 1, 4)),
    *(StreamCut(2, 1, 3), StreamCut(1, 2, 4), StreamCut(3, 1, 2, split=8), StreamCut(4, 2, 5, split=2)),
]


def drawn(rows: int, columns: int, dtype: mx.Dtype = mx.bfloat16, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal((rows, columns), np.float32)).astype(dtype)


def wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def off(found: mx.array, wanted: np.ndarray) -> float:
    return float(np.abs(wide(found) - wanted).max() / np.abs(wanted).max())


def everywhere(cut: RegisterCut | StreamCut) -> DenseTuning:
    return DenseTuning(few=(cut,) * len(WIDTHS), wide=1 << 30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, WIDTHS[-1]), outputs=st.integers(1, 70), chunks=st.integers(1, 100), seed=st.integers(0, 99))
def test_any_number_of_rows_outputs_and_columns_is_multiplied_rightly(
    dtype: mx.Dtype, rows: int, outputs: int, chunks: int, seed: int
) -> None:
    x, weight = drawn(rows, chunks * 8, dtype, seed), drawn(outputs, chunks * 8, dtype, seed + 1)
    assert off(DenseProduct(Emulator())(x, weight), wide(x) @ wide(weight).T) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [512, 8 * 37])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(columns: int, dtype: mx.Dtype) -> None:
    x, weight, product = drawn(WIDTHS[-1], columns, dtype), drawn(20, columns, dtype, 1), DenseProduct(Emulator())
    together = product(x, weight)
    for rows in range(1, WIDTHS[-1]):
        assert mx.array_equal(product(x[-rows:], weight), together[-rows:]), rows


def test_an_outputs_bits_do_not_depend_on_the_outputs_beside_it() -> None:
    tuning = DenseTuning(wide=64, few=(CUTS[0],) * len(WIDTHS))
    x, weight, product = drawn(3, 1088), drawn(70, 1088, seed=1), DenseProduct(Emulator(), tuning)
    assert tuning.cut_of(70, 8) != tuning.cut_of(40, 8)
    assert mx.array_equal(product(x, weight[:40]), product(x, weight)[:, :40])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("rows", [5, 13, 29])
@pytest.mark.parametrize("columns", [1024, 8 * 77])
def test_how_the_work_is_cut_changes_no_bits(cut: RegisterCut | StreamCut, rows: int, columns: int) -> None:
    x, weight = drawn(rows, columns), drawn(40, columns, seed=1)
    found = DenseProduct(Emulator(), everywhere(cut))(x, weight)
    assert mx.array_equal(found, DenseProduct(Emulator())(x, weight))
    assert off(found, wide(x) @ wide(weight).T) < BOUNDS[mx.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_is_added_before_rounding_and_a_residual_after(dtype: mx.Dtype) -> None:
    x, weight, product = drawn(9, 520, dtype), drawn(37, 520, dtype, 1), DenseProduct(Emulator())
    bias, residual = drawn(1, 37, dtype, 2)[0] * 30, drawn(9, 37, dtype, 3) * 30
    biased = product(x, weight, bias=bias)
    assert off(biased, wide(x) @ wide(weight).T + wide(bias)) < BOUNDS[dtype]
    assert mx.array_equal(product(x, weight, residual=residual), product(x, weight) + residual)
    assert mx.array_equal(product(x, weight, bias=bias, residual=residual), biased + residual)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("cut", [DENSE_TUNING.few[0], *CUTS], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_is_applied_to_products_that_were_rounded(dtype: mx.Dtype, cut: RegisterCut | StreamCut) -> None:
    x, weight, product = drawn(9, 520, dtype), drawn(2 * 37, 520, dtype, 1) * 0.1, DenseProduct(Emulator())
    gate, up = mx.split(product(x, weight).astype(mx.float32), 2, axis=-1)
    found = DenseProduct(Emulator(), everywhere(cut)).gated(x, weight)
    assert off(found, wide(nn.silu(gate) * up)) < 3 * BOUNDS[dtype]
    assert mx.array_equal(found, product.gated(x, weight))


def test_what_is_no_number_stays_in_its_own_row() -> None:
    x, weight = drawn(2, 256), drawn(18, 256, seed=1)
    x[1, 7] = float("nan")
    found = DenseProduct(Emulator())(x, weight)
    assert mx.all(mx.isnan(found[1])) and not mx.any(mx.isnan(found[0]))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("cut", [DENSE_TUNING.few[0], DENSE_TUNING.many[-1], *CUTS[3:]], ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_threads_may_run_in_any_order(seed: int, cut: RegisterCut | StreamCut) -> None:
    x, weight = drawn(9, 584), drawn(40, 584, seed=1)
    found = DenseProduct(Emulator(seed), everywhere(cut))(x, weight)
    assert mx.array_equal(found, DenseProduct(Emulator())(x, weight))


def test_weights_of_other_formats_and_odd_columns_have_no_kernel() -> None:
    assert DenseWeights(drawn(4, 16)).is_covered and DenseWeights(drawn(4, 16), drawn(1, 4)[0]).is_covered
    assert not DenseWeights(drawn(4, 12)).is_covered and not DenseWeights(drawn(4, 16, mx.float32)).is_covered
    assert not DenseWeights(drawn(4, 16), drawn(1, 4, mx.float32)[0]).is_covered


def test_how_a_product_is_cut_is_chosen_once_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[int, int]] = []
    choose = DenseTuning.cut_of

    def counted(self: DenseTuning, outputs: int, width: int) -> RegisterCut | StreamCut:
        chosen.append((outputs, width))
        return choose(self, outputs, width)

    def unrun(kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        return [mx.zeros(output.shape, output.dtype) for output in work.outputs]

    monkeypatch.setattr(DenseTuning, "cut_of", counted)
    multiply = DenseProduct(unrun)
    for _ in range(3):
        for outputs in (24, 40):
            for rows in (1, 20):
                given = drawn(rows, 64), drawn(outputs, 64)
                assert multiply(*given).shape == multiply.by(unrun)(*given).shape == (rows, outputs)
    assert sorted(chosen) == [(24, 8), (24, 32), (40, 8), (40, 32)]


@pytest.mark.parametrize("cut", [SMALL_TILE, TileCut(1, 2, 4, 2, 3), TileCut(2, 1, 1, 10, 4, halves=1)], ids=str)
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(33, 90, 520), (70, 264, 72)])
def test_rows_of_a_prompt_have_the_bits_that_they_have_among_few(
    cut: TileCut, rows: int, outputs: int, columns: int
) -> None:
    product = DenseProduct(Emulator(), DenseTuning(prompts=(cut, cut)))
    x, weight, bias = drawn(rows, columns), drawn(outputs, columns, seed=1), drawn(1, outputs, seed=2)[0]
    residual = drawn(rows, outputs, seed=3)

    def found(begin: int, end: int) -> list[mx.array]:
        own, added = mx.contiguous(x[begin:end]), mx.contiguous(residual[begin:end])
        whole = [product(own, weight), product(own, weight, bias=bias), product(own, weight, residual=added)]
        return [*whole, product(own, weight, bias=bias, residual=added), product.gated(own, weight)]

    few = [found(begin, min(begin + 19, rows)) for begin in range(0, rows, 19)]
    for many, parts in zip(found(0, rows), zip(*few, strict=True), strict=True):
        assert mx.array_equal(many, mx.concatenate(parts))
