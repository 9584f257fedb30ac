"""Mixtures of experts for many tokens, on NVIDIA GPUs: the tokens of each expert are one product.

Pairs of a token and an expert that it chose are sorted by expert once a layer. Two launches follow: gate and up
projections with the activation, then down projections, whose products are written where the router's order has them.
Weights are dequantised in registers, to the same numbers as MLX's. The sums of a product are in one order, whatever
other tokens there are: a token's bits depend on nothing but the token and its experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import mlx.core as mx

from ingot.kernels.gpu.kernel_source import Kernel, KernelTemplate, LaunchConfig, OutputSpec, read_source
from ingot.kernels.gpu.launcher import Launched, Launcher
from ingot.kernels.packed_matmul.kernels import BITS, GROUPS, SOURCE, PackedFormat

STEP = 64
"""Columns that are multiplied at a time: all sizes are multiples of it."""
DTYPES = (mx.float16, mx.bfloat16)
Curve = Literal["silu", "gelu_tanh", "swiglu_oai"]
_CURVES: tuple[Curve, ...] = ("silu", "gelu_tanh", "swiglu_oai")
_SORT_THREADS, _THREADS = 256, 128
_TILE = 128
"""Rows of weights of a group of threads: of one projection, or half of them of each of two."""
_ALIGNED = 1024


@dataclass(frozen=True, slots=True)
class GroupedTuning:
    """Affects speed, never results."""

    rows: tuple[int, ...] = (16, 32, 64, 128)  # of one expert that a group of threads multiplies
    stages: int = 4  # of which two are multiplied and the others are on their way
    units: bool = True  # those that read shared memory themselves, where there are any

    def rows_of(self, pairs: int, experts: int) -> int:
        """For so many pairs of a token and an expert: what most experts' tokens fit in."""
        return next((rows for rows in self.rows if pairs <= rows * experts), self.rows[-1])


GROUPED_TUNING = GroupedTuning()


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """One projection's: words [experts, outputs, ...], scales and biases [experts, outputs, columns / group]; `bias`
    [experts, outputs] is added to products. Of MXFP4 scales are bytes, and there are no biases."""

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
    def inputs(self) -> tuple[mx.array, ...]:
        """As a kernel takes them."""
        return self.weight.view(mx.int32), self.scales, self.scales if self.biases is None else self.biases

    def unsupported(self, dtype: mx.Dtype) -> str | None:
        """Why there is no kernel for it; None where there is one."""
        packing = self.packing
        affine = packing.mode == "affine" and packing.bits in BITS and packing.group in GROUPS
        if not affine and (packing.mode, packing.bits, packing.group) != ("mxfp4", 4, 32):
            return f"experts of {packing.bits} bits in groups of {packing.group} as {packing.mode}"
        if dtype not in DTYPES or (affine and self.scales.dtype != dtype):
            return f"experts with scales of {self.scales.dtype} for {dtype}"
        if self.columns % STEP or self.outputs % STEP:
            return f"experts of {self.outputs}x{self.columns}: there are kernels for multiples of {STEP}"
        return None

    def part(self, expert: int) -> mx.array:
        """One expert's weights [outputs, columns] in float32, plainly computed."""
        biases = None if self.biases is None else self.biases[expert]
        mode, packing = self.packing.mode, self.packing
        found = mx.dequantize(
            self.weight[expert].view(mx.uint32), self.scales[expert], biases, packing.group, packing.bits, mode
        )
        return found.astype(mx.float32)

    def __str__(self) -> str:
        packing = self.packing
        return f"{self.experts} experts of {self.outputs}x{self.columns}, {packing.mode} {packing.bits}/{packing.group}"


@cache
def _sort_kernel() -> Kernel:
    header = read_source(SOURCE / "lots.h")
    outputs = ("order", "offsets", "arranged")
    return Kernel("packed", "sort", ("chosen", "given"), outputs, header, read_source(SOURCE / "sort.h"), True)


