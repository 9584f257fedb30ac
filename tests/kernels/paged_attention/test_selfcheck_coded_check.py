"""What is compared of attention over pages in fewer bits at load."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.coded_pages import CodedPageLayout
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import KernelText
from ingot.kernels.gpu.launcher import kernel_launcher
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.selfcheck import CodedSample, check_coded
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape
from tests.kernels.paged_attention.memory import emulated

pytestmark = emulated
GPU = Device("cuda", "a GPU", 1)
SHAPE = AttentionShape(4, 2, 64, 64)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    kernel_launcher.cache_clear()
    yield
    kernel_launcher.cache_clear()


def sampled(codec: str, dtype: mx.Dtype, heads: int = 2) -> CodedSample:
    form = CodedPageLayout(PairCodec(CodecName.parse(codec)), heads, (64, 64), dtype)
    assert form.kernel_shape is not None
    return form.sample(form.kernel_shape)


def attention(
    run: Emulator, dtype: mx.Dtype = mx.bfloat16, shape: AttentionShape = SHAPE, cap: float | None = None
) -> PagedAttention:
    return PagedAttention(run, TUNINGS["cuda"], shape, dtype, scale=0.2, cap=cap)


@pytest.mark.parametrize(
    ("codec", "dtype", "cap"),
    [("k8v4", mx.bfloat16, None), ("affine4", mx.float16, None), ("affine8", mx.bfloat16, 30.0)],
)
def test_kernels_that_are_right_pass(codec: str, dtype: mx.Dtype, cap: float | None) -> None:
    found = attention(Emulator(), dtype, cap=cap)
    for prompts in (False, True):
        assert check_coded(GPU, found, sampled(codec, dtype), prompts=prompts, scale=0.2, cap=cap) is None


def test_all_kernels_are_compared_that_queries_of_any_number_come_to() -> None:
    """With two queries a head of keys, half a tile does for four tokens of a row."""
    sample = sampled("k8v4", mx.bfloat16)
    assert attention(Emulator()).coded_widths(sample.shape) == [4, 16]


@pytest.mark.parametrize(
    ("kernel", "old", "new", "said"),
    [
        ("store", "to[i] = pages[own * WORDS + i]", "to[i] = pages[i]", "store differs"),
        ("attend_coded", "sum_of_query[group][half], sum);", "0.0f, sum);", "attend differs by"),
        ("attend_coded", "+ besides_it;", "* 2.0f + besides_it;", "attend differs by"),
        ("attend_coded", "+ besides_it;", "+ besides_itt;", "does not run: a kernel does not compile"),
        ("merge", "values[i] / sum", "0.0f / 0.0f", "attend differs by nan"),
    ],
)
def test_a_kernel_that_is_wrong_is_named(kernel: str, old: str, new: str, said: str) -> None:
    class Broken(Emulator):
        def rewritten(self, text: KernelText) -> KernelText:
            return text._replace(body=text.body.replace(old, new)) if f"_{kernel}_" in text.name else text

    found = check_coded(GPU, attention(Broken()), sampled("k8v4", mx.bfloat16), scale=0.2, cap=None)
    assert found is not None and found.startswith(said)


class WrongForPrompts(Emulator):
    def rewritten(self, text: KernelText) -> KernelText:
        body = text.body.replace("* length", "* 2.0f * length")
        return text._replace(body=body) if "_unpack_" in text.name else text


def test_what_is_wrong_for_prompts_alone_is_left_to_plain_operations_for_them_alone() -> None:
    kernels, sample = CheckedKernels(GPU), sampled("k8v4", mx.bfloat16)
    kernels.check_coded(attention(WrongForPrompts()), sample, scale=0.2, cap=None)
    assert kernels.reads(sample.shape) and not kernels.unpacks(sample.shape)
    [wrong] = kernels.wrong_unpacked.values()
    assert wrong is not None and wrong.startswith("attend differs by")
    right = CheckedKernels(GPU)
    right.check_coded(attention(Emulator()), sample, scale=0.2, cap=None)
    assert right.unpacks(sample.shape)


def test_pages_are_read_that_were_compared_and_no_others() -> None:
    kernels, found = CheckedKernels(GPU), attention(Emulator())
    eight, four = (sampled(codec, mx.bfloat16) for codec in ("affine8", "affine4"))
    kernels.check_coded(found, eight, scale=0.2, cap=None)
    assert kernels.reads(eight.shape) and not kernels.reads(four.shape)
    kernels.check_coded(found, sampled("affine4", mx.bfloat16, heads=1), scale=0.2, cap=None)
    kernels.check_coded(found, sampled("affine4", mx.float16), scale=0.2, cap=None)
    assert not kernels.reads(four.shape), "they are another layer's"


def test_pages_are_not_read_when_one_of_several_kinds_of_layers_is_wrong() -> None:
    kernels, sample = CheckedKernels(GPU), sampled("affine8", mx.bfloat16)
    for scale in (0.2, 0.3):  # the kernel was made for the first
        kernels.check_coded(attention(Emulator()), sample, scale=scale, cap=None)
    assert not kernels.reads(sample.shape)
