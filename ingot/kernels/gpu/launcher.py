"""How a kernel gets to a device: compiled by ourselves on CUDA, by MLX on Metal, else run by the emulator.

On CUDA kernels are compiled several at once, cached in files, and launched by MLX. What cannot be compiled, or does not
run when it is first met, is compiled by MLX instead.
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
from ingot.kernels.gpu.nvrtc import (
    DEFAULT_CUBIN_FOLDER,
    CubinCache,
    MlxKernelFolder,
    Nvrtc,
    NvrtcError,
    cubin_key,
    gpu_architecture,
)

log = logging.getLogger("ingot.kernels")


class Launcher(Protocol):
    """Runs a kernel on arrays and gives its outputs. Kernels may write to their inputs, in place. A template and how
    wide numbers are settle the dtypes of all arrays, and inputs named alike but for a number have the same."""

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]: ...


class Launched:
    """What launches kernels, which may be the same kernels by another launcher."""

    _run: Launcher

    def by(self, run: Launcher) -> Self:
        other = copy(self)
        other._run = run
        return other


class MlxLauncher:
    """Compiles at the first call of each kind; lazy, like any operation of MLX."""

    def __init__(self, prelude: Prelude, compilation: CompilationStats | None = None) -> None:
        """`compilation_stats` says why kernels are compiled here that might be compiled elsewhere."""
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
            ensure_row_contiguous=False,  # a copy would be written instead of what it is of
            **({"shared_memory": lent} if lent else {}),  # which Metal has none of
        )
        self._made[kernel, lent] = run
        return run


@cache
def kernel_launcher(device: Device) -> Launcher | None:
    """What runs kernels on this device; None where nothing does."""
    if device.kind == "cpu":
        return None
    if acting_as() is not None or mx.default_device().type == mx.cpu:
        return Emulator() if Emulator.available() else None
    return MlxLauncher("metal") if device.kind == "metal" else _cuda_launcher()


def required_launcher(device: Device) -> Launcher:
    """The same. Raises ValueError where nothing does."""
    run = kernel_launcher(device)
    if run is None:
        raise ValueError(f"no kernels for {device.name}")
    return run


def compile_kernels(device: Device, rehearsed: RehearsedWork) -> None:
    """Compile at once all that `rehearsed` launches, where compiling is ours to do."""
    run = kernel_launcher(device)
    if isinstance(run, CudaLauncher | Emulator):
        rehearsal = LaunchRehearsal()
        rehearsed(rehearsal)
        run.prepare(rehearsal.kinds)


def compilation_stats(device: Device) -> CompilationStats | None:
    """What was compiled for it so far; None where compiling is not ours to do."""
    run = kernel_launcher(device)
    return run.compilation if isinstance(run, CudaLauncher | MlxLauncher) else None


def _cuda_launcher() -> Launcher:
    try:
        info = mx.device_info()
        target = gpu_architecture(int(info["compute_capability_major"]), int(info["compute_capability_minor"]))
        return CudaLauncher(Nvrtc.find(), target, _cubin_cache(), MlxLauncher("cuda"), _mlx_kernel_folder())
    except (NvrtcError, AttributeError, KeyError, ValueError) as error:
        return MlxLauncher("cuda", CompilationStats(by_mlx={"all": str(error)}))


def _cubin_cache() -> CubinCache | None:
    try:
        return CubinCache(DEFAULT_CUBIN_FOLDER)
    except OSError as error:
        log.warning("compiled kernels are not kept: %s", error)
        return None


def _mlx_kernel_folder() -> MlxKernelFolder | None:
    try:
        return MlxKernelFolder.usual()
    except OSError as error:
        log.warning("compiled kernels cannot be laid where MLX finds them: %s", error)
        return None


MOST_THREADS = 16
KernelRun = Callable[[list[mx.array], LaunchConfig], list[mx.array]]
ITEM_SIZE = attrgetter("itemsize")
"""Of an array's numbers: beside the template enough to know their dtypes by, and sooner had than those."""
_KernelRuns = dict[tuple[KernelTemplate, tuple[int, ...]], KernelRun]


@dataclass(slots=True)
class CompilationStats:
    """What became of all kinds that were met."""

    folder: Path | None = None  # where they are kept
    compiled: int = 0
    found: int = 0  # in there
    seconds: float = 0.0
    by_mlx: dict[str, str] = field(default_factory=dict)
    """Kernels that MLX compiles instead, and why."""

    def __str__(self) -> str:
        whence = f", {self.found} found in {self.folder}" if self.found else ""
        return f"{self.compiled} compiled{whence}, in {self.seconds:.1f} s"

    @property
    def slower(self) -> str | None:
        """What takes longer than it could, and why."""
        if not self.by_mlx:
            return None
        reasons = ", ".join(f"{kernel} ({why})" for kernel, why in sorted(self.by_mlx.items()))
        return f"MLX compiles kernels when they are first used, which takes longer: {reasons}"


