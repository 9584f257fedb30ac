"""How the kernels are cut, per device: what is fastest, never what is right.

None of it depends on how many rows or queries there are, but `part`, which does not change bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ingot.kernels.device import DeviceKind


@dataclass(frozen=True, slots=True)
class Tuning:
    stretch: int  # places that a group of threads looks at
    warps: int  # in a group
    most: int  # queries that a group attends for, in registers
    unroll: int  # keys that a thread looks at, at once, while it has registers for it

    def part(self, queries: int, dtype: mx.Dtype) -> tuple[int, int]:
        """Queries a group, when there are so many in all, and keys that a thread looks at, at once."""
        groups = -(-queries // self.most)
        part = -(-queries // groups)
        return part, self.unroll if part <= 4 and dtype.size == 2 else 4


TUNINGS: dict[DeviceKind, Tuning] = {
    "cuda": Tuning(stretch=512, warps=4, most=8, unroll=8),  # the best of many, on an H200
    "metal": Tuning(stretch=512, warps=4, most=4, unroll=4),  # a thread has half as many registers there
}
