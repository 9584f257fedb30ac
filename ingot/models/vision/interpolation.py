"""Resizing of numbers, where a family's processor does not leave it to Pillow."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ingot.media.size import Size
from ingot.models.vision.tower import PixelArray

_SHARPNESS: Final = -0.75


def bicubic(frame: PixelArray, size: Size) -> PixelArray:
    """[height, width, channels], each new number of four by four old ones, however much smaller it becomes: as torch's
    interpolate has it."""
    for axis, length in ((0, size.height), (1, size.width)):
        frame = _along(frame, axis, length)
    return frame


def _along(frame: PixelArray, axis: int, length: int) -> PixelArray:
    old = frame.shape[axis]
    at = (np.arange(length, dtype=np.float64) + 0.5) * (old / length) - 0.5
    first = np.floor(at).astype(np.int64)
    beyond = at - first
    shape = [1] * frame.ndim
    shape[axis] = length
    found = np.zeros([length if each == axis else count for each, count in enumerate(frame.shape)], dtype=np.float64)
    for step in range(-1, 3):
        places = np.clip(first + step, 0, old - 1)
        found += np.take(frame, places, axis=axis) * _weight(np.abs(beyond - step)).reshape(shape)
    return found.astype(np.float32)


def _weight(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the number that far away."""
    a = _SHARPNESS
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, far)