class CudaLauncher:
    """A launcher. What cannot be compiled, or does not run when it is first met, goes through `otherwise`."""

    def __init__(
        self,
        compiler: Nvrtc,
        architecture: str,
        folder: CubinCache | None,
        otherwise: Callable[[Kernel, list[mx.array], LaunchConfig], list[mx.array]],
        shelf: MlxKernelFolder | None = None,
    ) -> None:
        """With a `shelf` launches name what they launch, and carry its bytes only where that does not help."""
        self._compiler, self._architecture, self._folder, self._otherwise = compiler, architecture, folder, otherwise
        self._kernel_folder = shelf
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
        """Compile them, as many at once as there are processors, or find them where they were kept. Raises nothing:
        what went wrong is met again where it is used."""
        missing = [kind for kind in kinds if kind not in self._loaded]
        if not missing:
            return
        began = time.monotonic()
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1, len(missing))) as threads:
            loaded = list(threads.map(self._tried, missing))
        self._loaded.update(zip(missing, loaded, strict=True))
        found = [each.found for each in loaded if isinstance(each, _LoadedKernel)]
        self.compilation.found += found.count(True)
        self.compilation.compiled += found.count(False)
        self.compilation.seconds += time.monotonic() - began
        if self._folder is not None and False in found:
            self._folder.prune()

    def compiled(self, kind: KernelKind) -> tuple[bytes, str]:
        """A cubin and its function, whose arguments are arrays in, arrays out, and sizes, as `CudaProgram` says. Raises
        what compiling it did."""
        self.prepare([kind])
        loaded = self._loaded[kind]
        if isinstance(loaded, Exception):
            raise loaded
        return loaded.cubin

    def _first(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> tuple[KernelRun, list[mx.array]]:
        """What runs such a kernel from now on, and what it gave: waited for, to see that it runs. It is launched but
        once, as it may write in place what it read."""
        try:
            kind = kernel_kind(kernel, inputs, work)
            self.prepare([kind])
            loaded = self._loaded[kind]
            if isinstance(loaded, Exception):
                raise loaded
            made = self._awaited(loaded, inputs, work)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            why = " ".join(str(error).split())
            log.warning("%s: MLX compiles this kernel, which takes longer: %s", kernel.name, why)
            self.compilation.by_mlx[f"{kernel.room}.{kernel.name}"] = why[:500]
            run = partial(self._otherwise, kernel)
            return run, run(inputs, work)
        return loaded, made

    def _awaited(self, loaded: _LoadedKernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        try:
            made = loaded(inputs, work)
            mx.eval(made)
        except RuntimeError as error:
            if not loaded.carry():
                raise
            log.info("%s is not found by its name: %s", loaded.name, " ".join(str(error).split()))
            made = loaded(inputs, work)
            mx.eval(made)
        return made

    def _tried(self, kind: KernelKind) -> _LoadedKernel | Exception:
        try:
            return self._kept_or_compiled(cuda_program(kind))
        except (RuntimeError, ValueError, KeyError) as error:
            return error

    def _kept_or_compiled(self, made: CudaProgram) -> _LoadedKernel:
        compiler = self._compiler
        version = ".".join(map(str, compiler.version))
        key = cubin_key(made.name, made.source, *compiler.options(self._architecture), version)
        kept = None if self._folder is None else self._folder.read(key)
        if kept is not None:
            return self._laid(_LoadedKernel(made, kept, found=True), key)
        cubin = compiler.compiled(made.name, made.source, self._architecture)
        if self._folder is not None:
            try:
                self._folder.write(key, cubin)
            except OSError as error:
                log.warning("a compiled kernel cannot be kept: %s", error)
        return self._laid(_LoadedKernel(made, cubin, found=False), key)

    def _laid(self, loaded: _LoadedKernel, key: str) -> _LoadedKernel:
        if self._kernel_folder is not None:
            try:
                loaded.lay(self._kernel_folder, key)
            except OSError as error:
                log.warning("a compiled kernel cannot be laid where MLX finds it: %s", error)
        return loaded


class _LoadedKernel:
    """A compiled kernel. MLX copies what bytes it is given at each call, and knows by them and its name what it has on
    the device already."""

    def __init__(self, made: CudaProgram, cubin: bytes, *, found: bool) -> None:
        self.name, self._shaped, self._strided = made.name, made.shaped, made.strided
        self._function, self._cubin, self._given, self.found = made.name, cubin, cubin, found
        self._launch: Any = mx.fast.precompiled_cuda_kernel

    @property
    def cubin(self) -> tuple[bytes, str]:
        return self._cubin, self._function

    def lay(self, shelf: MlxKernelFolder, key: str) -> None:
        """Launch it by a name from now on. Raises OSError."""
        name = f"{self._function}_{key}"
        shelf.lay(name, self._function, self._cubin)
        self.name, self._given = name, b""

    def carry(self) -> bool:
        """Give its bytes with each launch from now on; whether that is something new."""
        carried, self.name, self._given = self._given, self._function, self._cubin
        return not carried

    def __call__(self, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        if self._strided:
            inputs = inputs.copy()
            for number in self._strided:
                inputs[number] = mx.contiguous(inputs[number])
        along, down, deep = work.groups
        made: list[mx.array] = self._launch(
            name=self.name,
            compiled_source=self._given,
            inputs=inputs,
            output_shapes=[output.shape for output in work.outputs],
            output_dtypes=[output.dtype for output in work.outputs],
            scalars=[size for number in self._shaped for size in inputs[number].shape],
            grid=(along * work.threads, down, deep),
            threadgroup=(work.threads, 1, 1),
            shared_memory=work.lent,
        )
        return made
