"""A first look at nothing, at load.

What MLX compiles when a tower's operations are first met takes seconds in all. Nobody's stream waits for that here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np

from ingot.media.items import MediaItem
from ingot.media.layout import PictureWish
from ingot.media.picture import BICUBIC, Pixels, Unpacking, View
from ingot.media.processor import Processor
from ingot.media.size import Size
from ingot.models.vision.tower import Tower

SMALL: Final = Size(64, 64)
LONGEST_S: Final = 10.0
"""Of processors, compilers not counted, which run by themselves on CPUs. A tower's layers are alike: where the smallest
picture takes longer, the rest of it compiles little more."""


@dataclass(frozen=True, slots=True)
class _Grey:
    size: Size = SMALL

    def unpacking(self, views: Sequence[View]) -> Unpacking:
        return Unpacking(0, 0, self.size)

    def frames(self, *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        for view in views or ((self.size,),):
            width, height = view[-1]
            yield np.full((height, width, 3), 127, dtype=np.uint8)


def rehearse(tower: Tower, processor: Processor) -> None:
    """Look at a small grey picture, or at as much of it as there is time for. For the engine's thread."""
    layout = processor.picture(SMALL, PictureWish())
    runs = ((0, layout.features),)
    end = time.process_time() + LONGEST_S
    for made in tower.look(tower.pixels(MediaItem("image", b"", runs, layout, _Grey())), layout):
        mx.eval(*made)
        if time.process_time() > end:
            return
