"""Frames as towers take them: normalised, as the families' own processors do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ingot.media.families.files import Stated
from ingot.media.picture import BICUBIC, Pixels

if TYPE_CHECKING:
    pass

_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class Normal:
    """How colours become numbers: (value * scale - mean) / deviation, in each channel."""

    scale: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    resample: int = BICUBIC

    @classmethod
    def stated(
        cls, stated: Stated, mean: Sequence[float] = _HALF, deviation: Sequence[float] = _HALF, resample: int = BICUBIC
    ) -> Normal:
        """As a preprocessor's file says, or else as its family's class does."""
        scale = float(stated.get("rescale_factor") or 1 / 255) if stated.get("do_rescale", True) else 1.0
        if not stated.get("do_normalize", True):
            return cls(scale, (0.0,) * 3, (1.0,) * 3, resample)
        return cls(
            scale,
            tuple(map(float, stated.get("image_mean") or mean)),
            tuple(map(float, stated.get("image_std") or deviation)),
            int(stated.get("resample") or resample),
        )

    def __call__(self, frame: Pixels) -> NDArray[np.float32]:
        """[height, width, 3]"""
        mean, deviation = (np.array(each, dtype=np.float32) for each in (self.mean, self.deviation))
        scaled = frame.astype(np.float32) * np.float32(self.scale)
        normal: NDArray[np.float32] = (scaled - mean) / deviation
        return normal
