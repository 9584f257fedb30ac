"""What is compared with plain operations at load, and what is not used."""

from __future__ import annotations

import mlx.core as mx
import pytest

from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import KernelText
from ingot.kernels.moe import kernels
from ingot.kernels.moe.kernels import CheckedMoe, RouterShape, check_moe_kernels
from tests.kernels.paged_attention.memory import emulated

pytestmark = emulated
GPU = Device("cuda", "a GPU", 1)
SHAPES = {
    "softmax": RouterShape(128, 8, shares="sum", later=True),
    "sigmoid": RouterShape(64, 4, "sigmoid", "sum", 8, 4),
    "logits": RouterShape(32, 4, "logits", "softmax", later=True),
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("biased", [True, False])
def test_kernels_that_are_right_pass(kind: str, biased: bool, dtype: mx.Dtype) -> None:
    assert check_moe_kernels(GPU, SHAPES[kind], dtype, biased) is None


@pytest.mark.parametrize(
    ("kind", "old", "new", "said"),
    [
        ("softmax", "better += others[m] > score", "better += others[m] < score", "8 of 128 experts are others"),
        ("sigmoid", "better >= TOP_GROUPS", "better >= TOP_GROUPS - 1", "4 of 64 experts are others"),
        ("logits", "sum += SHARES == 1", "sum += SHARES != 1", "weights of experts differ by"),
        ("softmax", "weights[product], own, sum", "weights[0], own, sum", "combined experts differ by"),
        ("softmax", "float(T(sum))", "float(T(summ))", "does not run: a kernel does not compile"),
    ],
)
def test_a_kernel_that_is_wrong_is_named(
    kind: str, old: str, new: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            return text._replace(body=text.body.replace(old, new))

    monkeypatch.setattr(kernels, "required_launcher", lambda device: Broken())
    checked = CheckedMoe(GPU)
    assert checked.of(SHAPES[kind], mx.bfloat16, bias=None, eps=0.0, scale=1.0) is None
    assert next(iter(checked.wrong.values())).startswith(said)


def test_routers_without_kernels_are_named_and_other_devices_have_none() -> None:
    checked, metal = CheckedMoe(GPU), CheckedMoe(Device("metal", "a Mac", 1))
    assert checked.of(RouterShape(8, 40), mx.bfloat16, bias=None, eps=0.0, scale=1.0) is None
    assert next(iter(checked.wrong.values())).startswith("40 of 8 experts")
    assert metal.of(SHAPES["softmax"], mx.bfloat16, bias=None, eps=0.0, scale=1.0) is None and not metal.wrong
