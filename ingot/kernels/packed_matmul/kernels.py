"""Products of few rows with weights packed by MLX's affine form, for NVIDIA GPUs, as fast as memory gives those."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import mlx.core as mx

from ingot.kernels.dense_matmul.kernels import SOURCE as DENSE
from ingot.kernels.device import Device
from ingot.kernels.gpu.launchers import Launcher, launcher
from ingot.kernels.gpu.texts import Kernel, Output, Template, Work, read
from ingot.kernels.packed.tuning import TUNING, Cut, Tuning, in_pieces

SOURCE = Path(__file__).parent / "source"
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


FORMS = {
    "multiply": (),
    "multiply_added": ("residual",),
    "multiply_gated": (),
    "gather": ("chosen",),
}
"""What becomes of a product, or whose weights it is with, and what that takes."""
_TOLD = {"multiply_added": "RESIDUAL", "multiply_gated": "GATED", "gather": "GATHERED"}


@cache
def packed_kernel(name: str) -> Kernel:
    header = (f"#define {_TOLD[name]}\n" if name in _TOLD else "") + read(SOURCE / "lots.h")
    if name == "multiply_gated":
        header += read(SOURCE / "exponential.h") + read(DENSE / "gate.h")
    inputs = ("given", "weight", "scales", "biases", *FORMS[name])
    return Kernel("packed", name, inputs, ("y",), header, read(SOURCE / "multiply.h"), True)


@dataclass(frozen=True, slots=True)
class Packing:
    """How weights are packed. Scales and biases are in the activations' format."""

    bits: int
    group: int
    mode: str = "affine"

    def unsupported(self) -> str | None:
        """Why there is no kernel for it; None where there is one."""
        if self.mode != "affine":
            return f"weights packed as {self.mode}: there are kernels for affine ones"
        if self.bits not in BITS or self.group not in GROUPS:
            return f"weights of {self.bits} bits in groups of {self.group}: there are kernels for 2 to 8 in 32 to 128"
        return None


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """A layer's, as MLX packs them: scales and biases [outputs, columns / group] of one format. Those of experts have
    one axis more, before these."""

    packing: Packing
    weight: mx.array  # int32, which is how a kernel is given words
    scales: mx.array
    biases: mx.array

    @classmethod
    def of(cls, packing: Packing, weight: mx.array, scales: mx.array, biases: mx.array) -> PackedWeights:
        """`weight` may be words of any kind: they are not copied."""
        return cls(packing, weight.view(mx.int32), scales, biases)

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
        return self.weight, self.scales, self.biases

    def by_mlx(self, x: mx.array) -> mx.array:
        """x [rows, columns], multiplied by MLX's own kernels."""
        given = (self.weight.view(mx.uint32), self.scales, self.biases)
        return mx.quantized_matmul(x, *given, group_size=self.packing.group, bits=self.packing.bits)

    def part(self, which: slice | int) -> PackedWeights:
        """Some outputs' weights, or one expert's."""
        return replace(self, weight=self.weight[which], scales=self.scales[which], biases=self.biases[which])

    def unpacked(self, dtype: mx.Dtype) -> mx.array:
        """[outputs, columns], as numbers of this format."""
        scales, biases = self.scales.astype(dtype), self.biases.astype(dtype)
        given = (self.weight.view(mx.uint32), scales, biases)
        return mx.dequantize(*given, group_size=self.packing.group, bits=self.packing.bits)

    def __str__(self) -> str:
        size = f"{self.outputs}x{self.columns} of {self.packing.bits} bits in groups of {self.packing.group}"
        return size if self.experts is None else f"{self.experts} experts of {size}"


class PackedProduct:
    """Multiplies by the weights of one kind of layers."""

    def __init__(self, run: Launcher, packing: Packing, dtype: mx.Dtype, tuning: Tuning = TUNING) -> None:
        """Raises ValueError for what there is no kernel for."""
        if (reason := packing.unsupported()) is not None:
            raise ValueError(reason)
        if dtype not in DTYPES:
            raise ValueError(f"{dtype}: there are kernels for {', '.join(map(str, DTYPES))}")
        self._run, self._packing, self._dtype, self._tuning = run, packing, dtype, tuning
        self._works: dict[tuple[str, int, int, int], Work] = {}  # by form, rows, outputs and groups of columns

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

    def by(self, run: Launcher) -> PackedProduct:
        """The same, launched otherwise."""
        other = copy(self)
        other._run = run
        return other

    def gather(self, x: mx.array, weights: PackedWeights, chosen: mx.array) -> mx.array:
        """x [rows, columns] times the weights of experts chosen [products] (int32), as many of them for each row:
        [products, outputs]. Bits are those of a product with that expert's weights alone."""
        given = [mx.contiguous(x), *weights.inputs, mx.contiguous(chosen)]
        return self._launched("gather", given, chosen.shape[0])

    def _launched(self, name: str, inputs: list[mx.array], rows: int, parts: int = 1) -> mx.array:
        *_, outputs, groups = inputs[2].shape
        work = self._works.get((name, rows, outputs, groups))
        if work is None:  # once a shape: choosing is most of Python's part of a launch
            work = self._works[name, rows, outputs, groups] = self._work(name, rows, outputs, groups, parts)
        [y] = self._run(packed_kernel(name), inputs, work)
        return y

    def _work(self, name: str, rows: int, outputs: int, groups: int, parts: int) -> Work:
        eights = 1 if rows <= 8 or name == "gather" else 2
        lots = rows if name == "gather" else -(-rows // (eights * 8))
        cut = self._tuning.cut_of(self._packing.bits, self._packing.group, outputs, eights)
        return Work(
            self._template(groups, eights, cut),
            (lots * -(-outputs // (cut.tiles * 16)), 1, 1),
            cut.warps * 32,
            (Output((rows, outputs // parts), self._dtype),),
        )

    def _template(self, groups: int, eights: int, cut: Cut) -> Template:
        bits, group = self._packing.bits, self._packing.group
        depth, aligned = cut.depth_of(bits, group), groups % cut.depth_of(bits, group) == 0
        copied = aligned and cut.copies_factors(bits, group, self._dtype.size)
        return (
            *(("T", self._dtype), ("BITS", bits), ("GROUP", group), ("EIGHTS", eights), ("TILES", cut.tiles)),
            *(("WARPS", cut.warps), ("DEPTH", depth), ("STAGES", cut.stages), ("ALIGNED", aligned)),
            *(("PIECES", in_pieces(bits, group, groups, depth)), ("AHEAD", cut.ahead), ("COPIED", copied)),
        )


def packed_product(device: Device, packing: Packing, dtype: mx.Dtype) -> PackedProduct:
    """Raises ValueError where there is none."""
    run = launcher(device)
    if run is None:
        raise ValueError(f"no kernels for {device.name}")
    return PackedProduct(run, packing, dtype)
