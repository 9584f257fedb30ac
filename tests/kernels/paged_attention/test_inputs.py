"""The kernels' texts: one for all devices, in what MLX lets through."""

from __future__ import annotations

import re

import pytest

from ingot.kernels.gpu.texts import SOURCE, KernelText, Prelude
from ingot.kernels.gpu.texts import kernel_text as text_of
from ingot.kernels.paged.texts import INPUTS, MATRIX, paged_kernel
from ingot.kernels.paged.tuning import SLABS

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
        r"namespace emulator \{.*\}  // namespace emulator",
        "",
        (SOURCE / f"prelude_{prelude}.h").read_text(),
        flags=re.S,
    )
    text = text.replace("#define _XOPEN_SOURCE 700", "")
    found = set(re.findall(r"#define (\w+)", text)) | set(re.findall(r"^typedef \w+ (\w+);", text, re.M))
    return (
        found
        | set(re.findall(r"^(?:INLINE|inline) \w+ (\w+)\(", text, re.M))
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
@pytest.mark.parametrize("slabs", SLABS)
def test_a_kernel_has_no_more_buffers_than_metal_allows(kernel: str, slabs: int) -> None:
    text = kernel_text(kernel, "metal", slabs)
    extra = sum(f"{name}_{kind}" in text.body for name in text.inputs for kind in ("shape", "strides", "ndim"))
    assert len(text.inputs) + extra + len(text.outputs) <= BUFFERS_OF_METAL


@pytest.mark.parametrize("kernel", KERNELS)
def test_shapes_are_asked_for_by_inputs_that_have_them(kernel: str) -> None:
    """MLX looks for names in the text: one that ends like another's would get a buffer that nobody counted."""
    text = kernel_text(kernel, "metal", 12)
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
    names = {kernel_text(kernel, "cuda", slabs).name for kernel in ("write", "copy", "attend") for slabs in SLABS}
    assert len(names) == 3 * len(SLABS)
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
