"""Gated convolutions over a few tokens, as Liquid's: one kernel source for GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ingot.kernels.gpu.launcher import Launcher
from ingot.kernels.recurrent.kernels import Convolution, RecurrentKernels, RecurrentSpans


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """What a layer looks like. Its states are tails alone."""

    channels: int
    taps: int
    biased: bool = False

    @property
    def convolution(self) -> Convolution:
        return Convolution(self.channels, self.taps, silu=False, gated=True, biased=self.biased)

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        return (self.convolution.tail,)

    @property
    def width(self) -> int:
        return 3 * self.channels

    @property
    def apart(self) -> tuple[int, ...]:
        return ()

    def unsupported(self) -> str | None:
        return self.convolution.unsupported()


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
        self.shape = shape

    def mix(
        self, joint: mx.array, spans: RecurrentSpans, states: Sequence[mx.array], *apart: mx.array
    ) -> tuple[mx.array, list[mx.array]]:
        return self.convolve(joint, spans, states[0])
