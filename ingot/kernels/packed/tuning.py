"""How products are cut: what is fastest, never what is right.

Warps and stretches decide in which order a product is summed, so they depend on its columns alone. How many outputs and
groups of columns are fetched at once changes no bits, and depends on what a thread has registers for.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Cut:
    tiles: int  # of sixteen outputs that a warp multiplies by
    fetch: int  # bits of a row of weights that a warp fetches at once
    early: bool = False  # activations are fetched with the weights that they meet


@dataclass(frozen=True, slots=True)
class Tuning:
    warps: int = 8  # of a group of threads: stretches of columns are dealt out to them
    stretch: int = 1024  # bits of a row of weights, where there are columns enough for all warps
    wide: int = 8192  # outputs from which on there are groups of threads enough for `many` outputs each
    few: tuple[Cut, Cut] = field(default=(Cut(1, 1024), Cut(1, 512)))  # for up to eight rows, and for more
    many: tuple[Cut, Cut] = field(default=(Cut(2, 512), Cut(2, 256)))

    def groups(self, bits: int, group: int, groups: int) -> int:
        """Groups of columns of a stretch, of so many in all: a power of two."""
        most = max(1, min(8, self.stretch // (bits * group), groups // self.warps))
        return 1 << (most.bit_length() - 1)

    def cut(self, outputs: int, eights: int) -> Cut:
        return (self.many if outputs >= self.wide else self.few)[eights - 1]


TUNING = Tuning()
