"""How products are cut: what is fastest, never what is right.

`spans` decides in which order a product is summed, whatever its outputs and rows. All the rest changes no bits.
"""

from __future__ import annotations

from dataclasses import dataclass

LINE = 64
"""Columns that spans are multiples of: what memory gives at once."""
WIDTHS = (8, 16, 32, 64)
"""Rows that a kernel multiplies at most."""


@dataclass(frozen=True, slots=True)
class Cut:
    sharers: int  # warps that share the columns
    beside: int  # times as many, that take other outputs
    tiles: int  # of sixteen outputs that a warp multiplies by
    depth: int  # stages of weights that are on their way to a warp
    ring: bool = False  # to shared memory, not to registers
    columns: int = LINE  # of a stage: as many, or half of them

    @property
    def turns(self) -> int:
        """Stages that a warp goes through without asking whether there are more."""
        return 2 if self.ring else self.depth

    @property
    def warps(self) -> int:
        """Of a group of threads."""
        return self.sharers * self.beside

    @property
    def outputs(self) -> int:
        """Of a group of threads."""
        return self.beside * self.tiles * 16


@dataclass(frozen=True, slots=True)
class Tuning:
    """A cut for each of the widths: where outputs are fewer than `wide`, and elsewhere."""

    spans: int = 4  # that columns are cut into
    wide: int = 8192
    few: tuple[Cut, ...] = (Cut(4, 1, 1, 4), Cut(4, 1, 1, 4), Cut(4, 2, 1, 3, True), Cut(4, 2, 1, 6, True, 32))
    many: tuple[Cut, ...] = (Cut(4, 1, 2, 2), Cut(4, 1, 2, 2), Cut(4, 2, 2, 3, True, 32), Cut(2, 4, 2, 3, True, 32))

    def cut_of(self, outputs: int, width: int) -> Cut:
        return (self.many if outputs >= self.wide else self.few)[WIDTHS.index(width)]


TUNING = Tuning()
