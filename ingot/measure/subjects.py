"""What is measured: something of ours, and MLX's own operations that compute the same. One after the other, several
times: the ratio of one turn is of the same state of the machine. Inputs have real shapes. The benchmarks use them,
too."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gpu.launcher import kernel_launcher
from ingot.kernels.packed_matmul.experts import ExpertWeights
from ingot.kernels.packed_matmul.kernels import MXFP8, PackedFormat
from ingot.kernels.paged_attention.inputs import KernelRows, KVSlabs, page_number
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape, AttentionTuning
from ingot.kernels.recurrent.kernels import RecurrentSpans
from ingot.kernels.recurrent.mixers import DeltaShape, Mamba2Shape, ShortConvShape
from ingot.kernels.recurrent.selfcheck import MixerShape, entering, random_weights, recurrent_kernels
from ingot.measure.figures import LEAST_TURNS, Figure
from ingot.upstream import QuantizedSwitchLinear, SwiGLU, SwigluOAI, SwitchGLU, import_upstream

Work = Callable[[], mx.array | Sequence[mx.array]]
Clock = Callable[[], float]
ROUNDS = 7
TURN_S = 0.02
"""What one side of a turn takes at least, of work that takes less."""
MOST_REPEATS = 64


class Times(NamedTuple):
    ours: float  # seconds of one
    mlx: float
    ratio: float
    turns: int


def times_in_turns(ours: Work, mlx: Work, *, seconds: float, clock: Clock = time.perf_counter) -> Times:
    """Medians, in about so many seconds. What Python takes to ask for the work is not within the clock: where that
    matters, steps are graphs."""
    began = clock()
    first = [work_seconds(work, 1, clock) for work in (ours, mlx, ours, mlx)][2:]
    repeats = max(1, min(MOST_REPEATS, int(TURN_S / max(*first, 1e-6))))
    turns: list[tuple[float, float]] = []
    while len(turns) < ROUNDS and (len(turns) < LEAST_TURNS or clock() - began < seconds):
        if len(turns) % 2:
            theirs = work_seconds(mlx, repeats, clock)
            turns.append((work_seconds(ours, repeats, clock), theirs))
        else:
            mine = work_seconds(ours, repeats, clock)
            turns.append((mine, work_seconds(mlx, repeats, clock)))
    return times_of(turns)


def times_of(turns: Sequence[tuple[float, float]]) -> Times:
    """The medians of turns (ours, MLX's), and of their ratios."""
    mine, theirs = zip(*turns, strict=True)
    return Times(median(mine), median(theirs), median(ours / max(mlx, 1e-9) for ours, mlx in turns), len(turns))


def work_seconds(work: Work, repeats: int, clock: Clock = time.perf_counter) -> float:
    """What the device takes; what Python takes to ask for it, it does while the device works on an earlier step."""
    asked = [work() for _ in range(repeats)]
    mx.synchronize()
    began = clock()
    mx.eval(asked)
    mx.synchronize()
    return (clock() - began) / repeats


def largest_difference(ours: mx.array, mlx: mx.array) -> float:
    """As a share of the largest number of MLX's."""
    mine, theirs = (each.astype(mx.float32).reshape(-1) for each in (ours, mlx))
    return float(mx.abs(mine - theirs).max() / mx.maximum(mx.abs(theirs).max(), 1e-30))


@dataclass(frozen=True)
class Pair:
    """The same thing computed twice."""

    ours: Work
    mlx: Work
    bound: float | None = None  # where there is no other check: the largest difference allowed
    drawn: bool = False  # both draw tokens, with other random numbers


class WrongKernel(Exception):
    """What the check of ours found: it is not measured."""


@dataclass(frozen=True)
class Subject:
    """`make` returns why there is nothing to measure, if there is not. It makes all inputs, so that only those of one
    subject are in memory. Raises WrongKernel."""

    name: str
    part: str | None
    make: Callable[[], Pair | str]


def figure_of(subject: Subject, *, seconds: float, clock: Clock = time.perf_counter) -> Figure:
    """One that fails is a figure that says so: nothing keeps the next ones from being measured."""
    try:
        return _measured(subject, seconds, clock)
    except WrongKernel as error:
        return Figure(subject.name, "kernels", subject.part, False, str(error))
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError, KeyError, IndexError) as error:
        reason = f"fails: {' '.join(str(error).split())[:300] or type(error).__name__}"
        return Figure(subject.name, "kernels", subject.part, note=reason)
    finally:
        mx.clear_cache()


