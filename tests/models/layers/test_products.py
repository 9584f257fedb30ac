"""Several products of the same states as one."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from ingot.models.layers.products import product_of


def layers(kind: str) -> list[Any]:
    made: list[Any] = [nn.Linear(64, size, bias=kind.startswith("bias")) for size in (96, 32, 32)]
    if "packed" in kind:
        mode, bits = ("mxfp4", 4) if "mxfp4" in kind else ("affine", 4)
        made = [nn.QuantizedLinear.from_linear(layer, 32, bits, mode=mode) for layer in made]
    mx.eval([layer.parameters() for layer in made])
    return made


def shared(one: mx.array, other: mx.array) -> bool:
    return np.shares_memory(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("kind", ["plain", "bias", "packed", "bias packed", "packed mxfp4"])
def test_joined_layers_give_what_each_gives_and_are_in_memory_once(kind: str) -> None:
    made, x = layers(kind), mx.random.normal((5, 64))
    apart, parts = [np.array(layer(x)) for layer in made], [sorted(layer) for layer in made]
    joined = product_of(*made)
    assert joined is not None
    arrays = [name for name in made[0] if isinstance(made[0][name], mx.array)]
    assert all(shared(layer[name], joined.linear[name]) for layer in made for name in arrays), "views, not copies"
    assert np.allclose(np.array(joined(x)), np.concatenate(apart, axis=-1), atol=1e-5)
    for layer, wanted, names in zip(made, apart, parts, strict=True):
        assert np.allclose(np.array(layer(x)), wanted, atol=1e-5) and sorted(layer) == names


@pytest.mark.parametrize("kind", ["plain", "bias packed"])
def test_a_layer_alone_shares_its_weights(kind: str) -> None:
    [layer, *_], x = layers(kind), mx.random.normal((5, 64))
    product = product_of(layer)
    assert product is not None and product.linear is layer
    assert product._transposed is None or shared(product._transposed, layer.weight)
    assert np.allclose(np.array(product(x)), np.array(layer(x)), atol=1e-5)


def test_what_is_not_alike_is_not_joined() -> None:
    packed, eight, biased, plain = layers("packed"), layers("packed"), layers("bias"), layers("plain")
    eight[1] = nn.QuantizedLinear.from_linear(plain[1], 32, 8)
    half = layers("plain")
    half[2].weight = half[2].weight.astype(mx.float16)
    for unlike in (eight, [packed[0], *plain[1:]], [biased[0], *plain[1:]], half, [nn.RMSNorm(64)] * 3):
        assert product_of(*unlike) is None


def test_a_layer_of_another_class_is_left_alone() -> None:
    class Adapted(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return 2 * super().__call__(x)

    assert product_of(Adapted(8, 8), Adapted(8, 8)) is None
