"""The shape of a layer's attention, the layout of its coded pages, and the kernels' tuning for each device.

Tuning affects speed, never results. None of it depends on the number of rows or queries, except for `part`, which
changes no bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from ingot.kernels.device import DeviceKind
from ingot.kernels.gpu.kernel_source import KernelTemplate

MOST_SIZE = 256
MOST_GROUP = 16
MOST_CODED = 128
"""The largest coded head: a warp has the sums of a whole value in its registers."""
PAGE_SIZES = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of a layer's attention."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    page: int = 64

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def unsupported(self) -> str | None:
        """Why there is no kernel for it; None where there is one."""
        sizes = (self.key_size, self.value_size)
        if any(size % 16 or not 0 < size <= MOST_SIZE for size in sizes):
            return f"heads of {self.key_size} and {self.value_size}: sizes are multiples of 16 up to {MOST_SIZE}"
        if self.heads % self.kv_heads or self.group > MOST_GROUP:
            return f"{self.heads} heads over {self.kv_heads}: at most {MOST_GROUP} share one"
        if self.page not in PAGE_SIZES:
            return f"pages of {self.page}: they may be {', '.join(map(str, PAGE_SIZES))}"
        return None


@dataclass(frozen=True, slots=True)
class CodedSide:
    """The keys or values of a coded page: codes of 4 or 8 bits, and the number of groups of a vector that have their
    own step and minimum; 0: they are rotated, and have levels."""

    bits: int
    groups: int
    codes: int  # where they begin
    scales: int


@dataclass(frozen=True, slots=True)
class CodedShape:
    """The layout of a head's coded page (`cache/coded_pages.py`)."""

    keys: CodedSide
    values: CodedSide
    centre: int
    head_bytes: int
    levels: tuple[float, ...] = ()  # of values that are rotated
    signs: tuple[float, ...] = ()

    def unsupported(self, shape: AttentionShape) -> str | None:
        """Why there is no kernel for it; None where there is one."""
        size = shape.value_size
        if shape.page != 64 or self.keys.bits not in (4, 8) or self.values.bits not in (4, 8) or not self.keys.groups:
            return "pages of 64 tokens are read in codes of 4 or 8 bits, and keys not rotated"
        if shape.key_size % 32 or size * self.values.bits % 256 or max(shape.key_size, size) > MOST_CODED:
            return (
                f"heads of {shape.key_size} and {size} in fewer bits: sizes are multiples of 32, with four bits of "
                f"64, up to {MOST_CODED}"
            )
        if not self.values.groups and (size & (size - 1) or self.values.bits != 4):
            return f"values of {size} that are rotated: sizes are powers of two, and codes have 4 bits"
        return None

    @property
    def template(self) -> KernelTemplate:
        return (
            *(("KEY_BITS", self.keys.bits), ("KEY_GROUPS", self.keys.groups)),
            *(("KEY_CODES_AT", self.keys.codes), ("KEY_SCALES_AT", self.keys.scales)),
            *(("VALUE_BITS", self.values.bits), ("VALUE_GROUPS", self.values.groups)),
            *(("VALUE_CODES_AT", self.values.codes), ("VALUE_SCALES_AT", self.values.scales)),
            *(("CENTRE_AT", self.centre), ("HEAD_BYTES", self.head_bytes)),
        )

    def constants(self, size: int) -> mx.array:
        """Levels and signs, for the kernel."""
        levels, signs = self.levels or (0.0,) * 16, self.signs or (1.0,) * size
        return mx.array([*levels, *signs], mx.float32)


class CodedPages(NamedTuple):
    """A layer's slabs of coded pages, as the kernel takes them: layout, constants and addresses."""

    shape: CodedShape
    constants: mx.array
    addresses: mx.array


