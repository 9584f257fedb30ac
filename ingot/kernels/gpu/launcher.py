"""Launching kernels: compiled by ourselves on CUDA, by MLX on Metal, and otherwise run by the emulator.

On CUDA kernels are compiled several at a time, cached in files, and launched by MLX. A kernel that cannot be compiled,
or fails on first use, is compiled by MLX instead.

At load the kernels of a layer are rehearsed (`LaunchRehearsal`): launched by a launcher that only notes what would have
to be compiled. Those are compiled in parallel before the layer's kernels are checked, so that nothing is compiled while
a request waits; a test holds that. MLX passes neither shapes nor strides to a kernel that it did not compile: a source
that reads an input's shape gets the sizes after the arrays, and inputs must be contiguous.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, Self

import mlx.core as mx

from ingot.kernels.device import Device, acting_as
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import (
    CudaProgram,
    Kernel,
    KernelKind,
    KernelTemplate,
    LaunchConfig,
    LaunchRehearsal,
    Prelude,
    RehearsedWork,
    cuda_program,
    kernel_kind,
    kernel_text,
    leading_inputs,
)
from ingot.kernels.gpu.mlx_kernels import CompilationNeeds, MlxCompilation, MlxKernelFolder
from ingot.kernels.gpu.nvrtc import (
    DEFAULT_CUBIN_FOLDER,
    CubinCache,
    Nvrtc,
    NvrtcError,
    cubin_key,
    gpu_architecture,
)
from ingot.observe.logs import report_step

log = logging.getLogger("ingot.kernels")


class Launcher(Protocol):
    """Runs a kernel on arrays and returns its outputs. Kernels may write to their inputs in place. The template and
    item sizes determine the dtypes of all arrays; inputs whose names differ only in a number have the same dtype."""

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]: ...


class Launched:
    """The base of what launches kernels; `by` returns the same with another launcher."""

    _run: Launcher

    @property
    def launcher(self) -> Launcher:
        return self._run

    def by(self, run: Launcher) -> Self:
        other = copy(self)
        other._run = run
        return other


class MlxLauncher:
    """Compiles on the first call of each kind; lazy, like any MLX operation."""

    def __init__(self, prelude: Prelude, compilation: CompilationStats | None = None) -> None:
        """`compilation` says why MLX compiles kernels that we would otherwise compile."""
        self.compilation = compilation
        self._prelude: Prelude = prelude
        self._make: Callable[..., Any] = mx.fast.cuda_kernel if prelude == "cuda" else mx.fast.metal_kernel
        self._made: dict[tuple[Kernel, int], Any] = {}

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        run = self._made.get((kernel, work.lent)) or self._compiled(kernel, work.lent)
        along, down, deep = work.groups
        made: list[mx.array] = run(
            inputs=inputs,
            template=work.template,
            grid=(along * work.threads, down, deep),
            threadgroup=(work.threads, 1, 1),
            output_shapes=[output.shape for output in work.outputs],
            output_dtypes=[output.dtype for output in work.outputs],
        )
        return made

    def _compiled(self, kernel: Kernel, lent: int) -> Any:
        text = kernel_text(kernel, self._prelude)
        run = self._make(
            name=text.name,
            input_names=list(text.inputs),
            output_names=list(text.outputs),
            source=text.body,
            header=text.header,
            ensure_row_contiguous=False,  # a copy would be written instead of the original
            **({"shared_memory": lent} if lent else {}),  # Metal has none
        )
        self._made[kernel, lent] = run
        return run


@cache
def kernel_launcher(device: Device) -> Launcher | None:
    """The launcher for this device; None where there is none."""
    if device.kind == "cpu":
        return None
    if acting_as() is not None or mx.default_device().type == mx.cpu:
        return Emulator() if Emulator.available() else None
    return MlxLauncher("metal") if device.kind == "metal" else _cuda_launcher()


def required_launcher(device: Device) -> Launcher:
    """The same. Raises ValueError where there is none."""
    run = kernel_launcher(device)
    if run is None:
        raise ValueError(f"no kernels for {device.name}")
    return run


def compile_kernels(device: Device, rehearsed: RehearsedWork) -> None:
    """Compile all kernels that `rehearsed` launches, where we compile them."""
    run = kernel_launcher(device)
    if isinstance(run, CudaLauncher | Emulator):
        rehearsal = LaunchRehearsal()
        rehearsed(rehearsal)
        run.prepare(rehearsal.kinds)


def begin_mlx_compilation(device: Device, needs: CompilationNeeds) -> MlxCompilation | None:
    """Have MLX compile kernels in other processes that such a model is going to need, where MLX compiles any."""
    run = kernel_launcher(device)
    if not isinstance(run, CudaLauncher) or run.kernel_folder is None:
        return None
    return MlxCompilation.begin(run.kernel_folder, needs, device.memory)


def compilation_stats(device: Device) -> CompilationStats | None:
    """What was compiled so far; None where we do not compile kernels."""
    run = kernel_launcher(device)
    return run.compilation if isinstance(run, CudaLauncher | MlxLauncher) else None


def _cuda_launcher() -> Launcher:
    try:
        info = mx.device_info()
        target = gpu_architecture(int(info["compute_capability_major"]), int(info["compute_capability_minor"]))
        return CudaLauncher(Nvrtc.find(), target, _cubin_cache(), MlxLauncher("cuda"), _mlx_kernel_folder(target))
    except (NvrtcError, AttributeError, KeyError, ValueError) as error:
        return MlxLauncher("cuda", CompilationStats(by_mlx={"all": str(error)}))


def _cubin_cache() -> CubinCache | None:
    try:
        return CubinCache(DEFAULT_CUBIN_FOLDER)
    except OSError as error:
        log.warning("compiled kernels are not kept: %s", error)
        return None


def _mlx_kernel_folder(architecture: str) -> MlxKernelFolder | None:
    try:
        return MlxKernelFolder.usual(architecture)
    except OSError as error:
        log.warning("compiled kernels cannot be put where MLX finds them: %s", error)
        return None


MOST_THREADS = 16
KernelRun = Callable[[list[mx.array], LaunchConfig], list[mx.array]]
ITEM_SIZE = attrgetter("itemsize")
"""With the template it determines an array's dtype, and is faster to get."""
_KernelRuns = dict[tuple[KernelTemplate, tuple[int, ...]], KernelRun]


