"""Products of few rows with packed weights, against float64."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.packed.kernels import BITS, DTYPES, GROUPS, PackedProduct, Packing
from ingot.kernels.packed.tuning import TUNING, Cut, Tuning
from tests.kernels.packed.weights import BOUNDS, activations, exact, experts, off, packed, product
from tests.kernels.paged.memory import emulated

pytestmark = emulated
FOURS = Packing(4, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_every_packing_is_multiplied_rightly(bits: int, group: int, dtype: mx.Dtype) -> None:
    packing = Packing(bits, group)
    weights = packed(packing, 21, group * 5, dtype)
    x = activations(3, weights.columns, dtype)
    assert off(product(packing, dtype)(x, weights), exact(x, weights)) < BOUNDS[dtype]


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 40), outputs=st.integers(1, 70), groups=st.integers(1, 40), seed=st.integers(0, 99))
def test_any_number_of_rows_outputs_and_groups_is_multiplied_rightly(
    rows: int, outputs: int, groups: int, seed: int
) -> None:
    weights = packed(FOURS, outputs, groups * 64, mx.bfloat16, seed)
    x = activations(rows, weights.columns, mx.bfloat16, seed)
    assert off(product(FOURS, mx.bfloat16)(x, weights), exact(x, weights)) < BOUNDS[mx.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(dtype: mx.Dtype) -> None:
    weights = packed(FOURS, 40, 64 * 19, dtype)
    x, multiply = activations(33, weights.columns, dtype), product(FOURS, dtype)
    together = multiply(x, weights)
    for rows in (1, 2, 8, 9, 16, 17):
        assert mx.array_equal(multiply(x[-rows:], weights), together[-rows:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_multiply_as_each_would_alone(dtype: mx.Dtype) -> None:
    weights = experts(FOURS, 5, 24, 64 * 7, dtype)
    x, multiply, chosen = activations(3, weights.columns, dtype), product(FOURS, dtype), [4, 0, 2, 2, 1, 4]
    found = multiply.gather(x, weights, mx.array(chosen, mx.int32))
    for number, expert in enumerate(chosen):
        row = x[number // 2 : number // 2 + 1]
        assert mx.array_equal(found[number : number + 1], multiply(row, weights.part(expert)))


@pytest.mark.parametrize("cut", [Cut(1, 256), Cut(2, 1024), Cut(4, 256)], ids=str)
@pytest.mark.parametrize("rows", [5, 13])
@pytest.mark.parametrize("groups", [64, 37])
def test_how_much_is_fetched_at_once_changes_no_bits(cut: Cut, rows: int, groups: int) -> None:
    weights = packed(FOURS, 50, 64 * groups, mx.bfloat16)
    x = activations(rows, weights.columns, mx.bfloat16)
    found = product(FOURS, mx.bfloat16, Tuning(wide=1, many=(cut, cut)))(x, weights)
    assert mx.array_equal(found, product(FOURS, mx.bfloat16)(x, weights))
    assert off(found, exact(x, weights)) < BOUNDS[mx.bfloat16]


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
    found = product(FOURS, mx.bfloat16, TUNING, Emulator(seed))(x, weights)
    assert mx.array_equal(found, product(FOURS, mx.bfloat16)(x, weights))


@pytest.mark.parametrize(
    ("packing", "said"),
    [
        (Packing(4, 32, "mxfp4"), "packed as mxfp4"),
        (Packing(1, 64), "of 1 bits"),
        (Packing(4, 16), "groups of 16"),
    ],
    ids=str,
)
def test_a_packing_without_a_kernel_is_named(packing: Packing, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PackedProduct(Emulator(), packing, mx.bfloat16)
