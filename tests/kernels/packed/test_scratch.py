"""Products of many rows with weights that are unpacked one layer at a time."""

from __future__ import annotations

import mlx.core as mx
import pytest

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.packed.kernels import BITS, DTYPES, GROUPS, Packing
from ingot.kernels.packed.scratch import Scratch
from tests.kernels.packed.weights import BOUNDS, activations, exact, off, packed
from tests.kernels.paged.memory import emulated

pytestmark = emulated


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_every_packing_is_unpacked_rightly(bits: int, group: int, dtype: mx.Dtype) -> None:
    weights = packed(Packing(bits, group), 12, group * 3, dtype)
    x = activations(20, weights.columns, dtype)
    found = Scratch(Emulator(), weights.size + 8, dtype).multiply(x, weights)
    # Weights are rounded, too.
    assert off(found, exact(x, weights)) < 2 * BOUNDS[dtype]


def test_layers_take_turns_though_nobody_waited_for_their_products() -> None:
    fours, eights = Packing(4, 64), Packing(8, 32)
    layers = [packed(fours, 24, 192, mx.float32, 1), packed(eights, 10, 64, mx.float32, 2)] * 3
    room = Scratch(Emulator(), max(layer.size for layer in layers), mx.float32)
    given = [activations(7, layer.columns, mx.float32, number) for number, layer in enumerate(layers)]
    found = [room.multiply(x, layer) for x, layer in zip(given, layers, strict=True)]
    for x, layer, y in zip(given, layers, found, strict=True):
        assert off(y, exact(x, layer)) < 1e-5


def test_weights_that_do_not_fit_or_are_in_another_format_are_not_covered() -> None:
    weights = packed(Packing(4, 64), 12, 128, mx.float32)
    x = activations(20, 128, mx.float32)
    assert Scratch(Emulator(), weights.size, mx.float32).covers(x, weights)
    assert not Scratch(Emulator(), weights.size - 1, mx.float32).covers(x, weights)
    assert not Scratch(Emulator(), weights.size, mx.bfloat16).covers(x, weights)
    assert not Scratch(Emulator(), weights.size, mx.float32).covers(x.astype(mx.bfloat16), weights)
