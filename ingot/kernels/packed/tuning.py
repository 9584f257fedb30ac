"""How products are cut: what is fastest, never what is right.

How many warps there are decides in which order a product is summed; nothing here depends on how many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    warps: int  # of a group of threads: columns are dealt out to them
    tiles: int  # of sixteen outputs that a warp multiplies by
    stretch: int  # bits of a row of weights that a warp fetches at once
    early: bool = False  # activations are fetched with the weights that they meet

    def depth(self, bits: int, group: int) -> int:
        """Groups of columns of a stretch."""
        return max(1, min(8, self.stretch // (bits * group)))


TUNING = Tuning(warps=8, tiles=2, stretch=512)
