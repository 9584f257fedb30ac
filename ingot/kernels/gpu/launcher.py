"""Kernels on CUDA: compiled by ourselves, several at once, kept in files, and launched by MLX."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import mlx.core as mx

from ingot.kernels.gpu.cubins import CubinFolder, cubin_key
from ingot.kernels.gpu.kernel_source import Kind, Program, kind_of, leading, program
from ingot.kernels.gpu.nvrtc import Nvrtc
from ingot.kernels.gpu.shelf import Shelf
from ingot.kernels.gpu.texts import Kernel, Template, Work

log = logging.getLogger("ingot.kernels")
MOST_THREADS = 16
Run = Callable[[list[mx.array], Work], list[mx.array]]
SIZE = attrgetter("itemsize")
"""Of an array's numbers: beside the template enough to know their dtypes by, and sooner had than those."""
_Runs = dict[tuple[Template, tuple[int, ...]], Run]


@dataclass(slots=True)
class Compilation:
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
        folder: CubinFolder | None,
        otherwise: Callable[[Kernel, list[mx.array], Work], list[mx.array]],
        shelf: Shelf | None = None,
    ) -> None:
        """With a `shelf` launches name what they launch, and carry its bytes only where that does not help."""
        self._compiler, self._architecture, self._folder, self._otherwise = compiler, architecture, folder, otherwise
        self._shelf = shelf
        self._runs: dict[Kernel, tuple[Callable[[list[mx.array]], Iterable[mx.array]], _Runs]] = {}
        self._loaded: dict[Kind, _Loaded | Exception] = {}
        self.compilation = Compilation(None if folder is None else folder.folder)

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: Work) -> list[mx.array]:
        take, runs = self._runs.get(kernel) or self._runs.setdefault(kernel, (leading(kernel), {}))
        key = (work.template, tuple(map(SIZE, take(inputs))))
        run = runs.get(key)
        if run is not None:
            return run(inputs, work)
        runs[key], made = self._first(kernel, inputs, work)
        return made

    def prepare(self, kinds: Iterable[Kind]) -> None:
        """Compile them, as many at once as there are processors, or find them where they were kept. Raises nothing:
        what went wrong is met again where it is used."""
        missing = [kind for kind in kinds if kind not in self._loaded]
        if not missing:
            return
        began = time.monotonic()
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1, len(missing))) as threads:
            loaded = list(threads.map(self._tried, missing))
        self._loaded.update(zip(missing, loaded, strict=True))
        found = [each.found for each in loaded if isinstance(each, _Loaded)]
        self.compilation.found += found.count(True)
        self.compilation.compiled += found.count(False)
        self.compilation.seconds += time.monotonic() - began
        if self._folder is not None and False in found:
            self._folder.prune()

    def compiled(self, kind: Kind) -> tuple[bytes, str]:
        """A cubin and its function, whose arguments are arrays in, arrays out, and sizes, as `Program` says. Raises
        what compiling it did."""
        self.prepare([kind])
        loaded = self._loaded[kind]
        if isinstance(loaded, Exception):
            raise loaded
        return loaded.cubin

    def _first(self, kernel: Kernel, inputs: list[mx.array], work: Work) -> tuple[Run, list[mx.array]]:
        """What runs such a kernel from now on, and what it gave: waited for, to see that it runs. It is launched but
        once, as it may write in place what it read."""
        try:
            kind = kind_of(kernel, inputs, work)
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

    def _awaited(self, loaded: _Loaded, inputs: list[mx.array], work: Work) -> list[mx.array]:
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

    def _tried(self, kind: Kind) -> _Loaded | Exception:
        try:
            return self._kept_or_compiled(program(kind))
        except (RuntimeError, ValueError, KeyError) as error:
            return error

    def _kept_or_compiled(self, made: Program) -> _Loaded:
        compiler = self._compiler
        version = ".".join(map(str, compiler.version))
        key = cubin_key(made.name, made.source, *compiler.options(self._architecture), version)
        kept = None if self._folder is None else self._folder.read(key)
        if kept is not None:
            return self._laid(_Loaded(made, kept, found=True), key)
        cubin = compiler.compiled(made.name, made.source, self._architecture)
        if self._folder is not None:
            try:
                self._folder.write(key, cubin)
            except OSError as error:
                log.warning("a compiled kernel cannot be kept: %s", error)
        return self._laid(_Loaded(made, cubin, found=False), key)

    def _laid(self, loaded: _Loaded, key: str) -> _Loaded:
        if self._shelf is not None:
            try:
                loaded.lay(self._shelf, key)
            except OSError as error:
                log.warning("a compiled kernel cannot be laid where MLX finds it: %s", error)
        return loaded


class _Loaded:
    """A compiled kernel. MLX copies what bytes it is given at each call, and knows by them and its name what it has on
    the device already."""

    def __init__(self, made: Program, cubin: bytes, *, found: bool) -> None:
        self.name, self._shaped, self._strided = made.name, made.shaped, made.strided
        self._function, self._cubin, self._given, self.found = made.name, cubin, cubin, found
        self._launch: Any = mx.fast.precompiled_cuda_kernel

    @property
    def cubin(self) -> tuple[bytes, str]:
        return self._cubin, self._function

    def lay(self, shelf: Shelf, key: str) -> None:
        """Launch it by a name from now on. Raises OSError."""
        name = f"{self._function}_{key}"
        shelf.lay(name, self._function, self._cubin)
        self.name, self._given = name, b""

    def carry(self) -> bool:
        """Give its bytes with each launch from now on; whether that is something new."""
        carried, self.name, self._given = self._given, self._function, self._cubin
        return not carried

    def __call__(self, inputs: list[mx.array], work: Work) -> list[mx.array]:
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
