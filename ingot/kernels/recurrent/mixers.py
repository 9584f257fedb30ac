"""Recurrent mixers for rows of any number of tokens each: the gated delta rule and Mamba 2's scan, each behind a
convolution, and gated convolutions alone, as Liquid's. One kernel source for GPUs."""

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

_ADVANCE = 256
"""Threads of a group."""


@dataclass(frozen=True, slots=True)
class DeltaShape(RecurrentShape):
    """What a layer looks like. Its states are [slots, taps - 1, channels] and [slots, value heads, value, key size]."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    interleaved: bool = False
    """Queries, keys, values and gates of a key head lie together, and behind all of them strengths and decays of each
    key head; else all queries, keys, values, gates, strengths and decays do."""
    decays_by_key: bool = False
    """Each number of a key has a decay of its own, not each value head one."""
    bounded: bool = False
    """Decays have a lower bound."""
    sigmoid_gate: bool = False
    gates_apart: bool = False
    """Gates are not in the joint projection: a further one gives them. Decays likewise."""
    decays_apart: bool = False

    @property
    def in_group(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def inner(self) -> int:
        return self.value_heads * self.value_size

    @property
    def convolution(self) -> Convolution:
        """Of queries, keys and values, head by head."""
        return Convolution(2 * self.key_heads * self.key_size + self.inner, self.taps)

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        return self.convolution.tail, (self.value_heads, self.value_size, self.key_size)

    @property
    def width(self) -> int:
        return self.factors + self.value_heads + (0 if self.decays_apart else self.decays)

    @property
    def decays(self) -> int:
        """Of all value heads."""
        return self.value_heads * (self.key_size if self.decays_by_key else 1)

    @property
    def apart(self) -> tuple[int, ...]:
        """Columns of gates and of decays that are not in the joint projection."""
        return (*(self.inner,) * self.gates_apart, *(self.decays,) * self.decays_apart)

    @property
    def factors(self) -> int:
        """Where strengths and decays begin in the joint projection, behind the channels and their gates."""
        return self.convolution.channels + (0 if self.gates_apart else self.inner)

    @property
    def factor_columns(self) -> tuple[int, int, int]:
        """Where decays and strengths begin, and columns of strengths from one key head's to the next."""
        if self.interleaved:
            return self.factors + self.in_group, self.factors, 2 * self.in_group
        return 0 if self.decays_apart else self.factors + self.value_heads, self.factors, self.in_group

    @property
    def columns(self) -> mx.array:
        """From which column of the joint projection each channel enters."""
        if not self.interleaved:
            return mx.arange(self.convolution.channels)
        values = self.in_group * self.value_size
        heads = mx.arange(self.key_heads)[:, None] * (2 * self.key_size + 2 * values)
        queries = heads + mx.arange(self.key_size)
        parts = (queries, queries + self.key_size, heads + 2 * self.key_size + mx.arange(values))
        return mx.concatenate([part.reshape(-1) for part in parts])

    @property
    def norm(self) -> GatedNorm:
        if not self.interleaved:
            begin = 0 if self.gates_apart else self.convolution.channels
            return GatedNorm(self.value_size, True, GateColumns(begin, self.inner, self.inner), self.sigmoid_gate)
        span = self.in_group * self.value_size
        return GatedNorm(self.value_size, True, GateColumns(2 * self.key_size + span, span, 2 * (self.key_size + span)))

    def gates(self, joint: mx.array, *apart: mx.array) -> mx.array:
        return apart[0] if self.gates_apart else joint

    def unsupported(self) -> str | None:
        if self.key_size not in SIZES:
            return f"keys of {self.key_size}: they may be {', '.join(map(str, SIZES))}"
        if self.value_heads % self.key_heads:
            return f"{self.value_heads} value heads over {self.key_heads} key heads"
        if self.interleaved and (self.decays_by_key or self.apart):
            return "heads that lie together with decays or gates that do not"
        return super(DeltaShape, self).unsupported()


class DeltaKernels(RecurrentKernels):
    rule = "advance"
    shape: DeltaShape

    def __init__(
        self,
        run: Launcher,
        shape: DeltaShape,
        dtype: mx.Dtype,
        weights: Mapping[str, mx.array],
        *,
        eps: float = 1e-6,
        bound: float = 0.0,
        most_strength: float = 1.0,
        in_place: bool = True,
    ) -> None:
        """See `RecurrentKernels`; `weights` also has `a_log` of each value head and `dt_bias` of each decay, and the
        weight of the `norm`, to whose squares `eps` is added. Decays are exp(-exp(a_log) * softplus(x + dt_bias)), or
        with a bound exp(bound * sigmoid(exp(a_log) * (x + dt_bias)))."""
        super().__init__(run, shape, dtype, weights, shape.columns, in_place=in_place)
        rates = mx.exp(weights["a_log"].astype(mx.float32)) * (1.0 if shape.bounded else -math.log2(math.e))
        options = mx.array([_UNIT_EPS, most_strength, bound * math.log2(math.e)])
        self._numbers = mx.concatenate([rates, weights["dt_bias"].astype(mx.float32), options])
        self._weight, self._eps = weights["norm"].astype(dtype), mx.full(8, eps)
        mx.eval(self._numbers, self._weight, self._eps)

    def advance(
        self, convolved: mx.array, joint: mx.array, spans: RecurrentSpans, states: mx.array, *apart: mx.array
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        shape = self.shape
        lanes = 8 if shape.key_size % 32 == 0 else 4
        groups = (-(-shape.value_size // (_ADVANCE // lanes)), shape.value_heads, spans.rows)
        decays, strengths, step = shape.factor_columns
        slowness = apart[-1] if shape.decays_apart else joint
        template: KernelTemplate = (
            *(("T", self._dtype), ("KEY_SIZE", shape.key_size), ("VALUE_SIZE", shape.value_size)),
            *(("KEY_HEADS", shape.key_heads), ("VALUE_HEADS", shape.value_heads), ("THREADS", _ADVANCE)),
            *(("ROW", joint.shape[1]), ("STRENGTH_AT", strengths), ("FACTOR_STEP", step)),
            *(("SLOWNESS_ROW", slowness.shape[1]), ("SLOWNESS_AT", decays)),
            *(("BY_KEY", shape.decays_by_key), ("BOUNDED", shape.bounded)),
        )
        inputs = [convolved, joint, slowness, self._numbers, spans.spans]
        return self._advance(inputs, states, template, groups, _ADVANCE, spans)


_UNIT_EPS = 1e-6
"""Added to the squares of queries and of keys."""


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
