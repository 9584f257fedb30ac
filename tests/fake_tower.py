"""A tower that sees nothing, and counts what it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.media.items import MediaItem
from ingot.media.layout import Grid, Layout, Size
from ingot.models.vision.tower import EncodingBytes, EncodingSlices, PixelArray, VisionFeatures

SLICES, FEATURES = 5, 8
NBYTES = 4 * FEATURES
LAYOUT = Layout(Size(32, 32), Grid(1, 2, 2), "?", "?", (FEATURES,))


@dataclass
class FakeTower:
    """Counts what it is asked for. What it sees in a picture is its digest's first byte."""

    deep: int = 0
    axes: None = None
    stand_in: None = None
    bidirectional: bool = False
    modules: Sequence[Any] = ()
    fails: type[Exception] | None = None
    slice_s: float = 0.0  # by the clock that it moves
    now: float = 0.0
    sliced: list[int] = field(default_factory=list)
    unpacked: list[bytes] = field(default_factory=list)

    def positions(self, length: int, items: Sequence[MediaItem]) -> None:
        return None

    def views(self, size: Size, layout: Layout) -> tuple[()]:
        return ()

    def pixels(self, item: MediaItem) -> PixelArray:
        self.unpacked.append(item.digest)
        if self.fails is not None:
            raise self.fails("damaged")
        return np.full((1, 1), item.digest[0] if item.digest else 0, dtype=np.float32)

    def encode(self, pixels: PixelArray, layout: Layout) -> EncodingSlices:
        seen = int(pixels[0, 0])
        for _ in range(SLICES):
            self.sliced.append(seen)
            self.now += self.slice_s
            yield [mx.array(0)]
        return VisionFeatures(mx.full((FEATURES, 1), float(seen)))

    def needs(self, layout: Layout) -> EncodingBytes:
        return EncodingBytes(pixels=100, work=50, features=NBYTES)
