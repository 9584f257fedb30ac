"""What an NVIDIA GPU will compile, by its own compiler where that is at hand: no device is needed for it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest

from ingot.kernels.delta.kernels import DeltaKernels, DeltaShape, Spans
from ingot.kernels.gpu.texts import Kernel, Work, kernel_text
from ingot.kernels.paged.kernels import PagedAttention, Rows, Shape, Slabs, page_copies, token_slots
from ingot.kernels.paged.tuning import MATRIX, TUNINGS, Tuning

NVCC = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc")
TYPES = {mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.int32: "int32_t"}
INCLUDES = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
template <typename Number>
struct Several {
  Number numbers[8];
  __device__ Number operator[](int i) const { return numbers[i]; }
};
"""
TAKEN = {"shape": "Several<int>", "strides": "Several<int64_t>"}


class Programs:
    """Writes down what it is to launch, as MLX would write it."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: Work) -> list[mx.array]:
        text = kernel_text(kernel, "cuda")
        arguments = []
        for name, array in zip(text.inputs, inputs, strict=True):
            arguments.append(f"const {TYPES[array.dtype]}* {name}")
            arguments += [f"{taken} {name}_{what}" for what, taken in TAKEN.items() if f"{name}_{what}" in text.body]
        arguments += [f"{TYPES[made.dtype]}* {name}" for name, made in zip(text.outputs, work.outputs, strict=True)]
        constants = [
            f"using {name} = {TYPES[value]};"
            if isinstance(value, mx.Dtype)
            else f"constexpr int {name} = {int(value)};"
            for name, value in work.template
        ]
        lines = [INCLUDES, text.header, f"__global__ void run({', '.join(arguments)}) {{", *constants, text.body, "}"]
        self.texts[kernel.name] = "\n".join(lines)
        return [mx.zeros(made.shape, made.dtype) for made in work.outputs]


def paged(dtype: mx.Dtype, tuning: Tuning, size: int, count: int = 8) -> dict[str, str]:
    programs, start = Programs(), mx.zeros(1, mx.int32)
    slab = mx.zeros((1, 2, 64, size), dtype)
    attention = PagedAttention(programs, tuning, Shape(8, 2, size, size), dtype, scale=1.0, cap=9.0, window=700)
    slabs, keys = Slabs([slab], [slab]), mx.zeros((1, 2, size), dtype)
    attention.write(keys, keys, token_slots([(0, 0)]), slabs, start)
    attention.copy(page_copies([(0, 0, 1)]), slabs, start)
    attention.attend(mx.zeros((count, 8, size), dtype), Rows.of([[0]], [60], counts=[count]), slabs, start)
    return programs.texts


def delta(dtype: mx.Dtype) -> dict[str, str]:
    programs, shape = Programs(), DeltaShape(2, 4, 128, 128, 4)
    weights = {"filter": mx.zeros((shape.channels, 4, 1)), "a_log": mx.zeros(4), "dt_bias": mx.zeros(4)}
    kernels, spans = DeltaKernels(programs, shape, dtype, **weights), Spans.of([(0, 1, 0, 0)])
    convolved = kernels.convolve(mx.zeros((1, shape.channels), dtype), spans, mx.zeros((1, *shape.tail)))
    kernels.advance(convolved, mx.zeros((1, 4), dtype), mx.zeros((1, 4), dtype), spans, mx.zeros((1, *shape.state)))
    return programs.texts


def compiled(text: str, folder: Path) -> str:
    """What the assembler says of it."""
    source = folder / "kernel.cu"
    source.write_text(text)
    target = ["-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-std=c++17", "-Xptxas", "-v"]
    command = [str(NVCC), *target, "-o", str(folder / "kernel.cubin"), str(source)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr[:3000]
    return outcome.stderr


@pytest.mark.parametrize("name", ["write", "copy", "attend", "merge"])
def test_kernels_over_pages_compile_and_keep_their_numbers_in_registers(name: str, tmp_path: Path) -> None:
    assert " 0 bytes spill stores" in compiled(paged(mx.bfloat16, TUNINGS["cuda"], 128)[name], tmp_path)


@pytest.mark.parametrize(("size", "count", "groups"), [(64, 8, 4), (128, 4, 4), (128, 8, 3), (128, 16, 3), (256, 8, 2)])
def test_matrix_units_keep_sums_in_registers_and_groups_stand_side_by_side(
    size: int, count: int, groups: int, tmp_path: Path
) -> None:
    said = compiled(paged(mx.bfloat16, MATRIX, size, count)["attend_wide"], tmp_path)
    assert " 0 bytes spill stores" in said
    registers, shared = (int(re.findall(rf"(\d+) {what}", said)[0]) for what in ("registers", "bytes smem"))
    assert min(65536 // (128 * (registers + 7 & ~7)), 228 * 1024 // (shared + 1024)) >= groups, "on one processor"


def test_matrix_units_take_halves(tmp_path: Path) -> None:
    assert " 0 bytes spill stores" in compiled(paged(mx.float16, MATRIX, 128)["attend_wide"], tmp_path)


@pytest.mark.parametrize("name", ["convolve", "advance"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_the_gated_delta_rule_compiles_and_keeps_its_states_in_registers(
    dtype: mx.Dtype, name: str, tmp_path: Path
) -> None:
    assert " 0 bytes spill stores" in compiled(delta(dtype)[name], tmp_path)
