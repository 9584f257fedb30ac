"""What a layer's attention looks like, how its pages lie in fewer bits, and how the kernels are cut for that, per
device.

The cut is what is fastest, never what is right. None of it depends on how many rows or queries there are, but `part`,
which changes no bits.
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
"""Of heads in fewer bits: a warp has a whole value's sums in its registers."""
PAGE_SIZES = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a layer's attention looks like."""

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
    """Keys or values of a page in fewer bits: codes of 4 or 8 bits, and how many groups of a vector's numbers have a
    step and a least of their own; none: they are rotated, and have levels."""

    bits: int
    groups: int
    codes: int  # where they begin
    scales: int


@dataclass(frozen=True, slots=True)
class CodedShape:
    """How a head's page lies in fewer bits (`cache/coded_pages.py`)."""

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
    """A layer's slabs of pages in fewer bits, as the kernel takes them: their shape, its constants, their addresses."""

    shape: CodedShape
    constants: mx.array
    addresses: mx.array


SLAB_INPUTS = (4, 12)
"""So many slabs of keys, and as many of values, a kernel is compiled for where memory has to be an input to be there at
all. Metal takes 31 buffers in all."""
QUERY_TILES = (16, 32, 64)
"""Of a row, over one head of keys, that a group of threads attends for by matrix units: tiles of sixteen."""
_LARGE = 128
"""Heads that are larger leave no registers for the most of them."""
_UNIT = 64
"""Places that lie one behind another, whatever a page is."""
_SHARED = 48 * 1024
"""Bytes of memory that a group's threads may share without asking for more."""


@dataclass(frozen=True, slots=True)
class MatrixTuning:
    """How keys and values come to CUDA's matrix units."""

    piece: int  # bytes of keys or values that are multiplied at once
    slots: int  # for pieces in shared memory, at most: all but one are on their way
    large: int | None = None  # places that a group of threads looks at with heads larger than 128, if not as many
    coded: int = 16  # keys in fewer bits that a warp takes at once: 16, 32 or 64

    def keys(self, size: int) -> int:
        """In a piece, with heads of that size: 32, or 64."""
        return _UNIT if 2 * size * _UNIT <= self.piece else _UNIT // 2

    def slots_for(self, size: int, part: int, stretch: int) -> int:
        """As many as there is memory for, beside weights, what warps tell each other and addresses of pages."""
        keys = self.keys(size)
        beside = part * (16 * (keys // 8 | 1) + 20) + stretch // _UNIT * 16
        return min(self.slots, (_SHARED - beside) // (keys * 16 * (size // 8 | 1)))


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    stretch: int  # places that a group of threads looks at
    warps: int  # in a group
    most: int  # queries that a group attends for, in registers
    run: int  # values one behind another that a thread adds up: as many at once as it has registers for, 4 or 8
    matrix: MatrixTuning | None = None  # for numbers of 16 bits: CUDA's alone
    slabs: tuple[int, ...] = ()  # so many a kernel takes as inputs, a kernel for each; none: it finds any by address
    prompts: int = 0  # warps in a group that attends for many queries, sixteen each, by matrix units; 0: it is not done

    def taken(self, slabs: int) -> int:
        """How many slabs the kernel for so many takes as inputs; 0 where it finds them by their addresses. Raises
        ValueError where there are too many."""
        if not self.slabs:
            return 0
        if slabs > self.slabs[-1]:
            raise ValueError(f"{slabs} slabs: kernels take at most {self.slabs[-1]}")
        return next(count for count in self.slabs if count >= slabs)

    def kv_split_size(self, dtype: mx.Dtype, size: int) -> int:
        """Places that a group of threads looks at, with heads of that size."""
        large = self.matrix.large if self.matrix is not None and dtype.size == 2 and size > _LARGE else None
        return self.stretch if large is None else large

    def part(self, queries: int, dtype: mx.Dtype, size: int) -> tuple[int, int]:
        """Queries a group, when there are so many in all with heads of that size, and keys that a thread looks at, at
        once."""
        if self.matrix is not None and dtype.size == 2:
            parts = QUERY_TILES if size <= _LARGE else QUERY_TILES[:-1]
            return next((part for part in parts if part >= queries), parts[-1]), 8
        groups = -(-queries // self.most)
        part = -(-queries // groups)
        return part, self.run if part <= 4 and dtype.size == 2 else 4


TUNINGS: dict[DeviceKind, AttentionTuning] = {
    "cuda": AttentionTuning(
        stretch=512, warps=4, most=8, run=8, matrix=MatrixTuning(piece=8192, slots=5, large=1024), prompts=4
    ),
    "metal": AttentionTuning(
        stretch=512, warps=4, most=4, run=4, slabs=SLAB_INPUTS
    ),  # a thread has half as many registers there
}


def tuning_choices(kind: DeviceKind) -> tuple[AttentionTuning, ...]:
    """What to try there, one after another: older devices of CUDA lack what the first need."""
    best = TUNINGS[kind]
    return tuple(dict.fromkeys((best, replace(best, prompts=0), replace(best, prompts=0, matrix=None))))
