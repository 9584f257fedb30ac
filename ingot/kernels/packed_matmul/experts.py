"""Mixtures of experts for many tokens, on NVIDIA GPUs: the tokens of each expert are one product.

Pairs of a token and an expert that it chose are sorted by expert once a layer. Two launches follow: gate and up
projections with the activation, then down projections, whose products are written where the router's order has them.
Weights are dequantised in registers, to the same numbers as MLX's. The sums of a product are in one order, whatever
other tokens there are: a token's bits depend on nothing but the token and its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import mlx.core as mx

from ingot.kernels.gpu.kernel_source import Kernel, KernelTemplate, LaunchConfig, OutputSpec, read_source
from ingot.kernels.gpu.launcher import Launched, Launcher
from ingot.kernels.packed_matmul.kernels import SOURCE, PackedFormat, format_template

STEP = 64
"""Columns that are multiplied at a time: all sizes are multiples of it."""
DTYPES = (mx.float16, mx.bfloat16)
Curve = Literal["silu", "gelu_tanh", "swiglu_oai"]
Activation = Callable[[mx.array, mx.array], mx.array]
"""Of a gate and what it is multiplied by."""
_Form = Literal["gated", "inner", "down"]
_DEFINES = {"gated": ["#define GATED"], "inner": [], "down": ["#define SORTED"]}
_CURVES: tuple[Curve, ...] = ("silu", "gelu_tanh", "swiglu_oai")
_SORT_THREADS = 256
_TILE = 128
"""Rows of weights that four warps multiply: of one projection, or half of them of each of two."""
_ALIGNED = 1024


@dataclass(frozen=True, slots=True)
class GroupedTuning:
    """Affects speed, never results."""

    rows: tuple[int, ...] = (32, 128)  # of one expert that a group of threads multiplies, by how many there are
    stages: int = 4  # of which two are multiplied and the others are on their way
    fours: int = 1  # warps that share rows
    units: bool = True  # those that read shared memory themselves, where there are any

    def rows_of(self, pairs: int, experts: int) -> int:
        """For so many pairs of a token and an expert: what most experts' tokens fit in."""
        return next((rows for rows in self.rows if pairs <= rows * experts), self.rows[-1])


GROUPED_TUNING = GroupedTuning()


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """One projection's: words [experts, outputs, ...], scales and biases [experts, outputs, columns / group]; `bias`
    [experts, outputs] is added to products. Of floats scales are bytes, and there are no biases."""

    packing: PackedFormat
    weight: mx.array
    scales: mx.array
    biases: mx.array | None = None
    bias: mx.array | None = None

    @property
    def experts(self) -> int:
        return self.scales.shape[0]

    @property
    def outputs(self) -> int:
        return self.scales.shape[1]

    @property
    def columns(self) -> int:
        return self.scales.shape[2] * self.packing.group

    @property
    def kind(self) -> tuple[object, ...]:
        """Weights of one kind are multiplied by the same kernels."""
        return self.packing, self.scales.shape, self.scales.dtype, self.bias is None

    @property
    def _numbers(self) -> list[mx.array]:
        """What is in the activations' dtype."""
        return [each for each in (None if self.biases is None else self.scales, self.bias) if each is not None]

    @property
    def inputs(self) -> list[mx.array]:
        """As a kernel takes them."""
        biases = self.scales if self.biases is None else self.biases
        return [self.weight.view(mx.int32), self.scales, biases, *([] if self.bias is None else [self.bias])]

    def unsupported(self, dtype: mx.Dtype) -> str | None:
        """Why there is no kernel for it; None where there is one."""
        if self.packing.unsupported() is not None:
            return f"experts of {self.packing}: there are no kernels"
        if dtype not in DTYPES or any(each.dtype != dtype for each in self._numbers):
            return f"experts for activations in {dtype}: there are kernels for 16 bits, with scales in the same format"
        if self.columns % STEP or self.outputs % STEP:
            return f"experts of {self.outputs}x{self.columns}: there are kernels for multiples of {STEP}"
        return None

    def multiplied(self, x: mx.array, expert: int) -> mx.array:
        """x [rows, columns] times one expert's weights, by plain operations, in float32."""
        packing, biases = self.packing, None if self.biases is None else self.biases[expert]
        words, scales = self.weight[expert].view(mx.uint32), self.scales[expert]
        weights = mx.dequantize(words, scales, biases, packing.group, packing.bits, packing.mode)
        y = x.astype(mx.float32) @ weights.astype(mx.float32).T
        return y if self.bias is None else y + self.bias[expert].astype(mx.float32)

    def __str__(self) -> str:
        packing = self.packing
        return f"{self.experts} experts of {self.outputs}x{self.columns}, {packing.mode} {packing.bits}/{packing.group}"


