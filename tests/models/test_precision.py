"""Layers that become others before anything is computed."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from ingot.models.precision import repack_ternary_layers
from ingot.upstream import import_upstream


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("inputs", [128, 32, 24])
def test_layers_of_three_weights_have_the_same_values_in_two_bits(inputs: int, inverted: bool) -> None:
    layer = import_upstream("mlx_lm.models.bitlinear_layers").BitLinear(inputs, 16, True, inverted)
    signs = mx.random.randint(-1, 2, (16, inputs))
    codes = (signs + 1).reshape(4, 4, inputs).astype(mx.uint8)
    layer.weight = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
    layer.weight_scale, layer.bias = mx.array([0.25]), mx.random.normal((16,))
    model, x = nn.Sequential(layer), mx.random.normal((3, inputs))
    repack_ternary_layers(model)
    expected = x @ (signs.T * (4.0 if inverted else 0.25)) + layer.bias
    assert mx.allclose(model(x), expected, atol=1e-4).item()
    assert isinstance(model.layers[0], nn.Linear if inputs == 24 else nn.QuantizedLinear)
