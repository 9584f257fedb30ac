"""How products are cut: what is fastest, never what is right.

Warps and stretches decide in which order a product is summed, so they depend on its columns alone. How many outputs and
groups of columns are fetched at once changes no bits: as many as let two groups of eight warps have their registers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    tiles: int  # of sixteen outputs that a warp multiplies by
    fetch: int  # bits of a row of weights that a warp fetches at once, if they are of four bits or more


@dataclass(frozen=True, slots=True)
class Tuning:
    warps: int = 8  # of a group of threads: stretches of columns are dealt out to them
    stretch: int = 1024  # bits of a row of weights, where there are columns enough for all warps
    wide: int = 8192  # outputs from which on there are groups of threads enough for `many` outputs each
    few: tuple[Cut, Cut] = (Cut(1, 512), Cut(1, 256))  # for up to eight rows, and for more
    many: tuple[Cut, Cut] = (Cut(2, 512), Cut(2, 256))

    def stretch_of(self, bits: int, group: int, groups: int) -> int:
        """Groups of columns of a stretch, of so many in all."""
        return _power(min(self.stretch // (max(bits, 4) * group), groups // self.warps))

    def cut_of(self, bits: int, group: int, outputs: int, eights: int) -> Cut:
        cut = self.many[eights - 1]
        return cut if outputs >= self.wide and (eights == 1 or bits * group <= cut.fetch) else self.few[eights - 1]

    def depth_of(self, bits: int, group: int, stretch: int, cut: Cut) -> int:
        """Groups of columns that are fetched at once."""
        return _power(min(cut.fetch // (max(bits, 4) * group), stretch))


def _power(most: int) -> int:
    """Of two, that is not larger."""
    return 1 << (max(1, most).bit_length() - 1)


TUNING = Tuning()