def _measured(subject: Subject, seconds: float, clock: Clock) -> Figure:
    pair = subject.make()
    if isinstance(pair, str):
        return Figure(subject.name, "kernels", subject.part, note=pair)
    off = None if pair.drawn else round(largest_difference(_first(pair.ours), _first(pair.mlx)), 6)
    wrong = None
    if off is not None and pair.bound is not None and not off <= pair.bound:
        wrong = f"differs from MLX's own by {off:.2g} of the largest number"
    times = times_in_turns(pair.ours, pair.mlx, seconds=seconds, clock=clock)
    return Figure(
        *(subject.name, "kernels", subject.part, wrong is None, wrong, off),
        *(round(times.ours * 1e6, 2), round(times.mlx * 1e6, 2), "us", round(times.ratio, 3), times.turns),
    )


def _first(work: Work) -> mx.array:
    made = work()
    return made if isinstance(made, mx.array) else made[0]


PAGE, SLABS = 64, 4


class PagedTrial:
    """Rows whose pages lie anywhere in four slabs."""

    width = 1

    def __init__(
        self, device: Device, shape: AttentionShape, lengths: list[int], tuning: AttentionTuning | None = None
    ) -> None:
        """Cut as usual on that device, if not told how."""
        self.device, self.shape, self.lengths = device, shape, lengths
        counts = [-(-length // PAGE) for length in lengths]
        each = -(-sum(counts) // SLABS)
        free = [
            page_number(at // each, at % each) for at in np.random.default_rng(0).permutation(each * SLABS).tolist()
        ]
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        sizes = [(each, shape.kv_heads, PAGE, size) for size in (shape.key_size, shape.value_size)]
        self.slabs = KVSlabs(*([mx.random.normal(size).astype(mx.bfloat16) for _ in range(SLABS)] for size in sizes))
        self.after = mx.zeros(1, mx.int32)
        self.scale = shape.query_size**-0.5
        self.cut(tuning or TUNINGS[device.kind])
        self.ask(1)
        mx.eval(self.slabs.keys, self.slabs.values, self.after)

    def cut(self, tuning: AttentionTuning) -> None:
        """From now on, attend that way."""
        run = kernel_launcher(self.device)
        assert run is not None, "who measures has looked"
        self.attention = PagedAttention(run, tuning, self.shape, mx.bfloat16, scale=self.scale)

    def ask(self, width: int) -> None:
        """From now on, attend for so many queries a row."""
        self.width, rows = width, len(self.lengths)
        size = (rows * width, self.shape.heads, self.shape.query_size)
        self.queries = mx.random.normal(size).astype(mx.bfloat16)
        self.rows = KernelRows.of(self.tables, self.lengths, counts=[width] * rows)
        mx.eval(self.queries)

    def paged(self) -> mx.array:
        return self.attention.attend(self.queries, self.rows, self.slabs, self.after)

    def gathered(self) -> mx.array:
        """As long as the longest row, with a mask: what MLX offers for rows of different lengths."""
        longest = max(len(table) for table in self.tables)
        each = self.slabs.keys[0].shape[0]
        at = [[page // (1 << 20) * each + page % (1 << 20) for page in table] for table in self.tables]
        table = mx.array([[*row, *[0] * (longest - len(row))] for row in at])
        shape, rows = self.shape, len(at)
        keys, values = (
            mx.concatenate([*slabs])[table].transpose(0, 2, 1, 3, 4).reshape(rows, shape.kv_heads, longest * PAGE, -1)
            for slabs in (self.slabs.keys, self.slabs.values)
        )
        keys, values = self.seen(keys, values)
        ragged = len({*self.lengths}) > 1 or self.lengths[0] % PAGE != 0
        ends = mx.array(self.lengths)[:, None] + mx.arange(1 - self.width, 1)
        mask = (mx.arange(longest * PAGE) < ends[..., None])[:, None] if ragged or self.width > 1 else None
        queries = self.queries.reshape(rows, self.width, *self.queries.shape[1:]).swapaxes(1, 2)
        attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        return attended.swapaxes(1, 2).reshape(*self.queries.shape[:2], -1)

    def seen(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """What is stored, as keys and values that queries see."""
        return (mx.concatenate([keys, values], axis=-1), keys) if self.shape.latent else (keys, values)

    def bytes(self) -> int:
        return sum(self.lengths) * self.shape.kv_heads * (self.shape.key_size + self.shape.value_size) * 2


def drawn_parts(
    packing: PackedFormat, lines: tuple[int, ...], columns: int
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Words, scales and biases of random weights. No float of eight bits is no number."""
    codes = 127 if packing == MXFP8 else 256
    weight = mx.random.randint(0, codes, (*lines, columns * packing.bits // 8), mx.uint8).view(mx.uint32)
    shape = (*lines, columns // packing.group)
    if packing.affine:
        scales, biases = (mx.random.normal(shape).astype(mx.bfloat16) * 0.01 for _ in range(2))
    else:
        scales, biases = mx.full(shape, 120 if packing.group > 16 else 16, mx.uint8), None
    mx.eval(weight, scales, biases)
    return weight, scales, biases


class Mixture(NamedTuple):
    """The experts of one layer of a model."""

    packing: PackedFormat
    experts: int
    chosen: int
    hidden: int
    inner: int
    clipped: bool = False  # as GPT-OSS has it, with biases


class MixtureTrial:
    """A layer's experts and tokens that chose them at random."""

    def __init__(self, mixture: Mixture, tokens: int) -> None:
        self.mixture = mixture
        self.gate, self.up = (self._drawn(mixture.inner, mixture.hidden) for _ in range(2))
        self.down = self._drawn(mixture.hidden, mixture.inner)
        self.x = mx.random.normal((tokens, mixture.hidden)).astype(mx.bfloat16)
        order = mx.argsort(mx.random.uniform(shape=(tokens, mixture.experts)), axis=-1)
        self.chosen = mx.contiguous(order[:, : mixture.chosen].astype(mx.int32))
        mx.eval(self.x, self.chosen)

    def _drawn(self, outputs: int, columns: int) -> ExpertWeights:
        mixture, lines = self.mixture, (self.mixture.experts, outputs)
        bias = mx.random.normal(lines).astype(mx.bfloat16) if mixture.clipped else None
        mx.eval(bias)
        return ExpertWeights(mixture.packing, *drawn_parts(mixture.packing, lines, columns), bias)

    def theirs(self) -> SwitchGLU:
        """mlx-lm's own."""
        module = SwitchGLU(64, 64, 1, SwigluOAI() if self.mixture.clipped else SwiGLU(), self.mixture.clipped)
        for name, weights in (("gate_proj", self.gate), ("up_proj", self.up), ("down_proj", self.down)):
            packing = weights.packing
            linear = QuantizedSwitchLinear(64, 64, 1, False, packing.group, packing.bits, packing.mode)
            linear.weight, linear.scales, linear.biases = weights.weight, weights.scales, weights.biases
            if weights.bias is not None:
                linear.bias = weights.bias
            module[name] = linear
        return module


class RecurrentInputs:
    """What comes into a layer's recurrent mixer from its projections, and its weights."""

    def __init__(self, shape: MixerShape, rows: int, tokens: int, dtype: mx.Dtype) -> None:
        self.shape, self.rows, self.tokens = shape, rows, tokens
        self.weights = random_weights(shape, np.random.default_rng(0))
        self.joint, *self.apart = (
            mx.random.normal((rows * tokens, width)).astype(dtype) for width in (shape.width, *shape.apart)
        )
        self.states = [mx.zeros((rows, *sizes)) for sizes in shape.states]
        mx.eval(self.weights, self.joint, self.apart, self.states)

    def theirs(self) -> mx.array:
        """The same as mlx-lm's modules compute it, of sequences that begin."""
        shape = self.shape
        x = entering(shape, self.joint).reshape(self.rows, self.tokens, -1)
        padded = mx.pad(x, [(0, 0), (shape.convolution.taps - 1, 0), (0, 0)])
        y = mx.conv1d(padded, self.weights["filter"].astype(x.dtype), groups=shape.convolution.channels)
        if shape.convolution.biased:
            y = y + self.weights["filter_bias"].astype(x.dtype)
        if isinstance(shape, ShortConvShape):
            gate = self.joint[:, shape.channels : 2 * shape.channels]
            return gate * y.reshape(gate.shape)
        y = nn.silu(y)
        return self._gated_delta(y, shape) if isinstance(shape, DeltaShape) else self._scanned(y, shape)

    def _gated_delta(self, x: mx.array, shape: DeltaShape) -> mx.array:
        gated, keys = import_upstream("mlx_lm.models.gated_delta"), shape.key_heads * shape.key_size
        q, k, v = mx.split(x, [keys, 2 * keys], axis=-1)
        q, k = (part.reshape(self.rows, self.tokens, shape.key_heads, shape.key_size) for part in (q, k))
        v = v.reshape(self.rows, self.tokens, shape.value_heads, shape.value_size)
        q, k = gated.normalize_qk(q, k, inv_scale=shape.key_size**-0.5, eps=1e-6)
        joint = self.joint.reshape(self.rows, self.tokens, -1)
        b, a = mx.split(joint[..., shape.factors :], 2, axis=-1)
        found: mx.array = gated.gated_delta_update(q, k, v, a, b, self.weights["a_log"], self.weights["dt_bias"])[0]
        return found

    def _scanned(self, x: mx.array, shape: Mamba2Shape) -> mx.array:
        ssm, groups = import_upstream("mlx_lm.models.ssm"), shape.groups * shape.state_size
        values, writers, readers = mx.split(x, [shape.inner, shape.inner + groups], axis=-1)
        values = values.reshape(self.rows, self.tokens, shape.heads, shape.head_size)
        writers, readers = (
            part.reshape(self.rows, self.tokens, shape.groups, shape.state_size) for part in (writers, readers)
        )
        steps = self.joint.reshape(self.rows, self.tokens, -1)[..., -shape.heads :]
        a_log, skip, bias = (self.weights[name] for name in ("a_log", "skip", "dt_bias"))
        state = mx.zeros((self.rows, shape.heads, shape.head_size, shape.state_size))
        given = (values, a_log, writers, readers, skip.astype(x.dtype), steps, bias, state)
        found: mx.array = ssm.ssm_update(*given, (0.0, float("inf")))[0]
        return found


class RecurrentTrial(RecurrentInputs):
    """A layer's recurrent mixer by a GPU's kernels, without the products around it."""

    def __init__(self, device: Device, shape: MixerShape, rows: int, tokens: int) -> None:
        super().__init__(shape, rows, tokens, mx.bfloat16)
        self.kernels = recurrent_kernels(device, shape, mx.bfloat16, self.weights)
        self.spans = RecurrentSpans.of([(row * tokens, tokens, row, 0) for row in range(rows)])

    def ours(self) -> mx.array:
        """What the mixer gives between its projections, without the norm of its output."""
        found: mx.array = self.kernels.convolve(self.joint, self.spans, self.states[0])[0]
        if self.kernels.rule:
            found = self.kernels.advance(found, self.joint, self.spans, self.states[1], *self.apart)[0]
        return found
