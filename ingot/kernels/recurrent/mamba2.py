"""Mamba 2's scan behind a convolution, for rows of any number of tokens each: one kernel source for GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from ingot.kernels.gpu.kernel_source import KernelTemplate
from ingot.kernels.gpu.launcher import Launcher
from ingot.kernels.recurrent.kernels import (
    SIZES,
    Convolution,
    GateColumns,
    GatedNorm,
    RecurrentKernels,
    RecurrentShape,
    RecurrentSpans,
)

_EACH = 4
"""Columns of a state whose numbers the same lanes hold."""
_MOST_WARPS = 8


@dataclass(frozen=True, slots=True)
class Mamba2Shape(RecurrentShape):
    """What a layer looks like. Its states are [slots, taps - 1, channels] and [slots, heads, head size, state size]."""

    heads: int
    groups: int  # of heads that are written by, and read by, the same numbers
    head_size: int
    state_size: int
    taps: int
    norm_size: int = 0  # numbers that are normed together; 0: there is no norm
    norm_first: bool = False  # the norm comes before the gate
    biased: bool = False  # the convolution

    @property
    def inner(self) -> int:
        return self.heads * self.head_size

    @property
    def convolution(self) -> Convolution:
        return Convolution(self.inner + 2 * self.groups * self.state_size, self.taps, biased=self.biased)

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        return self.convolution.tail, (self.heads, self.head_size, self.state_size)

    @property
    def width(self) -> int:
        return self.inner + self.convolution.channels + self.heads

    @property
    def norm(self) -> GatedNorm:
        return GatedNorm(self.norm_size, self.norm_first, GateColumns(0, self.inner, self.inner))

    def unsupported(self) -> str | None:
        if self.state_size not in SIZES:
            return f"states of {self.state_size}: they may be {', '.join(map(str, SIZES))}"
        if self.heads % self.groups:
            return f"{self.heads} heads in {self.groups} groups"
        if self.inner % 8:
            return f"{self.inner} numbers of all heads, which must be a multiple of 8"
        return super(Mamba2Shape, self).unsupported()


class Mamba2Kernels(RecurrentKernels):
    rule = "scan"
    shape: Mamba2Shape

    def __init__(
        self,
        run: Launcher,
        shape: Mamba2Shape,
        dtype: mx.Dtype,
        weights: Mapping[str, mx.array],
        *,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        eps: float = 1e-5,
        in_place: bool = True,
    ) -> None:
        """See `RecurrentKernels`; `weights` also has `a_log`, `dt_bias` and the `skip` of each head, and the weight of
        the `norm`, where there is one. `dt_limit` bounds the size of a step."""
        columns = shape.inner + mx.arange(shape.convolution.channels)
        super().__init__(run, shape, dtype, weights, columns, in_place=in_place)
        decay = -mx.exp(weights["a_log"].astype(mx.float32)) * math.log2(math.e)
        heads = [weights[name].astype(mx.float32) for name in ("dt_bias", "skip")]
        self._numbers = mx.concatenate([decay, *heads, mx.array(dt_limit, mx.float32)])
        self._weight = (weights["norm"] if shape.norm_size else mx.zeros(8)).astype(dtype)
        self._eps = mx.full(8, eps)
        mx.eval(self._numbers, self._weight, self._eps)

    def advance(
        self, convolved: mx.array, joint: mx.array, spans: RecurrentSpans, states: mx.array, *apart: mx.array
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        shape = self.shape
        lanes = 16 if shape.state_size % 64 == 0 else 8 if shape.state_size % 32 == 0 else 4
        of_warp = 32 // lanes * _EACH
        # Two groups of threads for a head, so that the heads of one row are enough for the processors of a GPU.
        warps = max(1, min(_MOST_WARPS, -(-shape.head_size // (2 * of_warp))))
        groups = (-(-shape.head_size // (warps * of_warp)), shape.heads, spans.rows)
        template: KernelTemplate = (
            *(("T", self._dtype), ("HEADS", shape.heads), ("SIZE", shape.head_size), ("KEYS", shape.groups)),
            *(("STATE", shape.state_size), ("WARPS", warps), ("ROW", joint.shape[1])),
            ("STEP_AT", shape.width - shape.heads),
        )
        inputs = [convolved, joint, self._numbers, spans.spans]
        return self._advance(inputs, states, template, groups, warps * 32, spans)
