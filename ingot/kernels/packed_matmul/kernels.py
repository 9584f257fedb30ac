"""Products with weights in MLX's quantisations, for NVIDIA GPUs: affine, mxfp4, nvfp4 and mxfp8.

Few rows are multiplied at memory bandwidth. Tuning affects speed, never results: the number of warps and the columns
that are fetched at once determine the order in which a product is summed, so they depend only on the weights; the
outputs of a group of threads and the prefetch depth change no bits.

Where many rows are to have the bits that few have, they are multiplied in tiles, whose sums have the same order.
Elsewhere, one layer's weights at a time are unpacked, and MLX multiplies by these. MLX would unpack them too, but
into new memory for each layer, all of which is held until the device has finished: as much as the whole model unpacked.
Here all layers use the same memory in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from pathlib import Path
from typing import Literal

import mlx.core as mx

from ingot.kernels.dense_matmul.kernels import LARGE_TILE, SMALL_TILE, TileCut, tile_cut
from ingot.kernels.dense_matmul.kernels import SOURCE as DENSE
from ingot.kernels.device import Device
from ingot.kernels.gpu.kernel_source import Kernel, KernelTemplate, LaunchConfig, OutputSpec, read_source
from ingot.kernels.gpu.launcher import Launched, Launcher, kernel_launcher, required_launcher

_SHARED = 48 * 1024
"""Bytes of static shared memory of a group of threads."""
_LEAST_STAGES = 3
_PIECE = 16
"""Bytes that are copied at once."""
_COPIED = (4, 8, 16)
"""The same for scales or biases."""


@dataclass(frozen=True, slots=True)
class PackedCut:
    """How a product is divided among groups of threads."""

    warps: int  # of a group of threads, which share the columns
    tiles: int  # of sixteen outputs
    fetch: int = 64  # bytes of a row of weights that a warp copies in a stage
    stages: int = 3  # at most; all but one are being copied
    ahead: bool = True  # the next columns' activations are prefetched

    def depth_of(self, bits: int, group: int) -> int:
        """Groups of columns of a stage."""
        return _power_of_two(self.fetch * 8 // (bits * group))

    def fitting(self, bits: int, group: int) -> PackedCut:
        """This one, or the next smaller one with enough shared memory for its stages."""
        stages = _SHARED // self._stage(bits * group // 8, self.depth_of(bits, group))
        if stages >= min(self.stages, _LEAST_STAGES):
            return replace(self, stages=min(self.stages, stages))
        smaller = replace(self, tiles=self.tiles // 2) if self.tiles > 1 else replace(self, fetch=self.fetch // 2)
        return smaller.fitting(bits, group)

    def copies_factors(self, bits: int, group: int, size: int, count: int) -> bool:
        """Whether scales and biases, `count` of a group and of so many bytes each, are copied with the weights: where
        copies can be so small, and fit into shared memory."""
        depth = self.depth_of(bits, group)
        fits = self.stages * self._stage(bits * group // 8 + count * size, depth) <= _SHARED
        return fits and depth * size in _COPIED

    def _stage(self, least: int, depth: int) -> int:
        """Bytes of one stage of all warps, with `least` bytes for a group of columns of an output."""
        return self.warps * self.tiles * 16 * depth * least


@dataclass(frozen=True, slots=True)
class PackedTuning:
    """For up to eight rows, and for up to sixteen, with the same warps and fetch size."""

    wide: int = 8192  # outputs from which on `many` is used
    few: tuple[PackedCut, PackedCut] = (PackedCut(8, 1), PackedCut(8, 1))
    many: tuple[PackedCut, PackedCut] = (PackedCut(4, 2), PackedCut(4, 2))
    prompts: tuple[TileCut, TileCut] = (SMALL_TILE, LARGE_TILE)  # for more rows than `FEW_ROWS`

    def cut_of(self, bits: int, group: int, outputs: int, eights: int) -> PackedCut:
        cuts = self.many if outputs >= self.wide else self.few
        alike = min((cut.fitting(bits, group) for cut in cuts), key=lambda cut: cut.fetch)
        return replace(cuts[eights - 1], fetch=alike.fetch).fitting(bits, group)


def copied_in_pieces(bits: int, group: int, groups: int, depth: int) -> bool:
    """Whether all rows of weights, and all their stages, are aligned to what is copied at once."""
    least = group * bits // 8
    return least % _PIECE == 0 or (least * depth % _PIECE == 0 and groups % depth == 0)


def _power_of_two(most: int) -> int:
    """The largest power of two up to `most`."""
    return 1 << (max(1, most).bit_length() - 1)


PACKED_TUNING = PackedTuning()


SOURCE = Path(__file__).parent / "source"
FEW_ROWS = 64
"""Rows up to which weights are multiplied by warps that share the columns."""
_TOTALS_WARPS = 8
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


_UP_INPUTS = ("up_weight", "up_scales", "up_biases", "numbers")
PRODUCT_FORMS = {
    "multiply": (),
    "multiply_added": ("residual",),
    "multiply_gated": (),
    "gather": ("chosen",),
    "gather_squared": ("chosen",),
    "gather_gated": ("chosen", *_UP_INPUTS),
    "gather_gated_biased": ("chosen", *_UP_INPUTS, "gate_bias", "up_bias"),
}
"""Forms of a product, and their further inputs."""
_FORM_DEFINES = {
    "multiply_added": ("RESIDUAL",),
    "multiply_gated": ("GATED",),
    "gather": ("GATHERED",),
    "gather_squared": ("GATHERED", "SQUARED"),
    "gather_gated": ("GATHERED", "GATED"),
    "gather_gated_biased": ("GATHERED", "GATED", "BIASED"),
}
ExpertCurve = Literal["silu", "gelu_tanh", "clipped"]
"""Of a gate: `clipped` is GPT-OSS's."""
_CURVES: tuple[ExpertCurve, ...] = ("silu", "gelu_tanh", "clipped")


