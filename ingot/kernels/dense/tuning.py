"""How products are cut: what is fastest, never what is right.

`spans` decides in which order a product is summed, whatever its outputs and rows. All the rest changes no bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

LINE = 64
"""Columns that spans are multiples of: what memory gives at once."""
WIDTHS = (8, 16, 32)
"""Rows that a kernel multiplies at most."""


@dataclass(frozen=True, slots=True)
class Cut:
    """For few rows: weights go to registers."""

    warps: int  # that share the columns
    tiles: int  # of sixteen outputs
    depth: int  # stages of weights that are on their way to a warp

    split: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"registers for {self.depth}, {self.warps} warps, {self.tiles} tiles"

    @property
    def outputs(self) -> int:
        """Of a group of threads."""
        return self.tiles * 16


@dataclass(frozen=True, slots=True)
class Stream:
    """For rows that are many: weights and activations pass through shared memory, by copies."""

    warps: int  # that take other outputs each
    tiles: int  # of sixteen outputs that a warp multiplies by
    stages: int  # in shared memory, of which all but one are on their way
    split: int = 1  # groups of threads that share the columns; what they found is joined by a second kernel

    def __str__(self) -> str:
        return f"stream of {self.stages}, {self.warps} warps/{self.split}, {self.tiles} tiles"

    @property
    def outputs(self) -> int:
        """Of a group of threads."""
        return self.warps * self.tiles * 16

    def lent(self, width: int) -> int:
        """Bytes of shared memory that so many rows take."""
        return self.stages * (self.outputs + width) * LINE * 2


@dataclass(frozen=True, slots=True)
class Tuning:
    """A cut for each of the widths: where outputs are fewer than `wide`, and elsewhere."""

    spans: int = 8  # that columns are cut into
    wide: int = 8192
    few: tuple[Cut | Stream, ...] = (Cut(8, 1, 2), Cut(8, 1, 2), Stream(4, 2, 4, split=8))
    many: tuple[Cut | Stream, ...] = (Cut(8, 1, 2), Cut(8, 1, 2), Stream(8, 1, 4))

    def cut_of(self, outputs: int, width: int) -> Cut | Stream:
        return (self.many if outputs >= self.wide else self.few)[WIDTHS.index(width)]


TUNING = Tuning()
_IN_REGISTERS = (Cut(8, 1, 2), Cut(8, 1, 2), Cut(8, 2, 2))
CHOICES = (TUNING, Tuning(few=_IN_REGISTERS, many=_IN_REGISTERS))
"""The fastest first; the other ones' bits are the same."""
