"""A vision tower behind one face: a picture or a clip in, features that stand where its tokens do out.

A family is a file beside this one with a class that has this face, and a line in `registry`. What a tower is given is
an item of a request; what it says of one depends on the item's layout alone until pixels are asked for, so that memory
is known from headers.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ingot.media.items import MediaItem
from ingot.media.layout import Layout
from ingot.media.picture import View
from ingot.media.size import Size

PixelArray = NDArray[np.float32]
"""What a tower takes: the family says in which shape. Its first axis counts patches or tiles."""

PositionArray = NDArray[np.int32]
"""[3, tokens]"""

Slices = Generator[Sequence[mx.array], None, "Features"]
"""The work of a tower in slices: each yields what is to be evaluated before the next, and the last returns features."""


@dataclass(frozen=True, slots=True)
class Features:
    """What a model is shown of one picture or clip, in the order of its places."""

    embeddings: mx.array  # [features, hidden size]; stand where embeddings of tokens would
    deep: tuple[mx.array, ...] = ()  # the same shape; each is added behind one of the model's first layers

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.embeddings, *self.deep)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class LookBytes:
    """What looking at an item takes in memory, at most: while the tower runs, pixels and work; afterwards features."""

    pixels: int
    work: int
    features: int

    @property
    def peak(self) -> int:
        return self.pixels + self.work + self.features


class Tower(Protocol):
    """`views`, `pixels`, `needs` and `positions` are for any thread; `look` is for the engine's alone."""

    @property
    def modules(self) -> Sequence[Any]:
        """mlx modules that hold its weights."""

    @property
    def deep(self) -> int:
        """Behind how many of the model's first layers features are added."""

    @property
    def axes(self) -> tuple[int, ...] | None:
        """By which of three axes of positions each of the model's rotary frequencies turns; None: positions of the
        model's tokens are plain numbers."""

    @property
    def mutual(self) -> bool:
        """Whether the tokens of a run all see each other, those behind them too."""

    def positions(self, length: int, items: Sequence[MediaItem]) -> PositionArray | None:
        """Where each of a prompt's tokens stands. None where `axes` is."""

    def views(self, size: Size, layout: Layout) -> Sequence[View]:
        """What a worker makes of each frame, which is of this size."""

    def pixels(self, item: MediaItem) -> PixelArray:
        """Its frames resized, normalised and cut as the family's own processor does. Raises BadMedia."""

    def look(self, pixels: PixelArray, layout: Layout) -> Slices:
        """Features of what `pixels` gave for an item of this layout."""

    def needs(self, layout: Layout) -> LookBytes: ...
