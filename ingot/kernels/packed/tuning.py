"""How products are cut: what is fastest, never what is right. None of it depends on how many rows there are, so that none
of a row's bits do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    warps: int  # of a group of threads: columns are dealt out to them
    wide: int  # outputs from which on a group takes two tiles of sixteen
    stretch: int  # bits of a row of weights that a warp fetches at once

    def tiles(self, outputs: int) -> int:
        return 2 if outputs >= self.wide else 1

    def depth(self, bits: int, group: int) -> int:
        """Groups of columns of a stretch."""
        return max(1, min(8, self.stretch // (bits * group)))


TUNING = Tuning(warps=8, wide=4096, stretch=512)