@cache
def packed_kernel(name: str) -> Kernel:
    defines = _FORM_DEFINES.get(name, ())
    header = "".join(f"#define {each}\n" for each in defines) + read_source(SOURCE / "lots.h")
    if "GATED" in defines:
        header += read_source(SOURCE / "exponential.h") + read_source(DENSE / "gate.h")
    if {"GATED", "GATHERED"} <= {*defines}:
        header += read_source(SOURCE / "curve.h")
    inputs = ("given", "weight", "scales", "biases", *PRODUCT_FORMS[name])
    return Kernel("packed", name, inputs, ("y",), header, read_source(SOURCE / "multiply.h"), True)


@cache
def tile_kernel(name: str) -> Kernel:
    """The same for many rows."""
    defines = _FORM_DEFINES.get(name, ())
    header = "".join(f"#define {each}\n" for each in defines) + read_source(SOURCE / "lots.h")
    if "GATED" in defines:
        header += read_source(SOURCE / "exponential.h") + read_source(DENSE / "gate.h")
    inputs = ("given", "weight", "scales", "biases", *PRODUCT_FORMS[name], "totals")
    return Kernel("packed", f"tile_{name}", inputs, ("y",), header, read_source(SOURCE / "tile.h"), True)


@cache
def totals_kernel() -> Kernel:
    header, body = read_source(SOURCE / "lots.h"), read_source(SOURCE / "totals.h")
    return Kernel("packed", "totals", ("given",), ("totals",), header, body, True)


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How weights are quantised. Affine ones have scales and biases in the activations' dtype; those of other modes are
    floats of a few bits, with scales of a byte."""

    bits: int
    group: int
    mode: str = "affine"

    @property
    def affine(self) -> bool:
        return self.mode == "affine"

    @property
    def held(self) -> int:
        """Columns that a kernel holds at once: a group's, or those of two small ones."""
        return max(self.group, GROUPS[0])

    def scale_dtype(self, dtype: mx.Dtype) -> mx.Dtype:
        """For activations in `dtype`."""
        return dtype if self.affine else mx.uint8

    def unsupported(self) -> str | None:
        """Why there is no kernel for it; None where there is one."""
        if not self.affine and self not in FLOAT_FORMATS:
            return f"weights packed as {self.mode}: there are kernels for affine ones and {', '.join(_FLOAT_MODES)}"
        if self.affine and (self.bits not in BITS or self.group not in GROUPS):
            return f"weights of {self.bits} bits in groups of {self.group}: there are kernels for 2 to 8 in 32 to 128"
        return None

    def __str__(self) -> str:
        return f"{self.bits} bits in groups of {self.group}" + ("" if self.affine else f", {self.mode}")