@cache
def _grouped_kernel(gated: bool, biased: bool, rows: int | None) -> Kernel:
    """`rows` is None where no units read shared memory themselves, or none are to."""
    defines = ["#define GATED" if gated else "#define SORTED", *(["#define BIASED"] if biased else [])]
    files = ("exponential.h", "lots.h", "units.h")
    header = "\n".join([*defines, "".join(read_source(SOURCE / file) for file in files)])
    if rows is None:
        header = header.replace("__CUDA_ARCH_FEAT_SM90_ALL", "NO_UNITS_THAT_READ_SHARED_MEMORY")
    header = header.replace("WGMMA_FORMS", "" if rows is None else _wgmma(rows))
    own = ("weight", "scales", "biases", *(["bias_of"] if biased else []))
    inputs = (*own, *(f"other_{name}" for name in own)) if gated else own
    names = ("given", *inputs, "order", "offsets")
    kind = f"grouped{'_gated' if gated else ''}{'_biased' if biased else ''}"
    return Kernel("packed", kind, names, ("y",), header, read_source(SOURCE / "grouped.h"), True)


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
        curve: Curve = "silu",
        tuning: GroupedTuning = GROUPED_TUNING,
    ) -> None:
        """Raises ValueError for what there is no kernel for."""
        for weights in (gate, up, down):
            if (reason := weights.unsupported(dtype)) is not None:
                raise ValueError(reason)
        if gate.packing != up.packing or gate.inputs[0].shape != up.inputs[0].shape or _biased(gate) != _biased(up):
            raise ValueError(f"{gate} with {up}: they are multiplied at once")
        self._run, self.gate, self.up, self.down = run, gate, up, down
        self._dtype, self._curve, self._tuning = dtype, _CURVES.index(curve), tuning

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """x [tokens, columns] and the experts of each, [tokens, k] (int32): products [tokens, k, outputs]."""
        tokens, each = chosen.shape
        arranged, order, offsets = self.sorted_rows(x, chosen)
        inner = self.gated(arranged, order, offsets)
        y = self._multiplied([inner, *self._inputs(self.down), order, offsets], self.down, gated=False)
        return y.reshape(tokens, each, self.down.outputs)

    def sorted_rows(self, x: mx.array, chosen: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """x with its columns arranged, the pairs by expert, and where each expert's begin."""
        experts, pairs = self.gate.experts, mx.contiguous(chosen).reshape(-1)
        groups = experts + -(-x.size // (8 * _SORT_THREADS))
        template = (("T", self._dtype), ("EXPERTS", experts), ("THREADS", _SORT_THREADS))
        outputs = (
            OutputSpec(pairs.shape, mx.int32),
            OutputSpec((experts + 1,), mx.int32),
            OutputSpec(x.shape, self._dtype),
        )
        work = LaunchConfig(template, (groups, 1, 1), _SORT_THREADS, outputs)
        order, offsets, arranged = self._run(_sort_kernel(), [pairs, mx.contiguous(x)], work)
        return arranged, order, offsets

    def gated(self, arranged: mx.array, order: mx.array, offsets: mx.array) -> mx.array:
        """The activations [pairs, inner], by expert and arranged."""
        inputs = [arranged, *self._inputs(self.gate), *self._inputs(self.up), order, offsets]
        return self._multiplied(inputs, self.gate, gated=True)

    def _multiplied(self, inputs: list[mx.array], weights: ExpertWeights, *, gated: bool) -> mx.array:
        pairs = inputs[-2].size
        rows = self._tuning.rows_of(pairs, weights.experts)
        parts = -(-weights.outputs // (_TILE // 2 if gated else _TILE))
        kernel = _grouped_kernel(gated, _biased(weights), rows if self._tuning.units else None)
        work = LaunchConfig(
            self._template(weights, rows),
            ((pairs // rows + weights.experts) * parts, 1, 1),
            _THREADS,
            (OutputSpec((pairs, weights.outputs), self._dtype),),
            self._lent(weights.packing, rows),
        )
        [y] = self._run(kernel, inputs, work)
        return y

    def _template(self, weights: ExpertWeights, rows: int) -> KernelTemplate:
        packing = weights.packing
        return (
            *(("T", self._dtype), ("Scale", weights.scales.dtype), ("BITS", packing.bits), ("GROUP", packing.group)),
            *(("FLOATS", packing.mode != "affine"), ("ROWS", rows), ("STAGES", self._tuning.stages)),
            ("CURVE", self._curve),
        )

    def _lent(self, packing: PackedFormat, rows: int) -> int:
        """Bytes of shared memory."""
        factors = _TILE * 4 * (2 if packing.group == 32 else 1)
        stages = self._tuning.stages * (rows * 2 * STEP + _TILE * 8 * packing.bits + factors)
        return max(stages, rows * (_TILE + 8) * 2) + _ALIGNED

    @staticmethod
    def _inputs(weights: ExpertWeights) -> list[mx.array]:
        return [*weights.inputs, *([] if weights.bias is None else [weights.bias])]


def _biased(weights: ExpertWeights) -> bool:
    return weights.bias is not None
