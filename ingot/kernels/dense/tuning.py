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
    columns: int = LINE  # of a stage: as many, or half of them
    slots: int = 0  # stages of activations in shared memory; registers have them where it is none
    split: int = 1  # groups of threads that share the columns first; what they found is joined by a second kernel

    def __str__(self) -> str:
        near = f"{self.slots} slots" if self.slots else "registers"
        return (
            f"{self.sharers}x{self.beside} warps/{self.split}, {self.tiles} tiles, {self.depth}x{self.columns}, {near}"
        )

    @property
    def warps(self) -> int:
        """Of a group of threads."""
        return self.sharers * self.beside

    @property
    def outputs(self) -> int:
        """Of a group of threads."""
        return self.beside * self.tiles * 16


@dataclass(frozen=True, slots=True)
class Stream:
    """A cut for rows that are many: weights and activations pass through shared memory, by copies."""

    warps: int  # that take other outputs each
    tiles: int  # of sixteen outputs that a warp multiplies by
    stages: int  # in shared memory, of which all but one are on their way
    columns: int = LINE  # of a stage: as many, or half of them
    split: int = 1  # groups of threads that share the columns; what they found is joined by a second kernel

    def __str__(self) -> str:
        return f"stream of {self.stages}x{self.columns}, {self.warps} warps/{self.split}, {self.tiles} tiles"

    @property
    def outputs(self) -> int:
        """Of a group of threads."""
        return self.warps * self.tiles * 16

    def lent(self, width: int) -> int:
        """Bytes of shared memory that so many rows take."""
        return self.stages * (self.outputs + width) * self.columns * 2


@dataclass(frozen=True, slots=True)
class Tuning:
    """A cut for each of the widths: where outputs are fewer than `wide`, and elsewhere."""

    spans: int = 8  # that columns are cut into
    wide: int = 8192
    few: tuple[Cut | Stream, ...] = (Cut(8, 1, 1, 2), Cut(8, 1, 1, 2), Cut(8, 1, 2, 2), Cut(4, 2, 1, 4, 32, 2))
    many: tuple[Cut | Stream, ...] = (Cut(8, 1, 1, 2), Cut(8, 1, 1, 2), Cut(2, 4, 1, 2, 64, 4), Cut(1, 8, 1, 4, 64, 4))

    def cut_of(self, outputs: int, width: int) -> Cut | Stream:
        return (self.many if outputs >= self.wide else self.few)[WIDTHS.index(width)]


TUNING = Tuning()
CHOICES = (TUNING, Tuning(many=TUNING.few))
"""The fastest first; the other ones' bits are the same."""