MXFP4, NVFP4, MXFP8 = (PackedFormat(*each) for each in ((4, 32, "mxfp4"), (4, 16, "nvfp4"), (8, 32, "mxfp8")))
FLOAT_FORMATS = (MXFP4, NVFP4, MXFP8)
_FLOAT_MODES = [each.mode for each in FLOAT_FORMATS]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """A layer's, as MLX packs them: scales and biases [outputs, columns / group] of one format. Those of experts have
    one axis more, before these."""

    packing: PackedFormat
    dtype: mx.Dtype  # the activations'
    weight: mx.array  # int32, which is how a kernel is given words
    scales: mx.array
    biases: mx.array | None  # of affine ones

    @classmethod
    def of(
        cls,
        packing: PackedFormat,
        weight: mx.array,
        scales: mx.array,
        biases: mx.array | None = None,
        *,
        dtype: mx.Dtype | None = None,
    ) -> PackedWeights:
        """`weight` may be words of any kind: they are not copied. `dtype` is the activations', where scales do not say
        it."""
        return cls(
            packing, scales.dtype if packing.affine or dtype is None else dtype, weight.view(mx.int32), scales, biases
        )

    @property
    def outputs(self) -> int:
        return self.scales.shape[-2]

    @property
    def columns(self) -> int:
        return self.scales.shape[-1] * self.packing.group

    @property
    def size(self) -> int:
        """How many weights there are."""
        return self.scales.size * self.packing.group

    @property
    def experts(self) -> int | None:
        """How many; None where the weights are those of one layer for all tokens."""
        return self.scales.shape[0] if self.scales.ndim == 3 else None

    @property
    def inputs(self) -> tuple[mx.array, mx.array, mx.array]:
        """As a kernel takes them."""
        return self.weight, self.scales, self.scales if self.biases is None else self.biases

    def by_mlx(self, x: mx.array) -> mx.array:
        """x [rows, columns], multiplied by MLX's own kernels."""
        given, packing = (self.weight.view(mx.uint32), self.scales, self.biases), self.packing
        return mx.quantized_matmul(x, *given, group_size=packing.group, bits=packing.bits, mode=packing.mode)

    def part(self, which: slice | int) -> PackedWeights:
        """Some outputs' weights, or one expert's."""
        biases = None if self.biases is None else self.biases[which]
        return replace(self, weight=self.weight[which], scales=self.scales[which], biases=biases)

    def unpacked(self, dtype: mx.Dtype) -> mx.array:
        """[outputs, columns], as numbers of this format."""
        packing, scales = self.packing, self.scales.astype(self.packing.scale_dtype(dtype))
        biases = None if self.biases is None else self.biases.astype(dtype)
        given = (self.weight.view(mx.uint32), scales, biases, packing.group, packing.bits, packing.mode)
        return mx.dequantize(*given, dtype=dtype)

    def unsupported(self) -> str | None:
        """Why there is no kernel for them; None where there is one."""
        reason, held = self.packing.unsupported(), self.packing.held
        if reason is None and self.columns % held:
            return f"{self.packing.mode} weights of {self.columns} columns: there are kernels for multiples of {held}"
        return reason

    def __str__(self) -> str:
        size = f"{self.outputs}x{self.columns} of {self.packing}"
        return size if self.experts is None else f"{self.experts} experts of {size}"


