"""Kernel sources. A kernel is a body in the common subset of CUDA, Metal and C++, behind a prelude for each.

A kernel kind is a source with all compile-time parameters; `cuda_program` is what CUDA compiles for one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

import mlx.core as mx

Prelude = Literal["cuda", "metal", "emulator"]
KernelTemplate = tuple[tuple[str, "int | bool | mx.Dtype"], ...]
"""Compile-time parameters of a body."""
SOURCE = Path(__file__).parent / "source"


class Kernel(NamedTuple):
    """A body, its header, and the names of its arguments."""

    room: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    body: str
    matrix: bool = False  # it uses matrix units


class OutputSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: mx.Dtype


class LaunchConfig(NamedTuple):
    """How a kernel is launched: groups, threads of a group, and outputs."""

    template: KernelTemplate
    groups: tuple[int, int, int]
    threads: int
    outputs: tuple[OutputSpec, ...]
    lent: int = 0  # bytes of dynamic shared memory (`LENT_FLOATS`)


class KernelText(NamedTuple):
    name: str  # includes a digest of the text, since compiled kernels are cached by name
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    body: str


@cache
def kernel_text(kernel: Kernel, prelude: Prelude) -> KernelText:
    files = [f"prelude_{prelude}.h", "common.h", *([f"matrix_{prelude}.h", "tiles.h"] if kernel.matrix else [])]
    header = "".join(read_source(SOURCE / file) for file in files) + kernel.header
    digest = hashlib.sha256((header + kernel.body).encode()).hexdigest()[:12]
    name = f"ingot_{kernel.room}_{kernel.name}_{digest}"
    return KernelText(name, kernel.inputs, kernel.outputs, header, kernel.body)


def read_source(file: Path) -> str:
    """A file without comments and indentation, as mlx assembles the text at every call."""
    lines = (re.sub(r"\s*//.*", "", line).strip() for line in file.read_text().splitlines())
    return "".join(f"{line}\n" for line in lines if line)


TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.bool_: "bool",
}
NUMBER_TYPES = """#include <cuda_fp16.h>
#include <cuda_bf16.h>
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
"""
"""What the prelude needs. Headers of MLX and cooperative groups would take seconds to compile."""


AFTER_OTHERS = "AFTER_OTHERS()"
"""Where a kernel in a graph waits for the previous one, before it reads that one's outputs."""


class KernelKind(NamedTuple):
    kernel: Kernel
    template: KernelTemplate
    inputs: tuple[mx.Dtype, ...]
    dimensions: tuple[int, ...]  # of each input whose shape is read
    outputs: tuple[mx.Dtype, ...]


class CudaProgram(NamedTuple):
    """A function `name`, with inputs, outputs, and the sizes of inputs whose shapes it reads."""

    name: str
    source: str
    shaped: tuple[int, ...]  # inputs whose sizes are passed
    strided: tuple[int, ...]  # inputs that must be contiguous


def kernel_kind(kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> KernelKind:
    return KernelKind(
        kernel,
        work.template,
        tuple(array.dtype for array in inputs),
        tuple(inputs[number].ndim for number in shaped_inputs(kernel)),
        tuple(output.dtype for output in work.outputs),
    )


@cache
def leading_inputs(kernel: Kernel) -> Callable[[list[mx.array]], Iterable[mx.array]]:
    """Selects the inputs whose dtypes distinguish its kinds: of inputs whose names differ only in a number, the
    first."""
    names: dict[str, int] = {}
    for number, name in enumerate(kernel.inputs):
        names.setdefault(re.sub(r"_\d+$", "_", name), number)
    only, *others = names.values()
    return itemgetter(only, *others) if others else lambda inputs: inputs[only : only + 1]


class LaunchRehearsal:
    """A launcher that runs nothing and records what it would have to compile."""

    def __init__(self) -> None:
        self.kinds: dict[KernelKind, None] = {}

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        self.kinds[kernel_kind(kernel, inputs, work)] = None
        return [mx.zeros(output.shape, output.dtype) for output in work.outputs]


def cuda_program(kind: KernelKind) -> CudaProgram:
    """The signature is our own, as MLX passes no shapes or strides to kernels that it did not compile."""
    text, sizes = kernel_text(kind.kernel, "cuda"), _size_names(kind)
    arguments = [f"const {TYPES[dtype]}* {name}" for name, dtype in zip(text.inputs, kind.inputs, strict=True)]
    arguments += [f"{TYPES[dtype]}* {name}" for name, dtype in zip(text.outputs, kind.outputs, strict=True)]
    arguments += [f"int {size}" for each in sizes.values() for size in each]
    waits = [] if AFTER_OTHERS in text.body + kind.kernel.header else [AFTER_OTHERS]
    lines = [*_shapes(sizes), *_constants(kind.template), *waits, text.body]
    body = "\n".join([f"({', '.join(arguments)}) {{", *lines, "}\n"])
    name = f"{text.name}_{hashlib.sha256(body.encode()).hexdigest()[:12]}"
    source = f'{NUMBER_TYPES}{text.header}extern "C" __global__ void {name}{body}'
    return CudaProgram(name, source, shaped_inputs(kind.kernel), _inputs_read(kind.kernel, "strides"))


@cache
def shaped_inputs(kernel: Kernel) -> tuple[int, ...]:
    """Inputs whose shapes or strides its text reads."""
    return tuple(sorted({*_inputs_read(kernel, "shape"), *_inputs_read(kernel, "strides")}))


def _inputs_read(kernel: Kernel, what: str) -> tuple[int, ...]:
    return tuple(
        number for number, name in enumerate(kernel.inputs) if re.search(rf"\b{name}_{what}\b", kernel.body) is not None
    )


def _size_names(kind: KernelKind) -> dict[str, list[str]]:
    """By input, the names of its sizes."""
    names = [kind.kernel.inputs[number] for number in shaped_inputs(kind.kernel)]
    return {
        name: [f"{name}_size_{axis}" for axis in range(count)]
        for name, count in zip(names, kind.dimensions, strict=True)
    }


def _shapes(sizes: dict[str, list[str]]) -> list[str]:
    lines = []
    for name, own in sizes.items():
        steps = [" * ".join(["(int64_t)1", *own[axis + 1 :]]) for axis in range(len(own))]
        lines.append(f"const int {name}_shape[] = {{{', '.join(own)}}};")
        lines.append(f"const int64_t {name}_strides[] = {{{', '.join(steps)}}};")
    return lines


def _constants(template: KernelTemplate) -> list[str]:
    lines = []
    for name, value in template:
        if isinstance(value, mx.Dtype):
            lines.append(f"using {name} = {TYPES[value]};")
        else:
            lines.append(f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {str(value).lower()};")
    return lines


RehearsedWork = Callable[[LaunchRehearsal], object]
"""Launches, by the passed launcher, all kernels that will be launched later."""
