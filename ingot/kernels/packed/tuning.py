"""How products are cut: what is fastest, never what is right.

Warps and groups of columns that are fetched at once decide in which order a product is summed, so they depend on its
weights alone. How many outputs a group of threads has and how much is on its way change no bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_SHARED = 48 * 1024
"""Bytes of memory that a group's threads may share without asking for more."""
_LEAST_STAGES = 3
_PIECE = 16
"""Bytes that are copied at once."""
_COPIED = (4, 8, 16)
"""And of scales or biases."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Of a product, among groups of threads."""

    warps: int  # of a group of threads: columns are dealt out to them
    tiles: int  # of sixteen outputs
    fetch: int = 64  # bytes of a row of weights that a warp copies at once, in a stage
    stages: int = 3  # at most; all but one are on their way
    ahead: bool = True  # activations of the next columns are fetched while those of some are multiplied

    def depth_of(self, bits: int, group: int) -> int:
        """Groups of columns of a stage."""
        return _power(self.fetch * 8 // (bits * group))

    def fitting(self, bits: int, group: int) -> Cut:
        """This one, or the next smaller one that memory for enough stages is there for."""
        stages = _SHARED // self._stage(bits * group // 8, self.depth_of(bits, group))
        if stages >= min(self.stages, _LEAST_STAGES):
            return replace(self, stages=min(self.stages, stages))
        smaller = replace(self, tiles=self.tiles // 2) if self.tiles > 1 else replace(self, fetch=self.fetch // 2)
        return smaller.fitting(bits, group)

    def copies_factors(self, bits: int, group: int, size: int) -> bool:
        """Whether scales and biases, of so many bytes, come with the weights: where copies can be so small, and there
        is memory for them."""
        depth = self.depth_of(bits, group)
        fits = self.stages * self._stage(bits * group // 8 + 2 * size, depth) <= _SHARED
        return fits and depth * size in _COPIED

    def _stage(self, least: int, depth: int) -> int:
        """Bytes of one stage of all warps, of which a group of columns of an output has so many."""
        return self.warps * self.tiles * 16 * depth * least


@dataclass(frozen=True, slots=True)
class Tuning:
    """For up to eight rows, and for up to sixteen: with as many warps, that fetch as much."""

    wide: int = 8192  # outputs from which on there are groups of threads enough for `many` outputs each
    few: tuple[Cut, Cut] = (Cut(8, 1), Cut(8, 1))
    many: tuple[Cut, Cut] = (Cut(4, 2), Cut(4, 2))

    def cut_of(self, bits: int, group: int, outputs: int, eights: int) -> Cut:
        cuts = self.many if outputs >= self.wide else self.few
        alike = min((cut.fitting(bits, group) for cut in cuts), key=lambda cut: cut.fetch)
        return replace(cuts[eights - 1], fetch=alike.fetch).fitting(bits, group)


def in_pieces(bits: int, group: int, groups: int, depth: int) -> bool:
    """Whether all rows of weights, and all stages of them, begin at multiples of what is copied at once."""
    least = group * bits // 8
    return least % _PIECE == 0 or (least * depth % _PIECE == 0 and groups % depth == 0)


def _power(most: int) -> int:
    """Of two, that is not larger."""
    return 1 << (max(1, most).bit_length() - 1)


TUNING = Tuning()
