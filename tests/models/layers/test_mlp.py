"""MLPs with a cheaper gate, against the ones that they extend."""

from __future__ import annotations

import mlx.core as mx
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native
from ingot.models.families.registry import mlp_spec_of
from ingot.models.layers.mlp import GatedMLP, JoinedMLP, join_gated_mlps, swap_gated_mlps
from ingot.models.layers.modules import named_parameters
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
