"""Products of many rows with weights that are unpacked one layer at a time."""

from __future__ import annotations

import mlx.core as mx
import pytest

from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import KernelText
from ingot.kernels.packed_matmul import kernels
from ingot.kernels.packed_matmul.kernels import DTYPES, PackedFormat, UnpackScratch
from ingot.kernels.packed_matmul.selfcheck import CheckedPacked
from tests.kernels.packed_matmul.weights import BOUNDS, PACKINGS, activations, exact, off, packed
from tests.kernels.paged_attention.memory import emulated

pytestmark = emulated


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_every_packing_is_unpacked_rightly(packing: PackedFormat, dtype: mx.Dtype) -> None:
    weights = packed(packing, 12, packing.held * 3, dtype)
    x = activations(20, weights.columns, dtype)
    found = UnpackScratch(Emulator(), mx.zeros(weights.size + 8, dtype)).multiply(x, weights)
    # Weights are rounded, too.
    assert off(found, exact(x, weights)) < 2 * BOUNDS[dtype]


def test_layers_take_turns_though_nobody_waited_for_their_products() -> None:
    fours, eights = PackedFormat(4, 64), PackedFormat(8, 32)
    layers = [packed(fours, 24, 192, mx.float32, 1), packed(eights, 10, 64, mx.float32, 2)] * 3
    room = UnpackScratch(Emulator(), mx.zeros(max(layer.size for layer in layers), mx.float32))
    given = [activations(7, layer.columns, mx.float32, number) for number, layer in enumerate(layers)]
    found = [room.multiply(x, layer) for x, layer in zip(given, layers, strict=True)]
    for x, layer, y in zip(given, layers, found, strict=True):
        assert off(y, exact(x, layer)) < 1e-5


def test_weights_that_do_not_fit_are_multiplied_a_part_at_a_time() -> None:
    weights = packed(PackedFormat(4, 64), 200, 128, mx.float32)
    room, x = UnpackScratch(Emulator(), mx.zeros(70 * 128, mx.float32)), activations(9, 128, mx.float32)
    assert room.covers(weights)
    assert off(room.multiply(x, weights), exact(x, weights)) < 1e-5


def test_weights_of_which_hardly_any_fit_or_in_another_format_are_not_covered() -> None:
    weights = packed(PackedFormat(4, 64), 12, 128, mx.float32)
    assert UnpackScratch(Emulator(), mx.zeros(weights.size, mx.float32)).covers(weights)
    assert not UnpackScratch(Emulator(), mx.zeros(weights.size - 1, mx.float32)).covers(weights)
    assert not UnpackScratch(Emulator(), mx.zeros(weights.size, mx.bfloat16)).covers(weights)


def test_memory_is_not_kept_where_unpacking_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            return text._replace(body=text.body.replace("scale, bias)", "scale, scale)"))

    layers = [packed(PackedFormat(4, 64), 12, 128, mx.float32)] * 2
    right, wrong = (CheckedPacked(Device("cuda", name, 1)) for name in ("a GPU", "another"))
    right.reserve(layers)
    assert right.scratch is not None and right.scratch.nbytes == 12 * 128 * 4 and not right.wrong
    monkeypatch.setattr(kernels, "kernel_launcher", lambda device: Broken())
    wrong.reserve(layers)
    assert wrong.scratch is None
    assert [*wrong.wrong.values()] == ["unpack differs for 12x128 of 4 bits in groups of 64"]
