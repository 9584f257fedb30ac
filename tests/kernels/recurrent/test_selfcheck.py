"""What is compared with plain MLX at load, and what is not used."""

from __future__ import annotations

import mlx.core as mx
import pytest

from ingot.kernels.device import Device
from ingot.kernels.gated_delta import kernels
from ingot.kernels.gated_delta.kernels import DeltaShape
from ingot.kernels.gated_delta.selfcheck import CheckedDelta, check_delta_kernels
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import KernelText
from tests.kernels.paged_attention.memory import emulated

GPU, MAC = Device("cuda", "a GPU", 1), Device("metal", "a Mac", 1)
SHAPE = DeltaShape(1, 2, 32, 48, 4)
WEIGHTS = {"filter": mx.zeros((160, 4, 1)), "a_log": mx.zeros(2), "dt_bias": mx.zeros(2)}


@emulated
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("joint", [False, True])
def test_kernels_that_are_right_pass(joint: bool, dtype: mx.Dtype) -> None:
    assert check_delta_kernels(GPU, SHAPE, dtype, joint=joint) is None


@emulated
@pytest.mark.parametrize(
    ("kernel", "old", "new", "said"),
    [
        ("convolve", "seen[TAPS - 1] = next[i];", "seen[TAPS - 1] = next[0];", "convolve differs"),
        ("convolve", "fresh ? 0.0f :", "", "convolve differs"),
        ("convolve", "(size_t)slot * (TAPS - 1) * CHANNELS", "(size_t)1 * (TAPS - 1) * CHANNELS", "convolve differs"),
        ("advance", "state[i] *= decay;", "", "advance differs"),
        ("advance", "held && !fresh", "held", "advance differs"),
        ("advance", "keep + begin + t", "keep + begin", "advance returns other states"),
        ("advance", "token * DECAY_ROW", "token * VALUE_HEADS + 1", "advance differs"),
        ("advance", "step < LANES", "step < 2", "advance differs"),
        ("advance", "strength;", "strengthh;", "does not run: a kernel does not compile"),
    ],
)
def test_a_kernel_that_is_wrong_is_named(
    kernel: str, old: str, new: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            if f"_{kernel}_" not in text.name:
                return text
            assert old in text.body
            return text._replace(body=text.body.replace(old, new))

    monkeypatch.setattr(kernels, "required_launcher", lambda device: Broken())
    found = check_delta_kernels(GPU, SHAPE, mx.float32)
    assert found is not None and found.startswith(said)
    checked = CheckedDelta(GPU)
    assert checked.of(SHAPE, mx.float32, **WEIGHTS) is None
    assert next(iter(checked.wrong.values())).startswith(said)


@emulated
def test_a_mac_is_left_mlx_lms_own_kernel_and_that_is_nothing_wrong() -> None:
    checked = CheckedDelta(MAC)
    assert checked.of(SHAPE, mx.float32, **WEIGHTS) is None and not checked.wrong


def test_a_shape_without_a_kernel_is_named() -> None:
    checked = CheckedDelta(GPU)
    assert checked.of(DeltaShape(1, 2, 8, 48, 4), mx.float32, **WEIGHTS) is None
    assert "keys of 8" in next(iter(checked.wrong.values()))
