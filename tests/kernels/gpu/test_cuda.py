"""What an NVIDIA GPU will compile, by its own compiler where that is at hand: no device is needed for it."""

from __future__ import annotations

import ctypes
import re
from functools import cache

import mlx.core as mx
import pytest

from ingot.kernels.dense_matmul.kernels import DTYPES as DENSE_DTYPES
from ingot.kernels.dense_matmul.kernels import DenseProduct
from ingot.kernels.gated_delta.kernels import DeltaKernels, DeltaShape, Spans
from ingot.kernels.gpu.kernel_source import Kind, Rehearsal, program
from ingot.kernels.gpu.nvrtc import Nvrtc, NvrtcError
from ingot.kernels.packed.scratch import Scratch
from ingot.kernels.packed_matmul.kernels import DTYPES, PackedProduct, PackedWeights, Packing
from ingot.kernels.paged.slabs import Slabs
from ingot.kernels.paged.tuning import TUNINGS, Tuning
from ingot.kernels.paged_attention.inputs import Rows, page_copies, token_slots
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.rope import Turning, TurnShape
from ingot.kernels.paged_attention.shapes import Shape
from tests.kernels.paged_attention.memory import VECTORS


class Verbose(Nvrtc):
    """Keeps what the assembler says."""

    said = ""

    def options(self, architecture: str) -> tuple[str, ...]:
        return (*super().options(architecture), "--ptxas-options=-v")

    def _taken(self, program: ctypes.c_void_p, what: str) -> bytes:
        if what == "CUBIN":
            self.said = self._said(program)
        return super()._taken(program, what)


@cache
def compiler() -> Verbose | None:
    try:
        found = Verbose.find()
    except NvrtcError:
        return None
    assert isinstance(found, Verbose)
    return found


WITHOUT_MORE = ("multiply", "stream_multiply", "stream_multiply_parted")
"""Products that nothing becomes of."""

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs NVRTC")


