"""Kernels' texts. A kernel is a body in the common subset of CUDA, Metal and C++, behind a prelude for each."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import mlx.core as mx

Prelude = Literal["cuda", "metal", "emulator"]
Template = tuple[tuple[str, "int | bool | mx.Dtype"], ...]
"""Names in a body that stand for something else in each kernel that is made of it."""
SOURCE = Path(__file__).parent / "source"


class Kernel(NamedTuple):
    """A body, what it begins with, and what its arguments are called."""

    room: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    body: str
    matrix: bool = False  # it multiplies by matrix units


class Output(NamedTuple):
    shape: tuple[int, ...]
    dtype: mx.Dtype


class Work(NamedTuple):
    """How a kernel is run: in groups of so many threads, and what it gives."""

    template: Template
    groups: tuple[int, int, int]
    threads: int
    outputs: tuple[Output, ...]
    lent: int = 0  # bytes of shared memory beside what the text declares (`LENT_FLOATS`)


class KernelText(NamedTuple):
    name: str  # another one for another text: what is compiled is kept by name
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    body: str


@cache
def kernel_text(kernel: Kernel, prelude: Prelude) -> KernelText:
    files = [f"prelude_{prelude}.h", "common.h", *([f"matrix_{prelude}.h", "tiles.h"] if kernel.matrix else [])]
    header = "".join(read(SOURCE / file) for file in files) + kernel.header
    digest = hashlib.sha256((header + kernel.body).encode()).hexdigest()[:12]
    name = f"ingot_{kernel.room}_{kernel.name}_{digest}"
    return KernelText(name, kernel.inputs, kernel.outputs, header, kernel.body)


def read(file: Path) -> str:
    """A file without comments and indentation: mlx puts the text together anew at every call."""
    lines = (re.sub(r"\s*//.*", "", line).strip() for line in file.read_text().splitlines())
    return "".join(f"{line}\n" for line in lines if line)
