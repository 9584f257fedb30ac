"""Layers of experts against float64, and models made of them against MLX's own operations."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from ingot.models.layers.mlp import DenseSwitchLinear, GatedExperts, PackedSwitchLinear, UnsortedExperts
from ingot.models.precision import settle_precision
from ingot.upstream import QuantizedSwitchLinear, SwigluOAI, SwitchGLU, SwitchLinear
from tests import tiny
from tests.kernels.cpu.rounding import half_steps
from tests.launches import computed_last

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")

BOUND = 4e-6  # of the products' magnitudes, besides the rounding of activations
HERE = Device("cpu", "a CPU", 1 << 34)
Weights = tuple[Any, np.ndarray]


def packed(shape: tuple[int, ...], seed: int, bits: int = 4, group: int = 32) -> Weights:
    """Random weights of experts as the kernels take them, and in float64."""
    weights = mx.random.normal(shape, key=mx.random.key(seed)) / shape[-1] ** 0.5
    quanta, scales, biases = mx.quantize(weights, group_size=group, bits=bits)
    exact = mx.dequantize(quanta, scales, biases, group_size=group, bits=bits)
    return native.packed_weights(quanta, scales, biases, None, group, bits), np.array(exact, dtype=np.float64)


def mxfp4(shape: tuple[int, ...], seed: int) -> Weights:
    quanta, scales = mx.quantize(mx.random.normal(shape, key=mx.random.key(seed)), mode="mxfp4")
    exact = mx.dequantize(quanta, scales, mode="mxfp4", dtype=mx.float32)
    return native.packed_weights(quanta, scales, None, None, 32, 4), np.array(exact, dtype=np.float64)


def plain(shape: tuple[int, ...], seed: int, dtype: mx.Dtype = mx.float32) -> Weights:
    weight = (mx.random.normal(shape, key=mx.random.key(seed)) / shape[-1] ** 0.5).astype(dtype)
    return native.plain_weights(weight, None), np.array(weight.astype(mx.float32), dtype=np.float64)


FORMS: dict[str, Callable[[tuple[int, ...], int], Weights]] = {
    "4 bits": packed,
    "8 bits": lambda shape, seed: packed(shape, seed, bits=8),
    "3 bits": lambda shape, seed: packed(shape, seed, bits=3),
    "mxfp4": mxfp4,
    "float32": plain,
    "bfloat16": lambda shape, seed: plain(shape, seed, mx.bfloat16),
}


def is_packed(form: str) -> bool:
    return "bits" in form or form == "mxfp4"


def choices(tokens: int, k: int, experts: int, seed: int) -> np.ndarray:
    dice = np.random.default_rng(seed)
    return np.stack([dice.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)


@given(
    form=st.sampled_from(sorted(FORMS)),
    experts=st.integers(1, 9),
    rows=st.integers(1, 40),
    width=st.integers(1, 3),
    tokens=st.sampled_from([1, 2, 7, 40, 130]),
    data=st.data(),
)
def test_each_token_is_multiplied_with_the_weights_of_its_experts(
    form: str, experts: int, rows: int, width: int, tokens: int, data: st.DataObject
) -> None:
    columns = 32 * width
    k = data.draw(st.integers(1, experts))
    weights, values = FORMS[form]((experts, rows, columns), rows)
    x = mx.random.normal((tokens, columns), key=mx.random.key(tokens))
    indices = choices(tokens, k, experts, tokens)
    y = native.gather_experts(x, mx.array(indices), weights)
    wide = np.array(x, dtype=np.float64)
    expected = np.einsum("tc,tkrc->tkr", wide, values[indices])
    # Quanta are counted from the least one on.
    magnitude = np.einsum("tc,tkrc->tkr", np.abs(wide), np.abs(values[indices]) + np.abs(values).max())
    assert y.shape == (tokens, k, rows) and y.dtype == mx.float32
    rounding = np.einsum("tc,tkrc->tkr", half_steps(wide), np.abs(values[indices])) * is_packed(form)
    assert np.all(np.abs(np.array(y) - expected) <= rounding + BOUND * magnitude + 1e-30)


def gated(
    x: np.ndarray, indices: np.ndarray, values: list[np.ndarray], slope: float, limit: float, offset: float
) -> np.ndarray:
    gate = np.minimum(np.einsum("tc,tkrc->tkr", x, values[0][indices]), limit)
    up = np.clip(np.einsum("tc,tkrc->tkr", x, values[1][indices]), -limit, limit)
    inner = gate / (1 + np.exp(-slope * gate)) * (up + offset)
    return np.einsum("tkr,tkcr->tkc", inner, values[2][indices])


@given(
    form=st.sampled_from(["4 bits", "8 bits", "float32", "bfloat16"]),
    experts=st.integers(1, 9),
    tokens=st.sampled_from([1, 2, 7, 40, 130]),
    spread=st.sampled_from([1.0, 5.0]),
    gating=st.sampled_from([native.GateCurve(), native.GateCurve(1.702, 7.0, 1.0), native.GateCurve(limit=1.5)]),
    data=st.data(),
)
def test_the_mlps_of_experts_are_right(
    form: str, experts: int, tokens: int, spread: float, gating: native.GateCurve, data: st.DataObject
) -> None:
    hidden, inner, k = 96, 64, data.draw(st.integers(1, experts))
    shapes = [(experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner)]
    made = [FORMS[form](shape, seed) for seed, shape in enumerate(shapes)]
    x = spread * mx.random.normal((tokens, hidden), key=mx.random.key(tokens))
    indices = choices(tokens, k, experts, experts)
    y = native.gather_gated_experts(x, mx.array(indices), [weights for weights, _ in made], gating)
    expected = gated(np.array(x, dtype=np.float64), indices, [values for _, values in made], *gating)
    assert y.shape == expected.shape
    assert np.abs(np.array(y) - expected).max() <= (3e-2 if is_packed(form) else 1e-3) * np.abs(expected).max()


@pytest.mark.parametrize("form", sorted(FORMS))
def test_what_a_token_gives_does_not_depend_on_the_others(form: str) -> None:
    weights, _ = FORMS[form]((6, 40, 64), 1)
    x = mx.random.normal((150, 64), key=mx.random.key(2))
    indices = mx.array(choices(150, 3, 6, 3))
    together = native.gather_experts(x, indices, weights)
    for first, count in ((0, 1), (3, 2), (20, 60)):
        alone = native.gather_experts(x[first : first + count], indices[first : first + count], weights)
        assert mx.array_equal(alone, together[first : first + count]).item()
    crowded = native.gather_experts(x, mx.broadcast_to(indices[:1], indices.shape), weights)
    assert mx.array_equal(crowded[:1], together[:1]).item()


def test_an_index_that_names_no_expert_gives_zeros_and_no_tokens_give_nothing() -> None:
    weights, _ = packed((3, 8, 32), 1)
    y = native.gather_experts(mx.ones((2, 32)), mx.array([[0, 3], [-1, 2]]), weights)
    assert not np.array(y)[0, 1].any() and not np.array(y)[1, 0].any()
    assert np.array(y)[0, 0].any() and np.array(y)[1, 1].any()
    assert native.gather_experts(mx.ones((0, 32)), mx.zeros((0, 2), mx.int32), weights).shape == (0, 2, 8)


def test_shapes_that_do_not_fit_are_refused() -> None:
    weights, _ = packed((3, 8, 32), 1)
    other, _ = packed((3, 64, 32), 1)
    down, _ = packed((3, 32, 64), 1)
    one = mx.zeros((1, 1), mx.int32)
    with pytest.raises(ValueError, match="width"):
        native.gather_experts(mx.ones((1, 64)), one, weights)
    with pytest.raises(ValueError, match="each token"):
        native.gather_experts(mx.ones((2, 32)), one, weights)
    with pytest.raises(ValueError, match="fit together"):
        native.gather_gated_experts(mx.ones((1, 32)), one, [weights, other, down], native.GateCurve())
    with pytest.raises(ValueError, match="experts"):
        native.linear(mx.ones((1, 32)), weights)


def switch(activation: nn.Module | None = None, bias: bool = True) -> Any:
    mx.random.seed(3)
    made = SwitchGLU(64, 96, 5, bias=bias, **({} if activation is None else {"activation": activation}))
    if bias:
        for name in ("gate_proj", "up_proj", "down_proj"):
            made[name].bias = mx.random.normal(made[name].bias.shape)
    return made


class Doubled(nn.Module):
    """An activation that nobody knows."""

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        return 2 * x + gate


@pytest.mark.parametrize(
    ("activation", "swapped"),
    [(None, GatedExperts), (SwigluOAI(), GatedExperts), (Doubled(), UnsortedExperts)],
)
@pytest.mark.parametrize("form", ["plain", "bfloat16", "4 bits", "mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 40)])
def test_mlx_lm_s_layers_give_the_same_after_the_swap(
    activation: nn.Module | None, swapped: type, form: str, shape: tuple[int, ...]
) -> None:
    holder = nn.Module()
    holder.mlp = switch(activation)
    if form == "bfloat16":
        holder.set_dtype(mx.bfloat16)
    elif form == "4 bits":
        nn.quantize(holder, group_size=32, bits=4)
    elif form != "plain":
        nn.quantize(holder, mode=form, group_size=16 if form == "nvfp4" else 32, bits=8 if form == "mxfp8" else 4)
    x = mx.random.normal((*shape, 64), key=mx.random.key(7))
    indices = mx.array(choices(math.prod(shape), 2, 5, 8).reshape(*shape, 2))
    theirs = switch(activation)
    for name in ("gate_proj", "up_proj", "down_proj"):
        theirs[name] = exact(holder.mlp[name])
    expected = theirs(x, indices)
    assert settle_precision(holder, HERE, None) == []
    assert type(holder.mlp) is swapped
    assert type(holder.mlp.up_proj) in (PackedSwitchLinear, DenseSwitchLinear)
    ours = holder.mlp(x, indices)
    assert ours.shape == expected.shape
    bound = 3e-2 if is_packed(form) else 1e-3
    assert mx.abs(ours - expected).max().item() <= bound * mx.abs(expected).max().item()
    through = holder.mlp.up_proj(x[..., None, None, :], indices)
    reference = theirs.up_proj(x[..., None, None, :], indices)
    assert mx.allclose(through, reference, atol=bound * mx.abs(reference).max().item()).item()


def exact(layer: Any) -> SwitchLinear:
    """The layer in float32."""
    weight = layer.weight
    if isinstance(layer, QuantizedSwitchLinear):
        weight = mx.dequantize(
            weight, layer.scales, layer.get("biases"), group_size=layer.group_size, bits=layer.bits, mode=layer.mode
        )
    made = SwitchLinear(64, 64, 1)
    made.weight, made.bias = weight.astype(mx.float32), layer.bias.astype(mx.float32)
    return made


def test_any_way_of_calling_a_layer_of_experts_is_understood() -> None:
    theirs = switch(bias=False).up_proj
    holder = nn.Module()
    holder.up = switch(bias=False).up_proj
    settle_precision(holder, HERE, None)
    for x_shape, i_shape in [
        ((7, 1, 64), (7,)),
        ((2, 3, 1, 1, 64), (2, 3, 4)),
        ((2, 1, 5, 64), (2, 3)),
        ((5, 64), (3,)),
    ]:
        x = mx.random.normal(x_shape, key=mx.random.key(1))
        indices = mx.random.randint(0, 5, i_shape, key=mx.random.key(2))
        expected = theirs(x, indices)
        ours = holder.up(x, indices)
        assert ours.shape == expected.shape
        assert mx.allclose(ours, expected, atol=1e-5).item()


def test_a_model_of_experts_chooses_the_same_tokens_as_with_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**tiny.CONFIGS["moe"], "hidden_size": 64, "moe_intermediate_size": 32}
    prompt = [5, 17, 3, 29, 11, 23, 7, 19, 2] * 2  # few enough for AMX to compute them as float32

    def chosen() -> tuple[list[int], Any]:
        model = tiny.random_models.build(config, spread=0.2)
        settle_precision(model, HERE, None)
        return greedy(model, config, prompt), model

    ours, model = chosen()
    assert any(isinstance(module, GatedExperts) for module in model.modules())
    with monkeypatch.context() as patch:
        patch.setenv("INGOT_KERNELS", "mlx")
        theirs, plain_model = chosen()
    assert not any(isinstance(module, GatedExperts) for module in plain_model.modules())
    assert ours == theirs


def greedy(model: Any, config: dict[str, Any], prompt: list[int], count: int = 12) -> list[int]:
    adapter = adapt_model(model, config, HERE, exact=True)
    rows = adapter.new_batch_state()
    row = rows.new()
    tokens: list[int] = []
    given = prompt
    while len(tokens) < count:
        tokens.append(int(mx.argmax(computed_last(adapter, rows, row, given)).item()))
        given = tokens[-1:]
    return tokens
