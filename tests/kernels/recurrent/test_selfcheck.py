"""What is compared with plain MLX at load, and what is not used."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import KernelText
from ingot.kernels.recurrent import selfcheck
from ingot.kernels.recurrent.mixers import DeltaShape, Mamba2Shape, ShortConvShape
from ingot.kernels.recurrent.selfcheck import CheckedRecurrences, MixerShape, check_recurrent_kernels, random_weights
from tests import engines
from tests.kernels.paged_attention.memory import emulated

GPU = Device("cuda", "a GPU", 1)
DELTA, JOINT = DeltaShape(1, 2, 32, 48, 4), DeltaShape(2, 4, 16, 16, 4, interleaved=True)
KDA = DeltaShape(2, 2, 32, 32, 4, decays_by_key=True, sigmoid_gate=True, gates_apart=True, decays_apart=True)
MAMBA, SHORT = Mamba2Shape(4, 2, 12, 32, 4, 24, biased=True), ShortConvShape(36, 3)


@emulated
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("rules", ["cuda", "metal"])
@pytest.mark.parametrize("shape", [DELTA, JOINT, KDA, MAMBA, SHORT], ids=["delta", "joint", "kda", "mamba", "short"])
def test_kernels_that_are_right_pass(shape: MixerShape, rules: str, dtype: mx.Dtype) -> None:
    with engines.acting_as(rules):
        assert check_recurrent_kernels(Device(rules, "", 1), shape, dtype) is None  # type: ignore[arg-type]


@emulated
@pytest.mark.parametrize(
    ("shape", "kernel", "old", "new", "said"),
    [
        (DELTA, "convolve", "seen[TAPS - 1] = next[i];", "seen[TAPS - 1] = next[0];", "convolve differs"),
        (DELTA, "convolve", "!fresh", "true", "convolve differs"),
        (DELTA, "convolve", "ENTERED(first + at)", "0.0f", "convolve differs"),
        (DELTA, "convolve", "count > STRETCH ?", "true ?", "convolve differs"),
        (SHORT, "convolve", "T(gate[i] * float(T(sum)))", "T(sum)", "convolve differs"),
        (MAMBA, "convolve", "float sum = shift;", "float sum = 0.0f;", "convolve differs"),
        (DELTA, "advance", "state[i] *= decay[BY_KEY ? i : 0];", "", "advance differs"),
        (DELTA, "advance", "held && !fresh", "held", "advance differs"),
        (DELTA, "advance", "keep + begin + t", "keep + begin", "advance returns other states"),
        (JOINT, "advance", "key_head * FACTOR_STEP", "key_head * IN_GROUP", "advance differs"),
        (KDA, "advance", "BY_KEY ? i : 0", "0", "advance differs"),
        (KDA, "advance", "+ head * DECAYS", "", "advance differs"),
        (KDA, "gate", "SIGMOID ? 1.0f : opened[n]", "opened[n]", "gate differs"),
        (DELTA, "advance", "step < LANES", "step < 2", "advance differs"),
        (DELTA, "advance", "strength;", "strengthh;", "does not run: a kernel does not compile"),
        (MAMBA, "scan", "SIZE && !fresh", "SIZE", "scan differs"),
        (MAMBA, "scan", "head / (HEADS / KEYS) * STATE", "0", "scan differs"),
        (MAMBA, "scan", "step < numbers[3 * HEADS] ?", "false ?", "scan differs"),
        (MAMBA, "scan", "sums[0] + skipped", "sums[0]", "scan differs"),
        (MAMBA, "scan", "keep + begin + t", "keep + begin", "scan returns other states"),
        (MAMBA, "gate", "squares / float(NORM)", "squares", "gate differs"),
        (JOINT, "gate", "i / GATE_SPAN * GATE_STEP + i % GATE_SPAN", "i", "gate differs"),
    ],
)
def test_a_kernel_that_is_wrong_is_named(
    shape: MixerShape, kernel: str, old: str, new: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            if f"_{kernel}_" not in text.name:
                return text
            assert old in text.body
            return text._replace(body=text.body.replace(old, new))

    monkeypatch.setattr(selfcheck, "required_launcher", lambda device: Broken())
    found = check_recurrent_kernels(GPU, shape, mx.float32)
    assert found is not None and found.startswith(said)
    checked = CheckedRecurrences(GPU)
    assert checked.of(shape, mx.float32, random_weights(shape, np.random.default_rng(0))) is None
    assert next(iter(checked.wrong.values())).startswith(said)


def test_a_shape_without_a_kernel_is_named() -> None:
    checked = CheckedRecurrences(GPU)
    assert checked.of(DeltaShape(1, 2, 8, 48, 4), mx.float32, {}) is None
    assert "keys of 8" in next(iter(checked.wrong.values()))