def paged(dtype: mx.Dtype, tuning: Tuning, size: int, count: int = 8) -> dict[str, Kind]:
    run, start = Rehearsal(), mx.zeros(1, mx.int32)
    slab = mx.zeros((1, 2, 64, size), dtype)
    attention = PagedAttention(run, tuning, Shape(8, 2, size, size), dtype, scale=1.0, cap=9.0, window=700)
    slabs, keys = Slabs([slab], [slab]), mx.zeros((1, 2, size), dtype)
    attention.write(keys, keys, token_slots([(0, 0)]), slabs, start)
    attention.copy(page_copies([(0, 0, 1)]), slabs, start)
    attention.attend(mx.zeros((count, 8, size), dtype), Rows.of([[0] * 10], [600], counts=[count]), slabs, start)
    turned = TurnShape(Shape(8, 2, size, size), dims=size // 2, normed=True)
    Turning(run, tuning, turned, dtype, [(None, 1e-6)] * 2)(
        mx.zeros((1, 12 * size), dtype), mx.zeros((1, size // 2)), token_slots([(0, 0)]), slabs, start
    )
    return {kind.kernel.name: kind for kind in run.kinds}


def delta(dtype: mx.Dtype) -> dict[str, Kind]:
    run, shape = Rehearsal(), DeltaShape(2, 4, 128, 128, 4)
    weights = {"filter": mx.zeros((shape.channels, 4, 1)), "a_log": mx.zeros(4), "dt_bias": mx.zeros(4)}
    kernels, spans = DeltaKernels(run, shape, dtype, **weights), Spans.of([(0, 1, 0, 0)])
    convolved = kernels.convolve(mx.zeros((1, shape.channels), dtype), spans, mx.zeros((1, *shape.tail)))
    kernels.advance(convolved, mx.zeros((1, 4), dtype), mx.zeros((1, 4), dtype), spans, mx.zeros((1, *shape.state)))
    return {kind.kernel.name: kind for kind in run.kinds}


def packed(dtype: mx.Dtype, packing: Packing, outputs: int, rows: int) -> dict[str, Kind]:
    run, groups = Rehearsal(), 64
    factors = mx.zeros((1, outputs, groups), dtype)
    words = mx.zeros((1, outputs, groups * packing.group * packing.bits // 32), mx.int32)
    experts = PackedWeights(packing, words, factors, factors)
    product, x = PackedProduct(run, packing, dtype), mx.zeros((rows, experts.columns), dtype)
    product(x, experts.part(0))
    product.gather(x, experts, mx.zeros(rows, mx.int32))
    Scratch(run, mx.zeros(1, dtype)).unpacked(x, experts.part(0))
    return {kind.kernel.name: kind for kind in run.kinds}


def dense(rows: int, outputs: int, columns: int, dtype: mx.Dtype = mx.bfloat16) -> dict[str, Kind]:
    run = Rehearsal()
    product, x, weight = DenseProduct(run), mx.zeros((rows, columns), dtype), mx.zeros((outputs, columns), dtype)
    product(x, weight, bias=mx.zeros(outputs, dtype), residual=mx.zeros((rows, outputs), dtype))
    product(x, weight)
    product.gated(x, weight)
    return {kind.kernel.name: kind for kind in run.kinds}


def assembled(kind: Kind) -> str:
    """What the assembler says of it."""
    nvrtc, made = compiler(), program(kind)
    assert nvrtc is not None
    assert nvrtc.compiled(made.name, made.source, "sm_90a").startswith(b"\x7fELF")
    if "registers" not in nvrtc.said:
        pytest.skip("the compiler knew the program, and its assembler said nothing")
    return nvrtc.said


@pytest.mark.parametrize("name", ["locate", "write", "turn", "copy", "attend", "merge"])
def test_kernels_over_pages_compile_and_keep_their_numbers_in_registers(name: str) -> None:
    assert " 0 bytes spill stores" in assembled(paged(mx.bfloat16, VECTORS, 128)[name])


@pytest.mark.parametrize(("size", "count", "groups"), [(64, 8, 4), (128, 4, 4), (128, 8, 3), (128, 16, 2), (256, 8, 2)])
def test_matrix_units_keep_sums_in_registers_and_groups_stand_side_by_side(size: int, count: int, groups: int) -> None:
    said = assembled(paged(mx.bfloat16, TUNINGS["cuda"], size, count)["attend_wide"])
    assert " 0 bytes spill stores" in said
    registers, shared = (int(re.findall(rf"(\d+) {what}", said)[0]) for what in ("registers", "bytes smem"))
    assert min(65536 // (128 * (registers + 7 & ~7)), 228 * 1024 // (shared + 1024)) >= groups, "on one processor"


def test_matrix_units_take_halves() -> None:
    assert " 0 bytes spill stores" in assembled(paged(mx.float16, TUNINGS["cuda"], 128)["attend_wide"])


@pytest.mark.parametrize("name", ["convolve", "advance"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_the_gated_delta_rule_compiles_and_keeps_its_states_in_registers(dtype: mx.Dtype, name: str) -> None:
    assert " 0 bytes spill stores" in assembled(delta(dtype)[name])


@pytest.mark.parametrize(("outputs", "rows", "groups"), [(4096, 1, 2), (4096, 16, 2), (28672, 1, 2), (28672, 16, 1)])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_packed_weights_leave_room_for_groups(bits: int, outputs: int, rows: int, groups: int) -> None:
    said = assembled(packed(mx.bfloat16, Packing(bits, 64), outputs, rows)["multiply"])
    assert " 0 bytes spill stores" in said
    assert 65536 // (256 * (int(re.findall(r"(\d+) registers", said)[0]) + 7 & ~7)) >= groups, "on one processor"


@pytest.mark.parametrize("name", ["multiply", "gather", "unpack"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_with_packed_weights_keep_their_numbers_in_registers(dtype: mx.Dtype, name: str) -> None:
    assert " 0 bytes spill stores" in assembled(packed(dtype, Packing(5, 64), 4096, 9)[name])


@pytest.mark.parametrize("columns", [4096, 4104])
@pytest.mark.parametrize("outputs", [4096, 28672])
@pytest.mark.parametrize("rows", [8, 16, 17, 32])
def test_products_with_weights_of_16_bits_keep_their_sums_in_registers(rows: int, outputs: int, columns: int) -> None:
    [(name, kind)] = [each for each in dense(rows, outputs, columns).items() if each[0] in WITHOUT_MORE]
    said = assembled(kind)
    assert " 0 bytes spill stores" in said
    assert name.startswith("stream") == (rows > 16)
    for shared in re.findall(r"(\d+) bytes smem", said):
        assert int(shared) <= 48 * 1024, "or no launch takes it"


@pytest.mark.parametrize("name", ["multiply_biased_added", "multiply_gated"])
@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
def test_what_becomes_of_products_with_weights_of_16_bits_compiles(dtype: mx.Dtype, name: str) -> None:
    assert " 0 bytes spill stores" in assembled(dense(9, 4096, 4096, dtype)[name])
