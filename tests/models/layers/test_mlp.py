"""MLPs with a cheaper gate, against the ones that they extend."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native
from ingot.kernels.packed_matmul.selfcheck import CheckedExperts
from ingot.models.families.registry import mlp_spec_of
from ingot.models.layers.mlp import (
    GatedMLP,
    GroupedSwitchGLU,
    JoinedMLP,
    join_gated_mlps,
    swap_gated_mlps,
    swap_switch_mlps,
)
from ingot.models.layers.modules import named_parameters, restored_module
from ingot.upstream import SwiGLU, SwigluOAI, SwitchGLU
from tests import engines
from tests.kernels.paged_attention.memory import emulated
from tests.models.layers import family_configs

# One for each way in which an MLP is gated.
FAMILIES = ["llama", "gemma", "gemma3_text", "glm4", "phi3", "internlm2", "exaone", "openelm", "qwen", "talkie"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quick", [False, True])
def test_a_swapped_mlp_gives_the_same_with_the_same_weights(
    family: str, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quick and not native.available():
        pytest.skip("no native kernels")
    if not quick:
        monkeypatch.setattr(native, "available", lambda: False)
    model = family_configs.build(family)
    found = [(path, module, mlp_spec_of(module)) for path, module in model.named_modules()]
    known = [(path, module, gating) for path, module, gating in found if gating is not None]
    before = dict(named_parameters(model))
    assert known
    gelus = any(gating.act != "silu" for _, _, gating in known)
    assert swap_gated_mlps(model) == (0 if gelus and not quick else len(known))
    swapped = dict(model.named_modules())
    for path, mlp, gating in known:
        weights = mlp[gating.gate].weight
        x = 3 * mx.random.normal((1, 7, weights.shape[1]), key=mx.random.key(1))
        x = mx.concatenate([x, mx.full((1, 1, x.shape[-1]), 1e4), mx.full((1, 1, x.shape[-1]), -1e4)], axis=1)
        expected = mlp(x)
        assert isinstance(swapped[path], GatedMLP) or (gelus and not quick)
        found = swapped[path](x)
        assert mx.all(mx.abs(found - expected) <= 1e-5 * mx.abs(expected).max(axis=-1, keepdims=True)).item()
        half = x.astype(mx.bfloat16)
        assert mx.array_equal(swapped[path](half), mlp(half), equal_nan=True).item()
    assert {path: id(array) for path, array in named_parameters(model)} == {
        path: id(array) for path, array in before.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_an_mlp_whose_products_are_one_gives_the_same(family: str) -> None:
    model = family_configs.build(family)
    found = [(path, module, mlp_spec_of(module)) for path, module in model.named_modules()]
    known = [(path, module, gating) for path, module, gating in found if gating is not None]
    states = [3 * mx.random.normal((1, 7, mlp[gating.gate].weight.shape[1])) for _, mlp, gating in known]
    expected = [mlp(x) for (_, mlp, _), x in zip(known, states, strict=True)]
    mx.eval(expected)
    names = {path for path, _ in named_parameters(model)}
    assert join_gated_mlps(model) == len(known)
    swapped = dict(model.named_modules())
    assert all(isinstance(swapped[path], JoinedMLP) for path, _, _ in known)
    for (path, _, _), x, wanted in zip(known, states, expected, strict=True):
        off = mx.abs(swapped[path](x) - wanted) <= 1e-5 * mx.abs(wanted).max(axis=-1, keepdims=True)
        assert mx.all(off).item()
    assert {path for path, _ in named_parameters(model)} == names


class DoubledSwiGLU(nn.Module):
    """One that kernels do not know."""

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        return 2 * nn.silu(gate) * x


def experts(activation: nn.Module, size: int = 64, **packing: Any) -> nn.Module:
    """A model that has nothing else but a norm."""
    model = nn.Module()
    model.mlp, model.norm = SwitchGLU(size, 128, 5, activation, "mode" in packing), nn.RMSNorm(size)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, **packing, class_predicate=lambda path, module: hasattr(module, "to_quantized"))
    mx.eval(model.parameters())
    return model


def tokens(count: int, size: int = 64) -> tuple[mx.array, mx.array]:
    """And the experts that they choose."""
    x = mx.random.normal((1, count, size), key=mx.random.key(2)).astype(mx.bfloat16)
    return x, mx.argsort(mx.random.uniform(shape=(1, count, 5), key=mx.random.key(3)))[..., :2]


@emulated
@pytest.mark.parametrize(
    ("activation", "packing"),
    [
        (SwiGLU(), {"group_size": 64, "bits": 4}),
        (SwigluOAI(), {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
        (SwigluOAI(limit=1.0), {"group_size": 32, "bits": 8}),
        (SwiGLU(), {"group_size": 16, "bits": 4, "mode": "nvfp4"}),
        (SwiGLU(), {"group_size": 32, "bits": 8, "mode": "mxfp8"}),
        (DoubledSwiGLU(), {"group_size": 64, "bits": 4}),
    ],
)
def test_experts_on_gpus_give_what_mlx_lms_own_give(activation: nn.Module, packing: dict[str, Any]) -> None:
    model, kernels = experts(activation, **packing), CheckedExperts(engines.GPU)
    own = model.mlp
    assert swap_switch_mlps(model, kernels) == 1 and isinstance(model.mlp, GroupedSwitchGLU) and not kernels.wrong
    x, indices = tokens(50)
    found, wanted = model.mlp(x, indices), own(x, indices)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert mx.abs(found - wanted).max() < 2**-4 * mx.abs(wanted).max()
    few = tokens(3)
    assert mx.array_equal(model.mlp(*few), own(*few)), "few rows are multiplied as before"
    assert type(restored_module(model.mlp)) is SwitchGLU


@emulated
def test_experts_without_kernels_are_left_to_mlx_lm() -> None:
    model, kernels = experts(SwiGLU(), size=96, group_size=32, bits=4), CheckedExperts(engines.GPU)
    assert swap_switch_mlps(model, kernels) == 0 and type(model.mlp) is SwitchGLU
    assert list(kernels.wrong.values()) == ["experts of 128x96: there are kernels for multiples of 64"]