@dataclass(slots=True)
class CompilationStats:
    """How kernels were compiled so far."""

    folder: Path | None = None  # of the cubin cache
    compiled: int = 0
    found: int = 0  # in the cache
    seconds: float = 0.0
    by_mlx: dict[str, str] = field(default_factory=dict)
    """Kernels that MLX compiles instead, and why."""

    def __str__(self) -> str:
        cached = f", {self.found} found in {self.folder}" if self.found else ""
        return f"{self.compiled} compiled{cached}, in {self.seconds:.1f} s"

    @property
    def slower(self) -> str | None:
        """What takes longer than it could and why, if anything."""
        if not self.by_mlx:
            return None
        reasons = ", ".join(f"{kernel} ({why})" for kernel, why in sorted(self.by_mlx.items()))
        return f"MLX compiles kernels when they are first used, which takes longer: {reasons}"


class CudaLauncher:
    """A launcher. A kernel that cannot be compiled, or fails on first use, goes through `otherwise`."""

    def __init__(
        self,
        compiler: Nvrtc,
        architecture: str,
        folder: CubinCache | None,
        otherwise: Callable[[Kernel, list[mx.array], LaunchConfig], list[mx.array]],
        shelf: MlxKernelFolder | None = None,
    ) -> None:
        """With a `shelf`, launches pass a kernel's name, and its bytes only where MLX does not find that."""
        self._compiler, self._architecture, self._folder, self._otherwise = compiler, architecture, folder, otherwise
        self.kernel_folder = shelf
        self._runs: dict[Kernel, tuple[Callable[[list[mx.array]], Iterable[mx.array]], _KernelRuns]] = {}
        self._loaded: dict[KernelKind, _LoadedKernel | Exception] = {}
        self.compilation = CompilationStats(None if folder is None else folder.folder)

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        take, runs = self._runs.get(kernel) or self._runs.setdefault(kernel, (leading_inputs(kernel), {}))
        key = (work.template, tuple(map(ITEM_SIZE, take(inputs))))
        run = runs.get(key)
        if run is not None:
            return run(inputs, work)
        runs[key], made = self._first(kernel, inputs, work)
        return made

    def prepare(self, kinds: Iterable[KernelKind]) -> None:
        """Compile kernels, as many at a time as there are processors, or load them from the cache. Raises nothing:
        errors are raised when a kernel is used."""
        missing = [kind for kind in kinds if kind not in self._loaded]
        if not missing:
            return
        began = time.monotonic()
        report_step(f"compiling {len(missing)} kernels")
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1, len(missing))) as threads:
            loaded = list(threads.map(self._load, missing))
        self._loaded.update(zip(missing, loaded, strict=True))
        found = [each.found for each in loaded if isinstance(each, _LoadedKernel)]
        self.compilation.found += found.count(True)
        self.compilation.compiled += found.count(False)
        self.compilation.seconds += time.monotonic() - began
        if self._folder is not None and False in found:
            self._folder.prune()

    def compiled(self, kind: KernelKind) -> tuple[bytes, str]:
        """A cubin and its function, whose arguments are inputs, outputs and sizes (`CudaProgram`). Raises the
        compilation's error."""
        self.prepare([kind])
        loaded = self._loaded[kind]
        if isinstance(loaded, Exception):
            raise loaded
        return loaded.cubin

    def _first(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> tuple[KernelRun, list[mx.array]]:
        """What runs such a kernel from now on, and the first outputs, evaluated to see that it runs. It is launched
        only once, since it may write in place."""
        try:
            kind = kernel_kind(kernel, inputs, work)
            self.prepare([kind])
            loaded = self._loaded[kind]
            if isinstance(loaded, Exception):
                raise loaded
            outputs = self._try_first(loaded, inputs, work)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            reason = " ".join(str(error).split())
            log.warning("%s: MLX compiles this kernel, which takes longer: %s", kernel.name, reason)
            self.compilation.by_mlx[f"{kernel.room}.{kernel.name}"] = reason[:500]
            run = partial(self._otherwise, kernel)
            return run, run(inputs, work)
        return loaded, outputs

    def _try_first(self, loaded: _LoadedKernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        try:
            outputs = loaded(inputs, work)
            mx.eval(outputs)
        except RuntimeError as error:
            if not loaded.carry():
                raise
            log.info("%s is not found by its name: %s", loaded.name, " ".join(str(error).split()))
            outputs = loaded(inputs, work)
            mx.eval(outputs)
        return outputs

    def _load(self, kind: KernelKind) -> _LoadedKernel | Exception:
        try:
            return self._cached_or_compiled(cuda_program(kind))
        except (RuntimeError, ValueError, KeyError) as error:
            return error

    def _cached_or_compiled(self, program: CudaProgram) -> _LoadedKernel:
        compiler = self._compiler
        version = ".".join(map(str, compiler.version))
        key = cubin_key(program.name, program.source, *compiler.options(self._architecture), version)
        cached = None if self._folder is None else self._folder.read(key)
        if cached is not None:
            return self._publish(_LoadedKernel(program, cached, found=True), key)
        report_step(f"compiling kernel {program.name}")
        cubin = compiler.compiled(program.name, program.source, self._architecture)
        if self._folder is not None:
            try:
                self._folder.write(key, cubin)
            except OSError as error:
                log.warning("a compiled kernel cannot be kept: %s", error)
        return self._publish(_LoadedKernel(program, cubin, found=False), key)

    def _publish(self, loaded: _LoadedKernel, key: str) -> _LoadedKernel:
        if self.kernel_folder is not None:
            try:
                loaded.lay(self.kernel_folder, key)
            except OSError as error:
                log.warning("a compiled kernel cannot be put where MLX finds it: %s", error)
        return loaded


class _LoadedKernel:
    """A compiled kernel. MLX copies the passed bytes at each call; these and the name identify what is on the
    device."""

    def __init__(self, program: CudaProgram, cubin: bytes, *, found: bool) -> None:
        self.name, self._shaped, self._strided = program.name, program.shaped, program.strided
        self._function, self._cubin, self._passed, self.found = program.name, cubin, cubin, found
        self._launch: Any = mx.fast.precompiled_cuda_kernel

    @property
    def cubin(self) -> tuple[bytes, str]:
        return self._cubin, self._function

    def lay(self, shelf: MlxKernelFolder, key: str) -> None:
        """Launch it by its name from now on. Raises OSError."""
        name = f"{self._function}_{key}"
        shelf.lay(name, self._function, self._cubin)
        self.name, self._passed = name, b""

    def carry(self) -> bool:
        """Pass its bytes with each launch from now on. Returns whether they were not before."""
        before, self.name, self._passed = self._passed, self._function, self._cubin
        return not before

    def __call__(self, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        if self._strided:
            inputs = inputs.copy()
            for number in self._strided:
                inputs[number] = mx.contiguous(inputs[number])
        along, down, deep = work.groups
        made: list[mx.array] = self._launch(
            name=self.name,
            compiled_source=self._passed,
            inputs=inputs,
            output_shapes=[output.shape for output in work.outputs],
            output_dtypes=[output.dtype for output in work.outputs],
            scalars=[size for number in self._shaped for size in inputs[number].shape],
            grid=(along * work.threads, down, deep),
            threadgroup=(work.threads, 1, 1),
            shared_memory=work.lent,
        )
        return made