@dataclass(frozen=True, slots=True, eq=False)
class GatedExpertWeights:
    """The gate and up projections of a layer's experts, whose weights are alike."""

    gate: PackedWeights
    up: PackedWeights
    curve: ExpertCurve
    numbers: mx.array  # of the curve: its slope and its limit, if it has them
    biases: tuple[mx.array, mx.array] | None = None  # of both, [experts, outputs]


class PackedProduct(Launched):
    """Multiplies by the weights of one kind of layers."""

    def __init__(
        self, run: Launcher, packing: PackedFormat, dtype: mx.Dtype, tuning: PackedTuning = PACKED_TUNING
    ) -> None:
        """Raises ValueError for what there is no kernel for."""
        if (reason := packing.unsupported()) is not None:
            raise ValueError(reason)
        if dtype not in DTYPES:
            raise ValueError(f"{dtype}: there are kernels for {', '.join(map(str, DTYPES))}")
        self._run, self._packing, self._dtype, self._tuning = run, packing, dtype, tuning
        # By form, rows, outputs, groups of columns, and what a form has besides.
        self._works: dict[tuple[str, int, int, int, KernelTemplate], LaunchConfig] = {}

    def __call__(self, x: mx.array, weights: PackedWeights, residual: mx.array | None = None) -> mx.array:
        """x [rows, columns] times weights: [rows, outputs]. A row's bits do not depend on how many there are.
        `residual` [rows, outputs] is added to what was rounded."""
        return self.launched(mx.contiguous(x), weights, None if residual is None else mx.contiguous(residual))

    def launched(self, x: mx.array, weights: PackedWeights, residual: mx.array | None = None) -> mx.array:
        """The same of what is in contiguous memory."""
        if residual is None:
            return self._launched("multiply", [x, *weights.inputs], x.shape[0])
        return self._launched("multiply_added", [x, *weights.inputs, residual], x.shape[0])

    def gated(self, x: mx.array, weights: PackedWeights) -> mx.array:
        """silu of the product with the first half of the outputs, times that with the other half: [rows, outputs / 2],
        with the bits of MLX's operations on these products. x is in contiguous memory."""
        return self._launched("multiply_gated", [x, *weights.inputs], x.shape[0], parts=2)

    def gather(self, x: mx.array, weights: PackedWeights, chosen: mx.array) -> mx.array:
        """x [rows, columns] times the weights of experts chosen [products] (int32), as many of them for each row:
        [products, outputs]. Bits are those of a product with that expert's weights alone."""
        return self.launched_gather(mx.contiguous(x), weights, mx.contiguous(chosen))

    def launched_gather(self, x: mx.array, weights: PackedWeights, chosen: mx.array) -> mx.array:
        """The same of what is in contiguous memory."""
        return self._launched("gather", [x, *weights.inputs, chosen], chosen.shape[0])

    def gather_squared(self, x: mx.array, weights: PackedWeights, chosen: mx.array) -> mx.array:
        """The same, with what is above zero squared and the rest zero. All of it is in contiguous memory."""
        return self._launched("gather_squared", [x, *weights.inputs, chosen], chosen.shape[0])

    def gather_gated(self, x: mx.array, experts: GatedExpertWeights, chosen: mx.array) -> mx.array:
        """The curve of x [rows, columns] times the gates of experts chosen [products], times that with what these let
        through: [products, outputs]. All of it is in contiguous memory."""
        inputs = [x, *experts.gate.inputs, chosen, *experts.up.inputs, experts.numbers]
        name, template = "gather_gated", (("CURVE", _CURVES.index(experts.curve)),)
        if experts.biases is not None:
            name, inputs = "gather_gated_biased", [*inputs, *experts.biases]
        return self._launched(name, inputs, chosen.shape[0], template=template)

    def _launched(
        self, name: str, inputs: list[mx.array], rows: int, parts: int = 1, template: KernelTemplate = ()
    ) -> mx.array:
        if rows > FEW_ROWS and self._tiles(name):
            return self._tiled(name, inputs, rows, parts)
        *_, outputs, groups = inputs[2].shape
        work = self._works.get((name, rows, outputs, groups, template))
        if work is None:  # once a shape: choosing is most of Python's part of a launch
            work = self._work(name, rows, outputs, groups * self._packing.group // self._packing.held, parts)
            work = work._replace(template=(*work.template, *template))
            self._works[name, rows, outputs, groups, template] = work
        [y] = self._run(packed_kernel(name), inputs, work)
        return y

    def _tiles(self, name: str) -> bool:
        """Whether there are kernels for many rows."""
        return self._packing.held == self._packing.group and self._dtype.size == 2 and "gather" not in name

    def _tiled(self, name: str, inputs: list[mx.array], rows: int, parts: int) -> mx.array:
        packing, (outputs, groups) = self._packing, inputs[2].shape
        cut, few = (
            tile_cut(self._tuning.prompts, outputs, rows),
            self._tuning.cut_of(packing.bits, packing.group, outputs, 2),
        )
        form, lots = format_template(packing, self._dtype), -(-rows // cut.rows)
        totals = inputs[0]
        if packing.affine:
            width = lots * cut.rows
            work = LaunchConfig(
                (*form, ("WIDTH", width), ("WARPS", _TOTALS_WARPS)),
                (-(-groups * width // (8 * _TOTALS_WARPS)), 1, 1),
                _TOTALS_WARPS * 32,
                (OutputSpec((groups, width), mx.float32),),
            )
            [totals] = self._run(totals_kernel(), inputs[:1], work)
        line = packing.group * packing.bits // 8
        stage = cut.outputs * (line + 8) + cut.rows * (2 * packing.group + 4)
        template: KernelTemplate = (
            *(*form, ("SPAN_WARPS", few.warps), ("SPAN_DEPTH", few.depth_of(packing.bits, packing.group))),
            *(("OUT_WARPS", cut.out_warps), ("ROW_WARPS", cut.row_warps), ("TILES", cut.tiles)),
            *(("EIGHTS", cut.eights), ("STAGES", cut.stages), ("PIECES", line % _PIECE == 0)),
        )
        work = LaunchConfig(
            template,
            (lots * -(-outputs // cut.outputs), 1, 1),
            cut.warps * 32,
            (OutputSpec((rows, outputs // parts), self._dtype),),
            cut.stages * stage,
        )
        return self._run(tile_kernel(name), [*inputs, totals], work)[0]

    def _work(self, name: str, rows: int, outputs: int, groups: int, parts: int) -> LaunchConfig:
        defines = _FORM_DEFINES.get(name, ())
        lines = outputs * 2 if {"GATED", "GATHERED"} <= {*defines} else outputs
        eights = 1 if rows <= 8 or "GATHERED" in defines else 2 if rows <= FEW_ROWS else 4
        lots = rows if "GATHERED" in defines else -(-rows // (eights * 8))
        cut = self._tuning.cut_of(self._packing.bits, self._packing.held, lines, min(eights, 2))
        return LaunchConfig(
            self._template(groups, eights, cut),
            (lots * -(-lines // (cut.tiles * 16)), 1, 1),
            cut.warps * 32,
            (OutputSpec((rows, outputs // parts), self._dtype),),
        )

    def _template(self, groups: int, eights: int, cut: PackedCut) -> KernelTemplate:
        packing, bits, held = self._packing, self._packing.bits, self._packing.held
        depth, aligned = cut.depth_of(bits, held), groups % cut.depth_of(bits, held) == 0
        factors = packing.scale_dtype(self._dtype).size * held // packing.group
        copied = aligned and cut.copies_factors(bits, held, factors, 2 if packing.affine else 1)
        return (
            *format_template(packing, self._dtype),
            *(("EIGHTS", eights), ("TILES", cut.tiles), ("WARPS", cut.warps), ("DEPTH", depth), ("STAGES", cut.stages)),
            *(("ALIGNED", aligned), ("PIECES", copied_in_pieces(bits, held, groups, depth)), ("AHEAD", cut.ahead)),
            *(("COPIED", copied), ("UNIT", min(gcd(groups, depth) * factors, 4))),
        )


def format_template(packing: PackedFormat, dtype: mx.Dtype) -> KernelTemplate:
    """What kernels are told of a format, for activations in `dtype`."""
    scale, floats = packing.scale_dtype(dtype), not packing.affine
    return ("T", dtype), ("Scale", scale), ("BITS", packing.bits), ("GROUP", packing.group), ("FLOATS", floats)


def packed_product(device: Device, packing: PackedFormat, dtype: mx.Dtype) -> PackedProduct:
    """Raises ValueError where there is none."""
    return PackedProduct(required_launcher(device), packing, dtype)


UNPACK_INPUTS = ("weight", "scales", "biases", "scratch", "given", "after")
UNPACK_THREADS = 256


@cache
def unpacking_kernel() -> Kernel:
    header, body = read_source(SOURCE / "lots.h"), read_source(SOURCE / "unpack.h")
    return Kernel("packed", "unpack", UNPACK_INPUTS, ("handed",), header, body, True)


class UnpackScratch(Launched):
    """Room for unpacked weights, in a format. Whoever takes it waits for whoever had it before."""

    def __init__(self, run: Launcher, room: mx.array) -> None:
        """`room` [weights] is written in place."""
        self._run, self._room, self._after = run, room, mx.zeros(1, room.dtype)
        mx.eval(self._room, self._after)

    @property
    def nbytes(self) -> int:
        return self._room.nbytes

    def covers(self, weights: PackedWeights) -> bool:
        """Whether there is room for all of them, or for a good part at a time."""
        return weights.dtype == self._room.dtype and self._room.size >= min(weights.outputs, 64) * weights.columns

    def multiply(self, x: mx.array, weights: PackedWeights) -> mx.array:
        """x [rows, columns] times weights that are covered: [rows, outputs]."""
        if weights.size > self._room.size:
            step = self._room.size // weights.columns
            parts = [weights.part(slice(begin, begin + step)) for begin in range(0, weights.outputs, step)]
            return mx.concatenate([self.multiply(x, part) for part in parts], axis=-1)
        y = self.unpacked(x, weights) @ self._room[: weights.size].reshape(weights.outputs, weights.columns).T
        # A number of its own, not a view: that would hold all of the product until the next one.
        self._after = y.reshape(-1)[:1] + 0
        return y

    def unpacked(self, x: mx.array, weights: PackedWeights) -> mx.array:
        """`x`, which is there once the weights are."""
        groups = -(-(weights.size + x.size) // (8 * UNPACK_THREADS))
        template = (*format_template(weights.packing, x.dtype), ("THREADS", UNPACK_THREADS))
        work = LaunchConfig(template, (groups, 1, 1), UNPACK_THREADS, (OutputSpec(x.shape, x.dtype),))
        [handed] = self._run(unpacking_kernel(), [*weights.inputs, self._room, mx.contiguous(x), self._after], work)
        return handed


def make_scratch(device: Device, weights: int, dtype: mx.Dtype) -> UnpackScratch | None:
    """None where no kernels run."""
    run = kernel_launcher(device)
    return None if run is None else UnpackScratch(run, mx.zeros(weights, dtype))
