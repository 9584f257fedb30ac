"""How a kernel gets to a device: compiled by ourselves on CUDA, by MLX on Metal, else through the emulator."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import mlx.core as mx

from ingot.kernels.device import Device, acting_as
from ingot.kernels.gpu.cubins import USUAL, CubinFolder
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import Rehearsal, Rehearsed
from ingot.kernels.gpu.launcher import Compilation, CudaLauncher
from ingot.kernels.gpu.nvrtc import Nvrtc, NvrtcError, architecture
from ingot.kernels.gpu.shelf import Shelf
from ingot.kernels.gpu.texts import Kernel, Prelude, Work, kernel_text

log = logging.getLogger("ingot.kernels")


class Launcher(Protocol):
    """Runs a kernel on arrays and gives its outputs. Kernels may write to their inputs, in place. A template and how
    wide numbers are settle the dtypes of all arrays, and inputs named alike but for a number have the same."""

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: Work) -> list[mx.array]: ...


class MlxLauncher:
    """Compiles at the first call of each kind; lazy, like any operation of MLX."""

    def __init__(self, prelude: Prelude, compilation: Compilation | None = None) -> None:
        """`compilation` says why kernels are compiled here that might be compiled elsewhere."""
        self.compilation = compilation
        self._prelude: Prelude = prelude
        self._make: Callable[..., Any] = mx.fast.cuda_kernel if prelude == "cuda" else mx.fast.metal_kernel
        self._made: dict[tuple[Kernel, int], Any] = {}

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: Work) -> list[mx.array]:
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
def launcher(device: Device) -> Launcher | None:
    """What runs kernels on this device; None where nothing does."""
    if device.kind == "cpu":
        return None
    if acting_as() is not None or mx.default_device().type == mx.cpu:
        return Emulator() if Emulator.available() else None
    return MlxLauncher("metal") if device.kind == "metal" else _cuda()


def prepare(device: Device, rehearsed: Rehearsed) -> None:
    """Compile at once all that `rehearsed` launches, where compiling is ours to do."""
    run = launcher(device)
    if isinstance(run, CudaLauncher | Emulator):
        rehearsal = Rehearsal()
        rehearsed(rehearsal)
        run.prepare(rehearsal.kinds)


def compilation(device: Device) -> Compilation | None:
    """What was compiled for it so far; None where compiling is not ours to do."""
    run = launcher(device)
    return run.compilation if isinstance(run, CudaLauncher | MlxLauncher) else None


def _cuda() -> Launcher:
    try:
        info = mx.device_info()
        target = architecture(int(info["compute_capability_major"]), int(info["compute_capability_minor"]))
        return CudaLauncher(Nvrtc.find(), target, _kept(), MlxLauncher("cuda"), _shelf())
    except (NvrtcError, AttributeError, KeyError, ValueError) as error:
        return MlxLauncher("cuda", Compilation(by_mlx={"all": str(error)}))


def _kept() -> CubinFolder | None:
    try:
        return CubinFolder(USUAL)
    except OSError as error:
        log.warning("compiled kernels are not kept: %s", error)
        return None


def _shelf() -> Shelf | None:
    try:
        return Shelf.usual()
    except OSError as error:
        log.warning("compiled kernels cannot be laid where MLX finds them: %s", error)
        return None
