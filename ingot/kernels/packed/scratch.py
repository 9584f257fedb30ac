"""Products of many rows with packed weights: one layer's weights at a time are unpacked, and MLX multiplies by those.

MLX would unpack them, too, but into other memory for each layer, all of which is held until the device has come by: as
much as the whole model unpacked. Here all layers have the same memory, in turn.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.gpu.launchers import Launcher, launcher
from ingot.kernels.gpu.texts import Kernel, Output, Work, read
from ingot.kernels.packed_matmul.kernels import SOURCE, PackedWeights

INPUTS = ("weight", "scales", "biases", "scratch", "given", "after")
THREADS = 256


@cache
def unpacking_kernel() -> Kernel:
    header, body = read(SOURCE / "lots.h"), read(SOURCE / "unpack.h")
    return Kernel("packed", "unpack", INPUTS, ("handed",), header, body, True)


class Scratch:
    """Room for the largest layer's weights, in a format. Whoever takes it waits for whoever had it before."""

    def __init__(self, run: Launcher, room: mx.array) -> None:
        """`room` [weights] is written in place."""
        self._run, self._room, self._after = run, room, mx.zeros(1, room.dtype)
        mx.eval(self._room, self._after)

    def launched_by(self, run: Launcher) -> Scratch:
        """The same memory, with another launcher."""
        return Scratch(run, self._room)

    @property
    def nbytes(self) -> int:
        return self._room.nbytes

    def covers(self, weights: PackedWeights) -> bool:
        return weights.scales.dtype == self._room.dtype and weights.size <= self._room.size

    def multiply(self, x: mx.array, weights: PackedWeights) -> mx.array:
        """x [rows, columns] times weights that are covered: [rows, outputs]."""
        y = self.unpacked(x, weights) @ self._room[: weights.size].reshape(weights.outputs, weights.columns).T
        # A number of its own, not a view: that would hold all of the product until the next one.
        self._after = y.reshape(-1)[:1] + 0
        return y

    def unpacked(self, x: mx.array, weights: PackedWeights) -> mx.array:
        """`x`, which is there once the weights are."""
        groups = -(-(weights.size + x.size) // (8 * THREADS))
        template = (("T", x.dtype), ("BITS", weights.packing.bits), ("GROUP", weights.packing.group))
        work = Work((*template, ("THREADS", THREADS)), (groups, 1, 1), THREADS, (Output(x.shape, x.dtype),))
        [handed] = self._run(unpacking_kernel(), [*weights.inputs, self._room, mx.contiguous(x), self._after], work)
        return handed


def scratch(device: Device, weights: int, dtype: mx.Dtype) -> Scratch | None:
    """None where no kernels run."""
    run = launcher(device)
    return None if run is None else Scratch(run, mx.zeros(weights, dtype))
