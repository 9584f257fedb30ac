"""What is compared with plain MLX at load."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from ingot.kernels.checked import CheckedKernels
from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import Kernel, KernelText, LaunchConfig
from ingot.kernels.gpu.launcher import kernel_launcher
from ingot.kernels.paged_attention import kernels
from ingot.kernels.paged_attention.kernels import has_paged_kernels
from ingot.kernels.paged_attention.selfcheck import check_paged_attention, plain_attention
from ingot.kernels.paged_attention.shapes import AttentionShape
from tests.kernels.paged_attention.memory import emulated

GPU = Device("cuda", "a GPU", 1)
SHAPE = AttentionShape(4, 2, 32, 48)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    kernel_launcher.cache_clear()
    yield
    kernel_launcher.cache_clear()


@emulated
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_kernels_that_are_right_pass(dtype: mx.Dtype) -> None:
    assert has_paged_kernels(GPU)
    assert check_paged_attention(GPU, SHAPE, dtype, scale=0.2) is None


@emulated
def test_everything_a_layer_may_ask_for_passes() -> None:
    sinks = mx.array([0.5, -1.0, 2.0, 0.0])
    assert check_paged_attention(GPU, SHAPE, mx.bfloat16, scale=0.2, cap=30.0, sinks=sinks, window=70, slabs=3) is None


@emulated
@pytest.mark.parametrize(
    ("kernel", "old", "new", "said"),
    [
        ("write", "head * keys_strides[1]", "0", "write differs"),
        ("copy", "places * VALUE_SIZE", "places * VALUE_SIZE - 8", "copy differs"),
        ("attend", "sums[i] += weights", "sums[i] -= weights", "attend differs by"),
        ("attend", "numbers[0]", "0.0f / 0.0f", "attend differs by nan"),
        ("attend", "value / sum", "value", "attend differs by"),
        ("attend", "value / sum", "value", "attend differs by"),
        ("merge", "values[i] / sum", "values[i]", "attend differs by"),
        ("merge", "values[i] / sum", "values[i] / summ", "does not run: a kernel does not compile"),
    ],
)
def test_a_kernel_that_is_wrong_is_named(
    kernel: str, old: str, new: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            return text._replace(body=text.body.replace(old, new)) if f"_{kernel}_" in text.name else text

    monkeypatch.setattr(kernels, "required_launcher", lambda device: Broken())
    found = check_paged_attention(GPU, SHAPE, mx.float32, scale=0.2)
    assert found is not None and found.startswith(said)


@emulated
def test_what_was_right_for_one_model_is_not_compared_again_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(Emulator):
        def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
            launched.append(kernel.name)
            return super().__call__(kernel, inputs, work)

    launched: list[str] = []
    device = Counted()
    monkeypatch.setattr(kernels, "required_launcher", lambda _: device)
    once = CheckedKernels(GPU).attention(AttentionShape(2, 1, 16, 16), mx.float16, scale=0.2)
    count = len(launched)
    again = CheckedKernels(GPU).attention(AttentionShape(2, 1, 16, 16), mx.float16, scale=0.2)
    assert once is not None and again is not None and len(launched) == count > 0
    assert CheckedKernels(GPU).attention(AttentionShape(2, 1, 16, 16), mx.float16, scale=0.3) is not None
    assert len(launched) == 2 * count


@emulated
@pytest.mark.parametrize(
    ("broken", "prompts", "matrix"), [((), True, True), (("prompt",), False, True), (("prompt", "wide"), False, False)]
)
def test_what_a_device_lacks_is_done_in_the_next_best_way(
    broken: tuple[str, ...], prompts: bool, matrix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Older(Emulator):
        def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
            if kernel.name in {f"attend_{name}" for name in broken}:
                raise RuntimeError("no such instruction")
            launched.add(kernel.name)
            return super().__call__(kernel, inputs, work)

    launched: set[str] = set()
    monkeypatch.setattr(kernels, "required_launcher", lambda device: Older())
    attention = CheckedKernels(GPU).attention(AttentionShape(2, 1, 16, 16), mx.float16, scale=0.2)
    assert attention is not None and attention.takes_prompts == prompts
    assert ("attend_wide" in launched, "attend" in launched) == (matrix, not matrix)


def test_a_device_without_kernels_and_shapes_without_one_are_named() -> None:
    assert (
        check_paged_attention(Device("cpu", "this CPU", 1), SHAPE, mx.float32, scale=1.0) == "no kernels for this CPU"
    )
    if has_paged_kernels(GPU):
        found = check_paged_attention(GPU, AttentionShape(4, 2, 40, 48), mx.float32, scale=1.0)
        assert found is not None and "multiples of 16" in found


@pytest.mark.parametrize("window", [None, 7])
def test_the_plain_way_is_what_mlx_computes(window: int | None) -> None:
    queries, sinks = mx.random.normal((3, 4, 32)), mx.random.normal((4,))
    keys, values = mx.random.normal((2, 20, 32)), mx.random.normal((2, 20, 48))
    limits, places = mx.arange(18, 21)[:, None], mx.arange(20)
    mask = (places < limits) & (places >= limits - (window or 20))
    wanted = mx.fast.scaled_dot_product_attention(
        queries.transpose(1, 0, 2)[None], keys[None], values[None], scale=0.3, mask=mask, sinks=sinks
    )[0].transpose(1, 0, 2)
    got = plain_attention(queries, keys, values, scale=0.3, sinks=sinks, window=window)
    assert np.allclose(np.array(got), np.array(wanted), atol=1e-5)
