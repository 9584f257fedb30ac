"""Prompts over pages in fewer bits, which are unpacked first, against the same over what those are decoded to."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.texts import Kernel, Work
from ingot.kernels.paged.tuning import TUNINGS
from ingot.kernels.paged_attention.inputs import Rows
from ingot.kernels.paged_attention.shapes import Shape
from tests.kernels.paged_attention.memory import BOUNDS, START, Variant, doubles, emulated
from tests.kernels.paged_attention.test_coded import CodedMemory

pytestmark = emulated
CUDA = TUNINGS["cuda"]


def prompts(memory: CodedMemory) -> Rows:
    return Rows.of(memory.tables, memory.memory.lengths, counts=memory.memory.counts, coded=True)


def both(variant: Variant, memory: CodedMemory) -> tuple[mx.array, mx.array]:
    """What queries see of unpacked pages, and of decoded ones."""
    attention, queries = variant.attention(Emulator(7)), memory.memory.queries
    found = attention.attend(queries, prompts(memory), memory.memory.slabs, START, memory.pages(attention))
    return found, attention.attend(queries, memory.memory.rows(), memory.decoded, START)


@pytest.mark.parametrize("codec", ["affine8", "affine4", "affine4/affine8"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_even_steps_are_unpacked_to_the_bits_that_they_are_decoded_to(codec: str, dtype: mx.Dtype) -> None:
    variant = Variant(Shape(4, 2, 64, 64), dtype, tuning=CUDA)
    found, wanted = both(variant, CodedMemory(variant, [110, 200], [40, 20], [1, 2], codec))
    assert mx.array_equal(found, wanted).item()


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_values_that_were_rotated_are_turned_back(size: int, dtype: mx.Dtype) -> None:
    variant = Variant(Shape(2, 1, size, size), dtype, tuning=CUDA)
    found, wanted = map(doubles, both(variant, CodedMemory(variant, [90, 150], [20, 17], [1, 2], "k8v4")))
    assert np.abs(found - wanted).max() <= BOUNDS[dtype] * np.abs(wanted).max()


def test_heads_of_96_and_a_cap() -> None:
    variant = Variant(Shape(5, 1, 96, 96), mx.bfloat16, cap=5.0, tuning=CUDA)
    found, wanted = both(variant, CodedMemory(variant, [150], [20], [2], "affine4/affine8"))
    assert mx.array_equal(found, wanted).item()


def test_pages_that_rows_share_are_unpacked_once() -> None:
    variant = Variant(Shape(2, 1, 64, 64), tuning=CUDA)
    memory = CodedMemory(variant, [300, 300], [20, 20], [4, 4], "affine8")
    memory.tables[1][:3] = memory.tables[0][:3]
    memory.memory.tables[1][:3] = memory.memory.tables[0][:3]
    assert prompts(memory).packed.size == 4 + 1  # type: ignore[union-attr]
    found, wanted = both(variant, memory)
    assert mx.array_equal(found, wanted).item()


def test_a_layer_unpacks_when_the_one_before_has_read() -> None:
    """Both have the same memory: the first one's output is among what the second one's unpacking waits for."""

    waited_for: list[list[mx.array]] = []

    class Watched(Emulator):
        def __call__(self, kernel: Kernel, inputs: list[mx.array], work: Work) -> list[mx.array]:
            if kernel.name == "unpack":
                waited_for.append(inputs)
            return super().__call__(kernel, inputs, work)

    variant = Variant(Shape(2, 1, 64, 64), tuning=CUDA)
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


def test_a_query_s_bits_depend_on_its_row_alone() -> None:
    variant = Variant(Shape(4, 1, 64, 64), tuning=CUDA)
    memory = CodedMemory(variant, [200, 300], [30, 40], [2, 3], "k8v4")
    attention, queries = variant.attention(Emulator(3)), memory.memory.queries
    coded, slabs = memory.pages(attention), memory.memory.slabs
    together = attention.attend(queries, prompts(memory), slabs, START, coded)
    for row, own in enumerate((slice(0, 30), slice(30, 70))):
        alone = Rows.of([memory.tables[row]], [memory.memory.lengths[row]], counts=[own.stop - own.start], coded=True)
        assert mx.array_equal(attention.attend(mx.contiguous(queries[own]), alone, slabs, START, coded), together[own])
