"""How the kernels are cut, per device: what is fastest, never what is right.

None of it depends on how many rows or queries there are, but `part`, which changes no bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ingot.kernels.device import DeviceKind

SLABS = (4, 12)
"""So many slabs of keys, and as many of values, a kernel is compiled for where memory has to be an input to be there at
all. Metal takes 31 buffers in all."""


@dataclass(frozen=True, slots=True)
class Tuning:
    stretch: int  # places that a group of threads looks at
    warps: int  # in a group
    most: int  # queries that a group attends for, in registers
    run: int  # values one behind another that a thread adds up: as many at once as it has registers for, 4 or 8

    slabs: tuple[int, ...] = ()  # so many a kernel takes as inputs, a kernel for each; none: it finds any by address
    matrix: bool = False  # numbers of 16 bits are multiplied by matrix units, sixteen queries at once: CUDA's alone

    def taken(self, slabs: int) -> int:
        """How many slabs the kernel for so many takes as inputs; 0 where it finds them by their addresses. Raises
        ValueError where there are too many."""
        if not self.slabs:
            return 0
        if slabs > self.slabs[-1]:
            raise ValueError(f"{slabs} slabs: kernels take at most {self.slabs[-1]}")
        return next(count for count in self.slabs if count >= slabs)

    def part(self, queries: int, dtype: mx.Dtype) -> tuple[int, int]:
        """Queries a group, when there are so many in all, and keys that a thread looks at, at once."""
        if self.matrix and dtype.size == 2:
            return 16, 8
        groups = -(-queries // self.most)
        part = -(-queries // groups)
        return part, self.run if part <= 4 and dtype.size == 2 else 4


TUNINGS: dict[DeviceKind, Tuning] = {
    "cuda": Tuning(stretch=512, warps=4, most=8, run=8),  # the best of many, on an H200
    "metal": Tuning(stretch=512, warps=4, most=4, run=4, slabs=SLABS),  # a thread has half as many registers there
}

MATRIX = Tuning(stretch=256, warps=4, most=8, run=8, matrix=True)
"""For CUDA: what several queries a row are to be measured with. Sixteen queries share memory: stretches are shorter."""
