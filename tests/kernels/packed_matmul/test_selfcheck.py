"""What is compared with MLX's own products at load, and what is not used."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import KernelText
from ingot.kernels.packed_matmul import kernels
from ingot.kernels.packed_matmul import selfcheck as checked_module
from ingot.kernels.packed_matmul.kernels import DTYPES, FLOAT_FORMATS, NVFP4, PackedFormat, PackedWeights
from ingot.kernels.packed_matmul.selfcheck import (
    CheckedExperts,
    CheckedPacked,
    Projections,
    check_packed_product,
)
from tests.kernels.packed_matmul.test_experts import projection
from tests.kernels.packed_matmul.weights import experts, packed
from tests.kernels.paged_attention.memory import emulated

GPU, MAC = Device("cuda", "a GPU", 1), Device("metal", "a Mac", 1)
FOURS = PackedFormat(4, 64)
UNKNOWN = PackedFormat(6, 32, "mxfp6")


@emulated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", [FOURS, *FLOAT_FORMATS], ids=str)
@pytest.mark.sampled(4)
def test_kernels_that_are_right_pass(packing: PackedFormat, dtype: mx.Dtype) -> None:
    assert check_packed_product(GPU, packed(packing, 40, 640, dtype)) is None


@emulated
def test_experts_that_are_right_pass_and_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = experts(FOURS, 5, 24, 640, mx.bfloat16)
    assert check_packed_product(GPU, weights) is None

    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            return text._replace(body=text.body.replace("chosen[to_row]", "chosen[0]"))

    monkeypatch.setattr(kernels, "required_launcher", lambda device: Broken())
    assert check_packed_product(GPU, weights) == "gather differs for 5 experts of 24x640 of 4 bits in groups of 64"


@emulated
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("multiply_add(bias, totals[at], sums[to])", "sums[to]", "multiply differs for 40x2560 of 4 bits"),
        ("step < steps; ++step", "step < steps; step += 2", "multiply differs"),
        ("y[to] = T(sum);", "y[row * outputs] = T(sum);", "multiply differs"),
        ("to += found", "to += float(EIGHTS) * 1.01f * found", "multiply differs"),
        ("T(sum)", "T(sum * (1.0f + rows * 1e-3f))", "a row's product depends on how many rows there are"),
        ("gated(T(gate), T(other))", "gated(T(other), T(gate))", "a gate differs"),
        ("T(sum)", "T(summ)", "does not run: a kernel does not compile"),
    ],
)
def test_a_kernel_that_is_wrong_is_named(old: str, new: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            assert old in text.body
            return text._replace(body=text.body.replace(old, new))

    monkeypatch.setattr(kernels, "required_launcher", lambda device: Broken())
    weights, checked = packed(FOURS, 40, 2560, mx.bfloat16), CheckedPacked(GPU)
    assert checked.of(weights) is None
    assert next(iter(checked.wrong.values())).startswith(said)


@emulated
def test_layers_whose_products_are_the_same_kernels_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def compare(device: Device, weights: PackedWeights) -> None:
        compared.append(weights.outputs)

    monkeypatch.setattr(checked_module, "check_packed_product", compare)
    checked = CheckedPacked(GPU)
    for outputs, columns in ((64, 128), (128, 128), (1024, 128), (72, 128), (64, 192), (8192, 64), (16384, 64)):
        assert checked.of(packed(FOURS, outputs, columns, mx.bfloat16)) is not None
    assert compared == [64, 72, 64, 8192], "others lack as many outputs of a whole cut, and have as many columns"


@emulated
def test_weights_that_are_unpacked_wrongly_are_left_to_mlx_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, right, wrong = [packed(FOURS, 40, 640, mx.bfloat16)] * 2, CheckedPacked(GPU), CheckedPacked(GPU)
    right.reserve(layers)
    assert right.scratch is not None and not right.wrong

    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            return text._replace(body=text.body.replace("biases[", "scales["))

    monkeypatch.setattr(kernels, "kernel_launcher", lambda device: Broken())
    wrong.reserve(layers)
    assert wrong.scratch is None and list(wrong.wrong.values()) == [f"unpack differs for {layers[0]}"]


@emulated
def test_a_mac_is_left_mlxs_own_kernels_and_that_is_nothing_wrong() -> None:
    checked = CheckedPacked(MAC)
    assert checked.of(packed(FOURS, 40, 640, mx.bfloat16)) is None and not checked.supports(UNKNOWN)
    assert not checked.wrong


def test_a_packing_without_a_kernel_is_named_once() -> None:
    checked = CheckedPacked(GPU)
    assert not checked.supports(UNKNOWN) and not checked.supports(UNKNOWN)
    assert list(checked.wrong.values()) == [
        "weights packed as mxfp6: there are kernels for affine ones and mxfp4, nvfp4, mxfp8"
    ]


def test_weights_with_half_of_what_a_kernel_holds_at_once_are_left_to_mlx() -> None:
    checked = CheckedPacked(GPU)
    assert checked.of(packed(NVFP4, 8, 48, mx.bfloat16)) is None
    assert list(checked.wrong.values()) == ["nvfp4 weights of 48 columns: there are kernels for multiples of 32"]


def _experts(hidden: int = 64) -> Projections:
    shapes = ((5, 64, hidden), (5, 64, hidden), (5, hidden, 64))
    gate, up, down = (projection(FOURS, shape, mx.bfloat16, seed=i) for i, shape in enumerate(shapes))
    return gate, up, down


@emulated
def test_experts_of_many_tokens_that_are_right_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = CheckedExperts(GPU)
    first = checked.of(_experts(), mx.bfloat16, "silu", _silu)
    assert first is not None and not checked.wrong
    monkeypatch.setattr(checked_module, "check_cases", lambda *args: pytest.fail("compared again"))
    assert checked.of(_experts(), mx.bfloat16, "silu", _silu) is not None


@emulated
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("wait_for_copies<AHEAD - 1>();", "", "32 rows differ for 5 experts of 64x64, affine 4/64"),
        ("thread / 8 * 128", "thread / 16 * 128", "32 rows differ"),
        ("T(ADDED(sums[1][i]", "T(1.0001f * rows * ADDED(sums[1][i]", "32 rows differ"),
        ("settle<ROWS", "unsettle<ROWS", "does not run: a kernel does not compile"),
    ],
)
def test_experts_of_many_tokens_that_are_wrong_are_named(
    old: str, new: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            return text._replace(body=text.body.replace(old, new))

    monkeypatch.setattr(checked_module, "required_launcher", lambda device: Broken(3))
    checked = CheckedExperts(GPU)
    assert checked.of(_experts(128), mx.bfloat16, "silu", _silu) is None
    assert next(iter(checked.wrong.values())).startswith(said.replace("64x64", "64x128"))


@emulated
def test_units_that_read_shared_memory_wrongly_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            uses = "wgmma.mma_async" in text.header
            return text._replace(body=text.body.replace("given_at, eight * 2", "given_at, eight")) if uses else text

    monkeypatch.setattr(checked_module, "required_launcher", lambda device: Broken())
    checked = CheckedExperts(GPU)
    found = checked.of(_experts(), mx.bfloat16, "silu", _silu)
    assert found is not None and found.rows == (32, 64)
    assert list(checked.wrong.values()) == ["32 rows differ for 5 experts of 64x64, affine 4/64"]


def test_a_mac_is_left_mlxs_own_experts_and_others_are_named() -> None:
    mac, gpu = CheckedExperts(MAC), CheckedExperts(GPU)
    assert mac.of(_experts(), mx.bfloat16, "silu", _silu) is None and not mac.wrong
    assert gpu.of(_experts(), mx.float32, "silu", _silu) is None
    assert list(gpu.wrong.values()) == [
        "experts for activations in mlx.core.float32: there are kernels for 16 bits, with scales in the same format"
    ]


def _silu(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up
