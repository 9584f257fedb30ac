"""How a kernel gets to a device: through MLX on CUDA and Metal, else through the emulator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import mlx.core as mx

from ingot.kernels.device import Device, acting_as
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.texts import Kernel, Prelude, Work, kernel_text


class Launcher(Protocol):
    """Runs a kernel on arrays and gives its outputs. Kernels may write to their inputs, in place."""

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: Work) -> list[mx.array]: ...


class MlxLauncher:
    """Compiles at the first call of each kind; lazy, like any operation of MLX."""

    def __init__(self, prelude: Prelude) -> None:
        self._prelude: Prelude = prelude
        self._make: Callable[..., Any] = mx.fast.cuda_kernel if prelude == "cuda" else mx.fast.metal_kernel
        self._made: dict[Kernel, Any] = {}

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: Work) -> list[mx.array]:
        run = self._made.get(kernel) or self._compiled(kernel)
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

    def _compiled(self, kernel: Kernel) -> Any:
        text = kernel_text(kernel, self._prelude)
        run = self._make(
            name=text.name,
            input_names=list(text.inputs),
            output_names=list(text.outputs),
            source=text.body,
            header=text.header,
            ensure_row_contiguous=False,  # a copy would be written instead of what it is of
        )
        self._made[kernel] = run
        return run


@cache
def launcher(device: Device) -> Launcher | None:
    """What runs kernels on this device; None where nothing does."""
    if device.kind == "cpu":
        return None
    if acting_as() is not None or mx.default_device().type == mx.cpu:
        return Emulator() if Emulator.available() else None
    return MlxLauncher("metal" if device.kind == "metal" else "cuda")
