"""The kernels' texts: one for all devices, in what MLX lets through."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import SOURCE, Kernel, KernelText, LaunchConfig, Prelude
from ingot.kernels.gpu.kernel_source import kernel_text as text_of
from ingot.kernels.paged_attention.inputs import INPUTS, MATRIX, KernelRows, paged_kernel
from ingot.kernels.paged_attention.shapes import SLAB_INPUTS, TUNINGS, AttentionShape
from tests.kernels.paged_attention.memory import BOUNDS, START, Variant, doubles, emulated
from tests.kernels.paged_attention.test_coded import CodedMemory

KERNELS = tuple(name for name in INPUTS if name not in (*MATRIX, "locate"))
"""Those that Metal has, too."""
ATTRIBUTES = (
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "simdgroup_index_in_threadgroup",
    "thread_index_in_simdgroup",
)
BUFFERS_OF_METAL = 31
SMALL = {"numbers", "angles", "norms", "table", "rows", "after", "slots", "copies", "keys", "values"}
"""Inputs that may be of a few numbers."""


def kernel_text(name: str, prelude: Prelude, slabs: int) -> KernelText:
    return text_of(paged_kernel(name, slabs), prelude)


def _defined(prelude: str) -> set[str]:
    """What kernels may use of a prelude; how the emulator does it stands in a namespace of its own."""
    text = re.sub(
        r"namespace emulator \{.*?\}  // namespace emulator",
        "",
        (SOURCE / f"prelude_{prelude}.h").read_text(),
        flags=re.S,
    )
    text = text.replace("#define _XOPEN_SOURCE 700", "")
    found = set(re.findall(r"#define (\w+)", text)) | set(re.findall(r"^typedef \w+ (\w+);", text, re.M))
    return (
        found
        | set(re.findall(r"^(?:INLINE|MERGED|inline) \w+ (\w+)\(", text, re.M))
        | set(re.findall(r"^struct (Brain)", text, re.M))
    )


def test_preludes_offer_the_same_words() -> None:
    cuda, metal, emulated = (_defined(name) for name in ("cuda", "metal", "emulator"))
    assert cuda - set(ATTRIBUTES) == metal, "Metal has the attributes by itself"
    assert emulated == cuda


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_body_is_the_same_on_every_device(kernel: str) -> None:
    bodies = {kernel_text(kernel, prelude, 4).body for prelude in ("cuda", "metal", "emulator")}  # type: ignore[arg-type]
    assert len(bodies) == 1
    assert not re.search(r"#\s*(if|ifdef|ifndef|else)\b", bodies.pop() + (SOURCE / "common.h").read_text())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("slabs", SLAB_INPUTS)
def test_a_kernel_has_no_more_buffers_than_metal_allows(kernel: str, slabs: int) -> None:
    text = kernel_text(kernel, "metal", slabs)
    extra = sum(f"{name}_{kind}" in text.body for name in text.inputs for kind in ("shape", "strides", "ndim"))
    assert len(text.inputs) + extra + len(text.outputs) <= BUFFERS_OF_METAL


@pytest.mark.parametrize("kernel", KERNELS)
def test_shapes_are_asked_for_by_inputs_that_have_them(kernel: str) -> None:
    """MLX looks for names in the text: one that ends like another's would get a buffer that nobody counted."""
    text = kernel_text(kernel, "metal", SLAB_INPUTS[-1])
    asked = re.findall(r"(\w+)_(?:shape|strides|ndim)\b", text.body)
    for name in text.inputs:
        assert not any(word != name and word.endswith(name) for word in asked)
    assert set(asked) <= set(text.inputs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_attributes_stand_in_the_body_where_mlx_looks_for_them(kernel: str) -> None:
    text = kernel_text(kernel, "metal", 1)
    assert not any(name in text.header for name in ATTRIBUTES)
    assert "thread_index_in_simdgroup" in text.body and "threadgroup_position_in_grid" in text.body


def test_another_text_has_another_name() -> None:
    names = {kernel_text(kernel, "cuda", slabs).name for kernel in ("write", "copy", "attend") for slabs in SLAB_INPUTS}
    assert len(names) == 3 * len(SLAB_INPUTS)
    assert kernel_text("attend", "cuda", 1).name != kernel_text("attend", "metal", 1).name


@pytest.mark.parametrize("kernel", KERNELS)
def test_small_inputs_are_only_indexed(kernel: str) -> None:
    """Metal has arrays of fewer than eight numbers in another address space: no pointer may be made of one."""
    text = kernel_text(kernel, "metal", 1)
    for name in SMALL & set(text.inputs):
        for use in re.findall(rf"\b{name}\b(.)", text.body):
            assert use == "[", f"{name} is used other than as {name}[...]"


def test_the_kernel_for_matrix_units_is_the_same_where_there_are_any() -> None:
    cuda, emulated = (kernel_text("attend_wide", prelude, 4) for prelude in ("cuda", "emulator"))
    assert cuda.body == emulated.body and "mma.sync" in cuda.header and "mma.sync" not in emulated.header
    offered = [set(re.findall(r"(\w+)\(", (SOURCE / f"matrix_{name}.h").read_text())) for name in ("cuda", "emulator")]
    assert {"two_of", "load_tiles", "copy_chunk", "end_copies", "store_two"} <= offered[0] & offered[1]


only_unpacking = emulated
CUDA = TUNINGS["cuda"]


def prompts(memory: CodedMemory) -> KernelRows:
    return KernelRows.of(memory.tables, memory.memory.lengths, counts=memory.memory.counts, coded=True)


def both(variant: Variant, memory: CodedMemory) -> tuple[mx.array, mx.array]:
    """What queries see of unpacked pages, and of decoded ones."""
    attention, queries = variant.attention(Emulator(7)), memory.memory.queries
    found = attention.attend(queries, prompts(memory), memory.memory.slabs, START, memory.pages(attention))
    return found, attention.attend(queries, memory.memory.rows(), memory.decoded, START)


@only_unpacking
@pytest.mark.parametrize("codec", ["affine8", "affine4", "affine4/affine8"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_even_steps_are_unpacked_to_the_bits_that_they_are_decoded_to(codec: str, dtype: mx.Dtype) -> None:
    variant = Variant(AttentionShape(4, 2, 64, 64), dtype, tuning=CUDA)
    found, wanted = both(variant, CodedMemory(variant, [110, 200], [40, 20], [1, 2], codec))
    assert mx.array_equal(found, wanted).item()


@only_unpacking
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_values_that_were_rotated_are_turned_back(size: int, dtype: mx.Dtype) -> None:
    variant = Variant(AttentionShape(2, 1, size, size), dtype, tuning=CUDA)
    found, wanted = map(doubles, both(variant, CodedMemory(variant, [90, 150], [20, 17], [1, 2], "k8v4")))
    assert np.abs(found - wanted).max() <= BOUNDS[dtype] * np.abs(wanted).max()


@only_unpacking
def test_heads_of_96_and_a_cap() -> None:
    variant = Variant(AttentionShape(5, 1, 96, 96), mx.bfloat16, cap=5.0, tuning=CUDA)
    found, wanted = both(variant, CodedMemory(variant, [150], [20], [2], "affine4/affine8"))
    assert mx.array_equal(found, wanted).item()


@only_unpacking
def test_pages_that_rows_share_are_unpacked_once() -> None:
    variant = Variant(AttentionShape(2, 1, 64, 64), tuning=CUDA)
    memory = CodedMemory(variant, [300, 300], [20, 20], [4, 4], "affine8")
    memory.tables[1][:3] = memory.tables[0][:3]
    memory.memory.tables[1][:3] = memory.memory.tables[0][:3]
    assert prompts(memory).packed.size == 4 + 1  # type: ignore[union-attr]
    found, wanted = both(variant, memory)
    assert mx.array_equal(found, wanted).item()


@only_unpacking
def test_a_layer_unpacks_when_the_one_before_has_read() -> None:
    """Both have the same memory: the first one's output is among what the second one's unpacking waits for."""

    waited_for: list[list[mx.array]] = []

    class Watched(Emulator):
        def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
            if kernel.name == "unpack":
                waited_for.append(inputs)
            return super().__call__(kernel, inputs, work)

    variant = Variant(AttentionShape(2, 1, 64, 64), tuning=CUDA)
    attention = variant.attention(Watched())
    layers = [CodedMemory(variant, [300], [20], [coded], "affine8") for coded in (4, 4)]
    layers[1].coded = [slab[::-1] + 0 for slab in layers[1].coded]
    mx.eval(layers[1].coded)
    rows = prompts(layers[0])
    found = [
        attention.attend(each.memory.queries, rows, each.memory.slabs, START, each.pages(attention)) for each in layers
    ]
    one, other = waited_for
    assert any(given is found[0] for given in other)
    assert [id(room) for room in one[-2:]] == [id(room) for room in other[-2:]]
    alone = attention.attend(
        layers[1].memory.queries, prompts(layers[0]), layers[1].memory.slabs, START, layers[1].pages(attention)
    )
    assert mx.array_equal(found[1], alone).item() and not mx.array_equal(found[0], alone).item()


@only_unpacking
def test_a_query_s_bits_depend_on_its_row_alone() -> None:
    variant = Variant(AttentionShape(4, 1, 64, 64), tuning=CUDA)
    memory = CodedMemory(variant, [200, 300], [30, 40], [2, 3], "k8v4")
    attention, queries = variant.attention(Emulator(3)), memory.memory.queries
    coded, slabs = memory.pages(attention), memory.memory.slabs
    together = attention.attend(queries, prompts(memory), slabs, START, coded)
    for row, own in enumerate((slice(0, 30), slice(30, 70))):
        alone = KernelRows.of(
            [memory.tables[row]], [memory.memory.lengths[row]], counts=[own.stop - own.start], coded=True
        )
        assert mx.array_equal(attention.attend(mx.contiguous(queries[own]), alone, slabs, START, coded), together[own])
