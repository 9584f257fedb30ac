"""Gated convolutions over a few tokens, as Liquid's: one kernel source for GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from ingot.kernels.gpu.launcher import Launcher
from ingot.kernels.recurrent.kernels import Convolution, GateColumns, GatedNorm, RecurrentKernels, RecurrentShape


@dataclass(frozen=True, slots=True)
class ShortConvShape(RecurrentShape):
    """What a layer looks like. Its states are tails alone."""

    channels: int
    taps: int
    biased: bool = False

    @property
    def inner(self) -> int:
        return self.channels

    @property
    def norm(self) -> GatedNorm:
        return GatedNorm(0, False, GateColumns(0, self.channels, self.channels))

    @property
    def convolution(self) -> Convolution:
        return Convolution(self.channels, self.taps, silu=False, gated=True, biased=self.biased)

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        return (self.convolution.tail,)

    @property
    def width(self) -> int:
        return 3 * self.channels


class ShortConvKernels(RecurrentKernels):
    def __init__(
        self,
        run: Launcher,
        shape: ShortConvShape,
        dtype: mx.Dtype,
        weights: Mapping[str, mx.array],
        *,
        in_place: bool = True,
    ) -> None:
        """See `RecurrentKernels`."""
        columns = 2 * shape.channels + mx.arange(shape.channels)
        super().__init__(run, shape, dtype, weights, columns, in_place=in_place)