@cache
def _sort_kernel() -> Kernel:
    header = read_source(SOURCE / "lots.h")
    outputs = ("order", "offsets", "arranged")
    return Kernel("packed", "sort", ("chosen", "given"), outputs, header, read_source(SOURCE / "sort.h"), True)


@cache
def _grouped_kernel(form: _Form, biased: bool, rows: int | None) -> Kernel:
    """`rows` is None where no units read shared memory themselves, or none are to."""
    defines = [*_DEFINES[form], *(["#define BIASED"] if biased else [])]
    files = ("lots.h", "units.h")
    header = "\n".join([*defines, "".join(read_source(SOURCE / file) for file in files)])
    if rows is None:
        header = header.replace("__CUDA_ARCH_FEAT_SM90_ALL", "NO_UNITS_THAT_READ_SHARED_MEMORY")
    header = header.replace(
        "WGMMA_FORMS", "" if rows is None else "\n".join(_wgmma(rows // part) for part in (1, 2, 4))
    )
    own = ("weight", "scales", "biases", *(["bias_of"] if biased else []))
    inputs = (*own, *(f"other_{name}" for name in own)) if form == "gated" else own
    names = ("given", *inputs, "order", "offsets")
    name = f"experts_{form}{'_biased' if biased else ''}"
    return Kernel("packed", name, names, ("y",), header, read_source(SOURCE / "grouped.h"), True)


def _wgmma(rows: int) -> str:
    """Sums [64, rows] += weights [64, 16], which lanes hold, times rows in shared memory: PTX names each register."""
    count = rows // 2
    sums, held = (", ".join(f"%{i}" for i in of) for of in (range(count), range(count, count + 4)))
    given = ", ".join(f'"+f"(s[{i}])' for i in range(count))
    forms = []
    for number, name in (("Brain", "bf16"), ("Half", "f16")):
        text = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{name}.{name} "
        text += f"{{{sums}}}, {{{held}}}, %{count + 4}, all, 1, 1, 0;"
        forms += [
            "template <>",
            f"INLINE void multiply_rows<{number}, {rows}>(LOCAL float* s, const LOCAL unsigned int* a,"
            " unsigned long long rows) {",
            f'asm volatile("{{.reg .pred all; setp.eq.u32 all, 0, 0; {text}}}" : {given}'
            ' : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));',
            "}",
        ]
    return "\n".join(forms)


class GroupedExperts(Launched):
    """The MLPs of one layer's experts."""

    def __init__(
        self,
        run: Launcher,
        gate: ExpertWeights,
        up: ExpertWeights,
        down: ExpertWeights,
        *,
        dtype: mx.Dtype,
        activation: Curve | Activation = "silu",
        tuning: GroupedTuning = GROUPED_TUNING,
    ) -> None:
        """`activation` is applied with the gate and up projections, or, if it is no known one, behind them. Raises
        ValueError for what there is no kernel for."""
        for weights in (gate, up, down):
            if (reason := weights.unsupported(dtype)) is not None:
                raise ValueError(reason)
        if gate.kind != up.kind:
            raise ValueError(f"{gate} with {up}: they are multiplied at once")
        self._run, self.gate, self.up, self.down = run, gate, up, down
        self.dtype, self._activation, self._tuning = dtype, activation, tuning
        self._inputs = {id(weights): weights.inputs for weights in (gate, up, down)}

    def with_rows(self, rows: int) -> GroupedExperts:
        """The same, of which a group of threads always multiplies so many rows."""
        other = copy(self)
        other._tuning = replace(self._tuning, rows=(rows,))
        return other

    @property
    def rows(self) -> tuple[int, ...]:
        """How many rows a group of threads may multiply."""
        return self._tuning.rows

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """x [tokens, columns] and the experts of each, [tokens, k] (int32): products [tokens, k, outputs]."""
        arranged, order, offsets = self.sorted_rows(x, chosen)
        inner = self.activated(arranged, order, offsets)
        y = self._multiplied("down", inner, [self.down], order, offsets)
        return y.reshape(*chosen.shape, self.down.outputs)

    def sorted_rows(self, x: mx.array, chosen: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """x with its columns arranged, the pairs by expert, and where each expert's begin."""
        return self._sorted(mx.contiguous(x), mx.contiguous(chosen).reshape(-1))

    def launched(self, x: mx.array, pairs: mx.array) -> mx.array:
        """The same as a call's for contiguous inputs, and experts one token's behind another's: products [pairs,
        outputs]. Only for activations that the kernels know."""
        arranged, order, offsets = self._sorted(x, pairs)
        return self._multiplied("down", self.activated(arranged, order, offsets), [self.down], order, offsets)

    @property
    def is_launched_alone(self) -> bool:
        """Whether nothing but kernels is launched."""
        return isinstance(self._activation, str)

    def _sorted(self, x: mx.array, pairs: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        experts = self.gate.experts
        groups = experts + -(-x.size // (8 * _SORT_THREADS))
        template = (("T", self.dtype), ("EXPERTS", experts), ("THREADS", _SORT_THREADS))
        outputs = (
            OutputSpec(pairs.shape, mx.int32),
            OutputSpec((experts + 1,), mx.int32),
            OutputSpec(x.shape, self.dtype),
        )
        work = LaunchConfig(template, (groups, 1, 1), _SORT_THREADS, outputs)
        order, offsets, arranged = self._run(_sort_kernel(), [pairs, x], work)
        return arranged, order, offsets

    def activated(self, arranged: mx.array, order: mx.array, offsets: mx.array) -> mx.array:
        """The activations [pairs, inner], by expert and arranged."""
        if isinstance(self._activation, str):
            return self._multiplied("gated", arranged, [self.gate, self.up], order, offsets)
        gate, up = (self._multiplied("inner", arranged, [each], order, offsets) for each in (self.gate, self.up))
        return arrange_columns(self._activation(gate, up))

    def _multiplied(
        self, form: _Form, x: mx.array, by: Sequence[ExpertWeights], order: mx.array, offsets: mx.array
    ) -> mx.array:
        weights, pairs = by[0], order.size
        rows = self._tuning.rows_of(pairs, weights.experts)
        parts = -(-weights.outputs // (self._tuning.fours * _TILE // len(by)))
        work = LaunchConfig(
            self._template(weights, rows),
            ((pairs // rows + weights.experts) * parts, 1, 1),
            self._tuning.fours * _TILE,
            (OutputSpec((pairs, weights.outputs), self.dtype),),
            self._lent(weights.packing, rows),
        )
        kernel = _grouped_kernel(form, weights.bias is not None, rows if self._tuning.units else None)
        inputs = [x, *(array for each in by for array in self._inputs[id(each)]), order, offsets]
        [y] = self._run(kernel, inputs, work)
        return y

    def _template(self, weights: ExpertWeights, rows: int) -> KernelTemplate:
        curve = self._activation if isinstance(self._activation, str) else "silu"
        return (
            *format_template(weights.packing, self.dtype),
            *(("ROWS", rows), ("STAGES", self._tuning.stages)),
            *(("FOURS", self._tuning.fours), ("CURVE", _CURVES.index(curve))),
        )

    def _lent(self, packing: PackedFormat, rows: int) -> int:
        """Bytes of shared memory."""
        lines = self._tuning.fours * _TILE
        line = 8 * packing.bits + 4 * max(1, STEP // packing.group)
        stages = self._tuning.stages * (rows * 2 * STEP + lines * line)
        return max(stages, rows * (lines + 8) * 2) + _ALIGNED


def arrange_columns(x: mx.array) -> mx.array:
    """x [rows, columns] as products read it: of 64 columns those next to each other whose weights a lane holds."""
    rows, columns = x.shape
    return x.reshape(-1, 4, 2, 2, 4).transpose(0, 2, 4, 1, 3).reshape(rows, columns)
