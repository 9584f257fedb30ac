"""How the kernels are cut, per device: what is fastest, never what is right.

None of it depends on how many rows or queries there are, but `part`, which changes no bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from ingot.kernels.device import DeviceKind

SLABS = (4, 12)
"""So many slabs of keys, and as many of values, a kernel is compiled for where memory has to be an input to be there at
all. Metal takes 31 buffers in all."""
QUERIES = (16, 32, 64)
"""Of a row, over one head of keys, that a group of threads attends for by matrix units: tiles of sixteen."""
_LARGE = 128
"""Heads that are larger leave no registers for the most of them."""
_UNIT = 64
"""Places that lie one behind another, whatever a page is."""
_SHARED = 48 * 1024
"""Bytes of memory that a group's threads may share without asking for more."""


@dataclass(frozen=True, slots=True)
class Matrix:
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
class Tuning:
    stretch: int  # places that a group of threads looks at
    warps: int  # in a group
    most: int  # queries that a group attends for, in registers
    run: int  # values one behind another that a thread adds up: as many at once as it has registers for, 4 or 8
    matrix: Matrix | None = None  # for numbers of 16 bits: CUDA's alone
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

    def stretch_of(self, dtype: mx.Dtype, size: int) -> int:
        """Places that a group of threads looks at, with heads of that size."""
        large = self.matrix.large if self.matrix is not None and dtype.size == 2 and size > _LARGE else None
        return self.stretch if large is None else large

    def part(self, queries: int, dtype: mx.Dtype, size: int) -> tuple[int, int]:
        """Queries a group, when there are so many in all with heads of that size, and keys that a thread looks at, at
        once."""
        if self.matrix is not None and dtype.size == 2:
            parts = QUERIES if size <= _LARGE else QUERIES[:-1]
            return next((part for part in parts if part >= queries), parts[-1]), 8
        groups = -(-queries // self.most)
        part = -(-queries // groups)
        return part, self.run if part <= 4 and dtype.size == 2 else 4


TUNINGS: dict[DeviceKind, Tuning] = {
    "cuda": Tuning(stretch=512, warps=4, most=8, run=8, matrix=Matrix(piece=8192, slots=5, large=1024), prompts=4),
    "metal": Tuning(stretch=512, warps=4, most=4, run=4, slabs=SLABS),  # a thread has half as many registers there
}


def choices(kind: DeviceKind) -> tuple[Tuning, ...]:
    """What to try there, one after another: older devices of CUDA lack what the first need."""
    best = TUNINGS[kind]
    return tuple(dict.fromkeys((best, replace(best, prompts=0), replace(best, prompts=0, matrix=None))))