SLAB_INPUTS = (4, 12)
"""The numbers of slabs of keys, and as many of values, for which kernels are compiled where memory must be an input.
Metal takes 31 buffers in all."""
QUERY_TILES = (16, 32, 64)
"""Queries of a row, over one head of keys, that a group of threads computes by matrix units: tiles of sixteen."""
_LARGE = 128
"""Larger heads leave no registers for the largest tile."""
_UNIT = 64
"""Tokens that are contiguous in memory, whatever the page size."""
_SHARED = 48 * 1024
"""Bytes of static shared memory of a group of threads."""


@dataclass(frozen=True, slots=True)
class MatrixTuning:
    """How keys and values are loaded for CUDA's matrix units."""

    piece: int  # bytes of keys or values that are multiplied at once
    slots: int  # for pieces in shared memory, at most: all but one are on their way
    large: int | None = None  # places that a group of threads looks at with heads larger than 128, if not as many
    coded: int = 16  # keys in fewer bits that a warp takes at once: 16, 32 or 64

    def keys(self, size: int) -> int:
        """In a piece, with heads of that size: 32, or 64."""
        return _UNIT if 2 * size * _UNIT <= self.piece else _UNIT // 2

    def slots_for(self, size: int, part: int, split: int) -> int:
        """As many as fit into shared memory with weights, partial results and page addresses."""
        keys = self.keys(size)
        used = part * (16 * (keys // 8 | 1) + 20) + split // _UNIT * 16
        return min(self.slots, (_SHARED - used) // (keys * 16 * (size // 8 | 1)))


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    split: int  # tokens of a KV split, which a group of threads reads
    warps: int  # in a group
    most: int  # queries of a group, in registers
    run: int  # consecutive values that a thread sums at once, as it has registers: 4 or 8
    matrix: MatrixTuning | None = None  # for 16-bit numbers: only CUDA
    slabs: tuple[int, ...] = ()  # numbers of slabs that kernels take as inputs; none: any number, by address
    prompts: int = 0  # warps of a group of the prompt kernel, with sixteen queries each, by matrix units; 0: none

    def taken(self, slabs: int) -> int:
        """How many slabs the kernel for so many takes as inputs; 0 where it uses addresses. Raises ValueError where
        there are too many."""
        if not self.slabs:
            return 0
        if slabs > self.slabs[-1]:
            raise ValueError(f"{slabs} slabs: kernels take at most {self.slabs[-1]}")
        return next(count for count in self.slabs if count >= slabs)

    def kv_split_size(self, dtype: mx.Dtype, size: int) -> int:
        """Tokens of a KV split, with heads of that size."""
        large = self.matrix.large if self.matrix is not None and dtype.size == 2 and size > _LARGE else None
        return self.split if large is None else large

    def part(self, queries: int, dtype: mx.Dtype, size: int) -> tuple[int, int]:
        """Queries of a group, of so many in all with heads of that size, and keys that a thread reads at once."""
        if self.matrix is not None and dtype.size == 2:
            parts = QUERY_TILES if size <= _LARGE else QUERY_TILES[:-1]
            return next((part for part in parts if part >= queries), parts[-1]), 8
        groups = -(-queries // self.most)
        part = -(-queries // groups)
        return part, self.run if part <= 4 and dtype.size == 2 else 4


TUNINGS: dict[DeviceKind, AttentionTuning] = {
    "cuda": AttentionTuning(
        split=512, warps=4, most=8, run=8, matrix=MatrixTuning(piece=8192, slots=5, large=1024), prompts=4
    ),
    "metal": AttentionTuning(
        split=512, warps=4, most=4, run=4, slabs=SLAB_INPUTS
    ),  # a thread has half as many registers there
}


def tuning_choices(kind: DeviceKind) -> tuple[AttentionTuning, ...]:
    """The tunings to try, in order: older CUDA devices lack what the first ones need."""
    best = TUNINGS[kind]
    return tuple(dict.fromkeys((best, replace(best, prompts=0), replace(best, prompts=0, matrix=None))))
