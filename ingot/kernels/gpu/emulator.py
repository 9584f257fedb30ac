"""Runs the kernels' texts on a CPU, for machines without a GPU: as C++, each thread a fiber.

Slow, and true: threads of a group run in an order drawn from a seed between barriers, exchange numbers lane by lane,
and find NaN in shared memory that nobody wrote.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.kernels.device import cpu_name
from ingot.kernels.gpu.kernel_source import (
    Kernel,
    KernelKind,
    KernelText,
    LaunchConfig,
    kernel_kind,
    kernel_text,
    leading_inputs,
)

COMPILER = "g++"
INLINED = ("-finline-functions-called-once", "-finline-small-functions")
"""With these, what -Og compiles in two thirds of the time runs as fast as what -O1 does."""
FLAGS = (
    "-std=c++14",
    "-Og",
    *INLINED,
    "-march=native",
    "-ffp-contract=off",
    "-fno-stack-protector",
    *("-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables"),  # a seventh of the time to compile
    "-U_FORTIFY_SOURCE",
    "-nostdlib",  # this process has it
)
TYPES = {mx.float32: "float", mx.float16: "Half", mx.bfloat16: "Brain", mx.int32: "int", mx.uint8: "uint8_t"}
_ONE_AT_A_TIME = threading.Lock()
"""A compiled kernel keeps its threads in static memory."""


class Emulator:
    """A launcher that runs at once. With `seed` 0 threads run in order."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._settled: dict[object, KernelKind] = {}

    @staticmethod
    def available() -> bool:
        return shutil.which(COMPILER) is not None

    def rewritten(self, text: KernelText) -> KernelText:
        """The text to run; tests break it here."""
        return text

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        """Raises RuntimeError where threads wait for others that never come, or take more than a GPU has, and where
        other launchers would take these arrays for others."""
        kind = self._settled_as(kernel, inputs, work)
        mx.eval(inputs)
        run = self._run(kind)
        made = [mx.zeros(output.shape, output.dtype) for output in work.outputs]
        mx.eval(made)
        views = [_memory(array) for array in (*inputs, *made)]
        shapes = [np.array(view.shape, np.int32) for view in views]
        strides = [np.array([step // view.itemsize for step in view.strides], np.int64) for view in views]
        with _ONE_AT_A_TIME:
            wrong = run(
                _addresses(views),
                _addresses(shapes),
                _addresses(strides),
                (ctypes.c_uint * 3)(*work.groups),
                work.threads,
                work.lent,
                ctypes.c_uint64(self.seed),
            )
        if wrong is not None:
            raise RuntimeError(f"{kernel.name}: {wrong.decode()}")
        return made

    def prepare(self, kinds: Iterable[KernelKind]) -> None:
        """Compile them, as many at once as there are processors. What does not compile is met again when it is used."""
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for compiling in [threads.submit(self._run, kind) for kind in kinds]:
                compiling.exception()

    def _run(self, kind: KernelKind) -> Any:
        values = tuple(
            (name, TYPES[value] if isinstance(value, mx.Dtype) else int(value)) for name, value in kind.template
        )
        types, outputs = (tuple(TYPES[dtype] for dtype in dtypes) for dtypes in (kind.inputs, kind.outputs))
        return _compiled_kernel(self.rewritten(kernel_text(kind.kernel, "emulator")), types, outputs, values)

    def _settled_as(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> KernelKind:
        sizes = tuple(array.itemsize for array in leading_inputs(kernel)(inputs))
        kind = kernel_kind(kernel, inputs, work)
        known = self._settled.setdefault((kernel, work.template, sizes), kind)
        if known != kind:
            raise RuntimeError(f"{kernel.name}: its template does not settle its arrays: {known[2:]}, then {kind[2:]}")
        return kind


def _memory(array: mx.array) -> np.ndarray:
    """The memory of an evaluated array, as integers where numpy has no such numbers."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _addresses(arrays: Sequence[np.ndarray]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


@cache
def _compiled_kernel(
    text: KernelText, types: tuple[str, ...], outputs: tuple[str, ...], template: tuple[tuple[str, str | int], ...]
) -> Any:
    """The function that runs this kernel: compiled now, or found where an earlier process left it."""
    program = _emulator_program(text, types, outputs, template)
    key = hashlib.sha256("\0".join((program, *FLAGS, platform.machine(), cpu_name())).encode()).hexdigest()[:24]
    library = _folder() / f"{key}.so"
    if not library.exists():
        _compile(program, library)
    run = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_char_p
    return run


def _folder() -> Path:
    """Belongs to this user alone: what lies in it is executed."""
    folder = Path(tempfile.gettempdir()) / f"ingot-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise RuntimeError(f"{folder} is not this user's alone: remove it")
    return folder


def _compile(program: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(program)
        command = [COMPILER, *FLAGS, "-w", "-shared", "-fPIC", "-o", str(made), str(source), "-lgcc"]
        plainly = {**os.environ, "LC_ALL": "C"}
        outcome = subprocess.run(command, capture_output=True, text=True, check=False, env=plainly)
        if outcome.returncode != 0:
            raise RuntimeError(f"a kernel does not compile: {outcome.stderr.strip()}")
        made.rename(library)


def _emulator_program(
    text: KernelText, types: tuple[str, ...], outputs: tuple[str, ...], template: tuple[tuple[str, str | int], ...]
) -> str:
    """A file with the signature that MLX would generate, as static pointers, and one function to call."""
    names, kinds = (*text.inputs, *text.outputs), (*(f"const {kind}" for kind in types), *outputs)
    lines = [text.header]
    for name, kind in zip(names, kinds, strict=True):
        lines.append(f"static {kind}* {name}; static const int* {name}_shape; static const int64_t* {name}_strides;")
    for name, value in template:
        lines.append(f"using {name} = {value};" if isinstance(value, str) else f"constexpr int {name} = {value};")
    lines += [
        "static void kernel_body() {",
        text.body,
        "}",
        'extern "C" const char* run(void** arrays, const int** shapes,',
    ]
    lines += ["const int64_t** strides, const unsigned* groups, int threads, int lent, uint64_t seed) {"]
    for number, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        lines.append(f"{name} = ({kind}*)arrays[{number}];")
        lines.append(f"{name}_shape = shapes[{number}]; {name}_strides = strides[{number}];")
    return "\n".join([*lines, "return emulator::run_groups(groups, threads, lent, seed);", "}\n"])
