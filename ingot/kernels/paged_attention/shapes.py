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

MOST_SIZE = 576
"""Of a key that queries see: a latent of 512 and 64 numbers that are rotated."""
MOST_VALUE = 512
MOST_GROUP = 128
_LARGEST = 256
"""Of heads, for most kernels with matrix units."""
MOST_CODED = 128
"""The largest coded head: a warp has the sums of a whole value in its registers."""
PAGE_SIZES = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of a layer's attention. Where it is `latent`, pages store latents as keys and what is rotated as
    values: a key is both, one behind the other, and values are the latents."""

    heads: int
    kv_heads: int
    key_size: int  # as pages store them
    value_size: int
    page: int = 64
    latent: bool = False

    @property
    def query_size(self) -> int:
        return self.key_size + self.value_size if self.latent else self.key_size

    @property
    def output_size(self) -> int:
        return self.key_size if self.latent else self.value_size

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def large(self) -> bool:
        """Whether matrix units take it by a kernel of its own (`attend_large`)."""
        return self.latent or max(self.key_size, self.value_size) > _LARGEST

    def unsupported(self) -> str | None:
        """Why there is no kernel for it; None where there is one."""
        sizes = (self.key_size, self.value_size)
        if (
            any(size % 16 or size <= 0 for size in sizes)
            or self.query_size > MOST_SIZE
            or self.output_size > MOST_VALUE
        ):
            return (
                f"heads of {self.query_size} and {self.output_size}: sizes are multiples of 16 up to {MOST_SIZE} and "
                f"{MOST_VALUE}"
            )
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


class KVSplits(NamedTuple):
    """The pieces that a row's keys and values are cut into (`source/kv_splits.h`): the first eight have `size` tokens,
    and where they `grow` the next eight have twice as many, and all others four times as many. They depend on nothing
    but a token's place."""

    size: int
    grow: bool

    @property
    def most(self) -> int:
        """Tokens of the largest."""
        return 4 * self.size if self.grow else self.size

    def number_at(self, place: int) -> int:
        """Of the split that a token is in."""
        if not self.grow or place < 8 * self.size:
            return place // self.size
        return 4 + place // (2 * self.size) if place < 24 * self.size else 10 + place // (4 * self.size)

    @property
    def template(self) -> KernelTemplate:
        return ("SPLIT", self.size), ("GROW", self.grow)


SLAB_INPUTS = (4, 11)
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
_LENT = 227 * 1024
"""Bytes of all its shared memory, on the devices that have as much."""


@dataclass(frozen=True, slots=True)
class MatrixTuning:
    """How keys and values are loaded for CUDA's matrix units."""

    piece: int  # bytes of keys or values that are multiplied at once
    slots: int  # for pieces in shared memory, at most: all but one are on their way
    largest: int = 64  # tokens of the first KV splits with heads larger than 256, and with latents
    coded: int = 16  # keys in fewer bits that a warp takes at once: 16, 32 or 64

    def keys(self, size: int) -> int:
        """In a piece, with heads of that size: 32, or 64."""
        return _UNIT if 2 * size * _UNIT <= self.piece else _UNIT // 2

    def slots_for(self, size: int, part: int, split: int) -> int:
        """As many as fit into shared memory with weights, partial results and page addresses."""
        keys = self.keys(size)
        used = part * (16 * (keys // 8 | 1) + 20) + split // _UNIT * 16
        return min(self.slots, (_SHARED - used) // (keys * 16 * (size // 8 | 1)))

    @staticmethod
    def large_slots(shape: AttentionShape, part: int) -> tuple[int, int]:
        """The same for `attend_large`, and their bytes: at most three are on their way, of latents, or four."""
        used = part * (4 * 40 * 4 + 5 * 16 + 8)
        slot = 32 * 16 * (max(shape.query_size, shape.output_size) // 8 | 1)
        slots = min(5 if shape.latent else 6, (_LENT - used) // slot)
        return slots, slots * slot


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    split: int  # tokens of the first KV splits, each of which a group of threads reads
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

    def matrix_kernel(self, shape: AttentionShape, dtype: mx.Dtype) -> str | None:
        """The kernel with matrix units that attends for a few queries of a row; None: one without."""
        if self.matrix is None or dtype.size != 2:
            return None
        return "attend_large" if shape.large else "attend_wide"

    def kv_splits(self, shape: AttentionShape, dtype: mx.Dtype, window: int | None) -> KVSplits:
        """Those of a window do not grow, as it may lie anywhere."""
        large = self.matrix is not None and self.matrix_kernel(shape, dtype) == "attend_large"
        first = self.matrix.largest if self.matrix is not None and large else self.split
        if not window:
            return KVSplits(first, True)
        return KVSplits(min(4 * first, max(first, 1 << (max(1, window // 8).bit_length() - 1))), False)

    def part(self, queries: int, shape: AttentionShape, dtype: mx.Dtype) -> tuple[int, int]:
        """Queries of a group, of so many in all over a head of keys, and keys that a thread reads at once."""
        size = max(shape.query_size, shape.output_size)
        if (kernel := self.matrix_kernel(shape, dtype)) is not None:
            parts = QUERY_TILES if size <= _LARGE and kernel == "attend_wide" else QUERY_TILES[:-1]
            return next((part for part in parts if part >= queries), parts[-1]), 8
        most = self.most // 2 if size > _LARGEST else self.most  # a lane holds more of each
        groups = -(-queries // most)
        part = -(-queries // groups)
        return part, self.run if part <= 4 and dtype.size == 2 else 4


TUNINGS: dict[DeviceKind, AttentionTuning] = {
    "cuda": AttentionTuning(split=128, warps=4, most=8, run=8, matrix=MatrixTuning(piece=8192, slots=5), prompts=4),
    "metal": AttentionTuning(
        split=128, warps=4, most=4, run=4, slabs=SLAB_INPUTS
    ),  # a thread has half as many registers there
}


def tuning_choices(kind: DeviceKind) -> tuple[AttentionTuning, ...]:
    """The tunings to try, in order: older CUDA devices lack what the first ones need."""
    best = TUNINGS[kind]
    return tuple(dict.fromkeys((best, replace(best, prompts=0), replace(best, prompts=0, matrix=None))))
