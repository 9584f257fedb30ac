"""GELU as a native operation says what MLX's says."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from ingot.kernels import native
from ingot.models.layers.activations import NativeGELU, swap_gelus

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")


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
