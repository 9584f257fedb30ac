"""Native norms, against the ones that they extend."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native
from ingot.models.layers.modules import named_parameters
from ingot.models.layers.norms import NativeGELU, NativeLayerNorm, NativeRMSNorm, swap_gelus, swap_norms
from tests.models.layers import family_configs

only_norms = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")


@only_norms
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "cohere", "nemotron", "starcoder2", "gpt2", "step3p5"])
def test_swapped_norms_give_the_same_with_the_same_weights(family: str) -> None:
    model = family_configs.build(family)
    before, modules = dict(named_parameters(model)), dict(model.named_modules())
    assert swap_norms(model) > 0
    for path, norm in model.named_modules():
        if not isinstance(norm, NativeRMSNorm | NativeLayerNorm):
            continue
        x = 5 + mx.random.normal((2, 3, norm.weight.shape[0]), key=mx.random.key(2))
        assert mx.abs(norm(x) - modules[path](x)).max().item() < 1e-5
        half = x.astype(mx.bfloat16)
        assert mx.array_equal(norm(half), modules[path](half)).item()
    assert {path: id(array) for path, array in named_parameters(model)} == {
        path: id(array) for path, array in before.items()
    }


@only_norms
def test_a_norm_without_weights_is_swapped_too() -> None:
    model = nn.Sequential(nn.LayerNorm(6, affine=False))
    x = mx.random.normal((4, 6), key=mx.random.key(3))
    expected = model(x)
    assert swap_norms(model) == 1
    assert mx.allclose(model(x), expected, atol=1e-6).item()


@only_norms
def test_a_norm_whose_weights_are_not_float32_stays() -> None:
    model = nn.Sequential(nn.RMSNorm(6))
    model.set_dtype(mx.bfloat16)
    assert swap_norms(model) == 0


only_activations = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")


@only_activations
@pytest.mark.parametrize("approx", ["none", "precise", "tanh", "fast"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_swapped_gelu_computes_what_it_computed(approx: str, dtype: mx.Dtype) -> None:
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(approx=approx))
    x = mx.linspace(-12, 12, 4001).reshape(1, -1).astype(dtype)
    wanted = mlp.layers[1](x)
    assert swap_gelus(mlp) == 1 and type(mlp.layers[1]) is NativeGELU
    found = mlp.layers[1](x)
    assert found.dtype == dtype
    assert mx.abs(found - wanted).max().item() < 2e-6
