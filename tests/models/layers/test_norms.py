"""Native norms, against the ones that they extend."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels import native
from ingot.models.layers.modules import parameters
from ingot.models.layers.norms import NativeLayerNorm, NativeRMSNorm, swap_norms
from tests.models.layers import family_configs

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "cohere", "nemotron", "starcoder2", "gpt2", "step3p5"])
def test_swapped_norms_give_the_same_with_the_same_weights(family: str) -> None:
    model = family_configs.build(family)
    before, modules = dict(parameters(model)), dict(model.named_modules())
    assert swap_norms(model) > 0
    for path, norm in model.named_modules():
        if not isinstance(norm, NativeRMSNorm | NativeLayerNorm):
            continue
        x = 5 + mx.random.normal((2, 3, norm.weight.shape[0]), key=mx.random.key(2))
        assert mx.abs(norm(x) - modules[path](x)).max().item() < 1e-5
        half = x.astype(mx.bfloat16)
        assert mx.array_equal(norm(half), modules[path](half)).item()
    assert {path: id(array) for path, array in parameters(model)} == {path: id(array) for path, array in before.items()}


def test_a_norm_without_weights_is_swapped_too() -> None:
    model = nn.Sequential(nn.LayerNorm(6, affine=False))
    x = mx.random.normal((4, 6), key=mx.random.key(3))
    expected = model(x)
    assert swap_norms(model) == 1
    assert mx.allclose(model(x), expected, atol=1e-6).item()


def test_a_norm_whose_weights_are_not_float32_stays() -> None:
    model = nn.Sequential(nn.RMSNorm(6))
    model.set_dtype(mx.bfloat16)
    assert swap_norms(model) == 0
