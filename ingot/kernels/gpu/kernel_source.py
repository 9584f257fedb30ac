"""Kinds of kernels: a text and all that is settled when it is compiled; and the program that CUDA compiles for one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from functools import cache
from operator import itemgetter
from typing import NamedTuple

import mlx.core as mx

from ingot.kernels.gpu.texts import Kernel, Template, Work, kernel_text

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
NUMBERS = """#include <cuda_fp16.h>
#include <cuda_bf16.h>
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
"""
"""What the prelude takes for granted. Headers of MLX and cooperative groups would take seconds to compile."""


AFTER_OTHERS = "AFTER_OTHERS()"
"""Where a kernel in a graph waits for the one before it: what it reads behind it may be that one's."""


class Kind(NamedTuple):
    kernel: Kernel
    template: Template
    inputs: tuple[mx.Dtype, ...]
    dimensions: tuple[int, ...]  # of each input whose shape is read
    outputs: tuple[mx.Dtype, ...]


class Program(NamedTuple):
    """A function `name`: arrays in, arrays out, then the sizes of those inputs whose shapes it reads."""

    name: str
    source: str
    shaped: tuple[int, ...]  # inputs whose sizes are passed
    strided: tuple[int, ...]  # inputs that lie as their sizes say, one number behind another


def kind_of(kernel: Kernel, inputs: list[mx.array], work: Work) -> Kind:
    return Kind(
        kernel,
        work.template,
        tuple(array.dtype for array in inputs),
        tuple(inputs[number].ndim for number in shaped(kernel)),
        tuple(output.dtype for output in work.outputs),
    )


@cache
def leading(kernel: Kernel) -> Callable[[list[mx.array]], Iterable[mx.array]]:
    """Takes those of its inputs whose dtypes tell its kinds apart: of inputs named alike but for a number the first."""
    names: dict[str, int] = {}
    for number, name in enumerate(kernel.inputs):
        names.setdefault(re.sub(r"_\d+$", "_", name), number)
    only, *others = names.values()
    return itemgetter(only, *others) if others else lambda inputs: inputs[only : only + 1]


class Rehearsal:
    """A launcher that runs nothing and notes what it would have to compile."""

    def __init__(self) -> None:
        self.kinds: dict[Kind, None] = {}

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: Work) -> list[mx.array]:
        self.kinds[kind_of(kernel, inputs, work)] = None
        return [mx.zeros(output.shape, output.dtype) for output in work.outputs]


def program(kind: Kind) -> Program:
    """The signature is our own: MLX passes no shapes or strides to what it did not compile."""
    text, sizes = kernel_text(kind.kernel, "cuda"), _sizes(kind)
    arguments = [f"const {TYPES[dtype]}* {name}" for name, dtype in zip(text.inputs, kind.inputs, strict=True)]
    arguments += [f"{TYPES[dtype]}* {name}" for name, dtype in zip(text.outputs, kind.outputs, strict=True)]
    arguments += [f"int {size}" for each in sizes.values() for size in each]
    waits = [] if AFTER_OTHERS in text.body + kind.kernel.header else [AFTER_OTHERS]
    lines = [*_shapes(sizes), *_constants(kind.template), *waits, text.body]
    body = "\n".join([f"({', '.join(arguments)}) {{", *lines, "}\n"])
    name = f"{text.name}_{hashlib.sha256(body.encode()).hexdigest()[:12]}"
    source = f'{NUMBERS}{text.header}extern "C" __global__ void {name}{body}'
    return Program(name, source, shaped(kind.kernel), _read(kind.kernel, "strides"))


@cache
def shaped(kernel: Kernel) -> tuple[int, ...]:
    """Inputs whose shapes or strides its text reads."""
    return tuple(sorted({*_read(kernel, "shape"), *_read(kernel, "strides")}))


def _read(kernel: Kernel, what: str) -> tuple[int, ...]:
    return tuple(
        number for number, name in enumerate(kernel.inputs) if re.search(rf"\b{name}_{what}\b", kernel.body) is not None
    )


def _sizes(kind: Kind) -> dict[str, list[str]]:
    """By the input, what its sizes are called."""
    names = [kind.kernel.inputs[number] for number in shaped(kind.kernel)]
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


def _constants(template: Template) -> list[str]:
    lines = []
    for name, value in template:
        if isinstance(value, mx.Dtype):
            lines.append(f"using {name} = {TYPES[value]};")
        else:
            lines.append(f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {str(value).lower()};")
    return lines


Rehearsed = Callable[[Rehearsal], object]
"""Launches by what it is given all that will be launched later."""
