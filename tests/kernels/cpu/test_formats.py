"""Weights in the number formats of files, against float64, and models of 16 bits against MLX in float32."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native
from ingot.kernels.device import Device
from ingot.models.adapter import adapt_model
from ingot.models.layers.modules import DenseEmbedding, DenseLinear, PackedLinear
from ingot.models.precision import settle_precision
from tests import tiny
from tests.kernels.cpu.rounding import WIDE_BOUND, half_steps
from tests.kernels.cpu.test_experts import greedy

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")

HERE = Device("cpu", "a CPU", 1 << 34)
NARROW = {"bfloat16": mx.bfloat16, "float16": mx.float16}
FORMS = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


@given(
    dtype=st.sampled_from(sorted(NARROW)),
    rows=st.integers(1, 70),
    columns=st.integers(1, 150),
    count=st.sampled_from([1, 2, 3, 4, 5, 9, 40, 300]),
    spread=st.sampled_from([1e-6, 1.0, 1e3]),
)
def test_products_with_weights_of_16_bits_are_right_for_any_shape(
    dtype: str, rows: int, columns: int, count: int, spread: float
) -> None:
    weight = (spread * mx.random.normal((rows, columns), key=mx.random.key(rows))).astype(NARROW[dtype])
    bias = mx.random.normal((rows,), key=mx.random.key(columns))
    x = mx.random.normal((count, columns), key=mx.random.key(count))
    weights = native.plain_weights(weight, bias)
    y = native.linear(x, weights)
    wide, values = np.array(x, dtype=np.float64), np.array(weight.astype(mx.float32), dtype=np.float64)
    magnitude = np.abs(wide) @ np.abs(values).T + np.abs(np.array(bias))
    assert weights.arrays[0].dtype == NARROW[dtype]
    assert np.all(np.abs(np.array(y) - (wide @ values.T + np.array(bias))) <= 1e-6 * magnitude)


@pytest.mark.parametrize("dtype", sorted(NARROW))
@pytest.mark.parametrize("count", [1, 20])
def test_every_number_of_16_bits_is_widened_exactly(dtype: str, count: int) -> None:
    bits = mx.arange(1 << 16).astype(mx.uint16).view(NARROW[dtype])
    weights = native.plain_weights(bits.reshape(-1, 1), None)
    y = np.array(native.linear(mx.ones((count, 1)), weights))
    expected = np.array(bits.astype(mx.float32))
    kept = np.abs(expected) >= np.finfo(np.float32).tiny  # a BLAS may flush the rest to nought
    assert np.array_equal(y[-1][kept | np.isnan(expected)], expected[kept | np.isnan(expected)], equal_nan=True)


@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 20),
    count=st.sampled_from([1, 2, 3, 5, 40]),
    spread=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_products_with_mxfp4_are_right_for_any_shape(rows: int, width: int, count: int, spread: float) -> None:
    weight = spread * mx.random.normal((rows, 32 * width), key=mx.random.key(rows))
    quanta, scales = mx.quantize(weight, mode="mxfp4")
    values = exact_mxfp4(quanta, scales)
    x = mx.random.normal((count, 32 * width), key=mx.random.key(width))
    y = native.linear(x, native.packed_weights(quanta, scales, None, None, 32, 4))
    wide = np.array(x, dtype=np.float64)
    # Weights are counted from the least one on, or from the least that a byte holds.
    magnitude = np.abs(wide) @ (np.abs(values) + 12 * np.abs(values).max()).T
    rounding = half_steps(wide) @ np.abs(values).T
    sums = (WIDE_BOUND if native.has_wide() else 2e-6) * magnitude
    assert np.all(np.abs(np.array(y) - wide @ values.T) <= rounding + sums)


def exact_mxfp4(quanta: mx.array, scales: mx.array) -> np.ndarray:
    """By the format's definition: a sign, two bits of exponent, one of mantissa; a power of two for 32 of them."""
    nibbles = np.array(quanta).view(np.uint8)
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=-1).reshape(len(nibbles), -1)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
    values = np.where(codes & 8, -magnitudes, magnitudes)
    return values * np.repeat(2.0 ** (np.array(scales).astype(np.float64) - 127), 32, axis=1)


def test_rows_of_mxfp4_are_looked_up_as_they_are() -> None:
    quanta, scales = mx.quantize(mx.random.normal((21, 96)), mode="mxfp4")
    rows = native.lookup_rows(mx.array([0, 20, 3]), native.packed_weights(quanta, scales, None, None, 32, 4))
    assert np.array_equal(np.array(rows), exact_mxfp4(quanta, scales)[[0, 20, 3]])


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("bias", [False, True])
def test_packed_layers_of_every_mode_give_the_products_of_their_values(form: str, bias: bool) -> None:
    group, bits = FORMS[form]
    holder = nn.Module()
    holder.up = nn.Linear(96, 40, bias=bias)
    nn.quantize(holder, group_size=group, bits=bits, mode=form)
    weight = mx.dequantize(holder.up.weight, holder.up.scales, group_size=group, bits=bits, mode=form)
    x = mx.random.normal((5, 96), key=mx.random.key(1))
    expected = x @ weight.astype(mx.float32).T + (holder.up.bias if bias else 0)
    assert settle_precision(holder, HERE, None) == []
    assert isinstance(holder.up, PackedLinear if form == "mxfp4" else DenseLinear)
    assert mx.allclose(holder.up(x), expected, atol=2e-2 if form == "mxfp4" else 1e-4).item()


def test_weights_of_mxfp4_that_do_not_fit_together_are_refused() -> None:
    quanta, scales = mx.quantize(mx.zeros((8, 128)), mode="mxfp4")
    with pytest.raises(ValueError, match="disagree"):
        native.packed_weights(quanta, scales[:, :2], None, None, 32, 4)
    with pytest.raises(ValueError, match="uint8"):
        native.packed_weights(quanta, scales.astype(mx.float32), None, None, 32, 4)


def test_mxfp4_stays_packed_where_it_would_not_fit_arranged() -> None:
    holder = nn.Module()
    holder.up = nn.Linear(1024, 1024, bias=False)
    nn.quantize(holder, group_size=32, bits=4, mode="mxfp4")
    settle_precision(holder, Device("cpu", "a small CPU", 2 << 20), None)
    assert type(holder.up) is nn.QuantizedLinear


@pytest.mark.parametrize("dtype", sorted(NARROW))
@pytest.mark.parametrize("kind", ["llama", "tied", "window", "hybrid", "moe"])
def test_a_model_of_16_bits_keeps_them_and_chooses_the_tokens_of_float32(
    dtype: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [5, 17, 3, 29, 11, 23, 7, 19, 2] * 2  # few enough for AMX to compute them as float32

    def chosen() -> tuple[list[int], Any]:
        model = tiny.random_models.build(tiny.CONFIGS[kind], spread=0.2, dtype=NARROW[dtype])
        assert settle_precision(model, HERE, None) == []
        return greedy(model, tiny.CONFIGS[kind], prompt), model

    ours, model = chosen()
    kept = [m for m in model.modules() if isinstance(m, DenseLinear | DenseEmbedding)]
    assert kept and all(module.weight.dtype == NARROW[dtype] for module in kept)
    assert adapt_model(model, tiny.CONFIGS[kind], HERE).dtype == "float32"
    with monkeypatch.context() as patch:
        patch.setenv("INGOT_KERNELS", "mlx")
        theirs, plain = chosen()
    assert not any(isinstance(module, DenseLinear) for module in plain.modules())
    assert ours == theirs
