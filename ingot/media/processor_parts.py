"""What the image processors of all families are made of: the files of a checkpoint that state them, and the arithmetic
of sizes and arrangements of tiles that several share. Imports nothing heavy.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from ingot.errors import BadMedia, ModelError, Unsupported
from ingot.media import bounds
from ingot.media.layout import (
    ImageLayoutOptions,
    Layout,
    MediaKind,
    Placeholder,
    Size,
    VideoHeader,
    VideoLayoutOptions,
)

ConfigObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    config: ConfigObject = field(default_factory=dict)
    image_config: ConfigObject = field(default_factory=dict)
    video_config: ConfigObject = field(default_factory=dict)
    processor: ConfigObject = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> ProcessorFiles:
        processor = _read_json_file(folder / "processor_config.json")
        return cls(
            _read_json_file(folder / "config.json"),
            processor.get("image_processor") or _read_json_file(folder / "preprocessor_config.json"),
            processor.get("video_processor") or _read_json_file(folder / "video_preprocessor_config.json"),
            processor,
        )

    @property
    def family(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def vision(self) -> ConfigObject:
        found = self.config.get("vision_config")
        return found if isinstance(found, Mapping) else {}


def config_side(stated: ConfigObject, name: str, fallback: int) -> int:
    """A side that is stated as a number, or as an object that names its sides."""
    side = stated.get(name, fallback)
    if isinstance(side, Mapping):
        side = side.get("longest_edge") or side.get("height") or side.get("shortest_edge") or fallback
    return int(side)


def _read_json_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path.name} is not valid JSON.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path.name} is not a JSON object.")
    return found


class ImagesOnly(ABC):
    __slots__ = ()

    FAMILY: ClassVar[str]
    PLACEHOLDER: ClassVar[str]

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        return {"image": Placeholder(self.PLACEHOLDER, self.PLACEHOLDER)}

    def image_layout(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        for name in ("min_pixels", "max_pixels"):
            if getattr(layout_options, name) is not None:
                raise Unsupported(
                    f"{name} is not supported: {self.FAMILY} has its own rule for resizing images. Leave it out.",
                    param=name,
                )
        return self._image(size, layout_options)

    @abstractmethod
    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout: ...

    def video_layout(self, header: VideoHeader, layout_options: VideoLayoutOptions) -> Layout:
        raise Unsupported("The served model does not take video, only its frames as images.")


@dataclass(frozen=True, slots=True)
class PixelRange:
    """The range of pixels that an image is resized to."""

    least: int
    most: int

    @classmethod
    def stated(cls, stated: ConfigObject, least: int, most: int) -> PixelRange:
        """`size` has areas under the names of edges; older files have min_pixels and max_pixels."""
        size = stated.get("size") or {}
        low = stated.get("min_pixels") or size.get("shortest_edge") or least
        high = stated.get("max_pixels") or size.get("longest_edge") or most
        return cls(int(low), int(high))

    def limited(self, least: int | None, most: int | None) -> PixelRange:
        """With a request's limits. It may ask for fewer pixels than the model would use, but not for more."""
        high = self.most if most is None else min(most, self.most)
        low = self.least if least is None else max(least, 1)
        return PixelRange(min(low, high), high)


def fit_to_pixels(size: Size, unit: int, allowed: PixelRange, count: int = 1, rounded: int = 1) -> Size:
    """The nearest size whose sides are multiples of `unit` and whose area, times `count` frames, is allowed."""
    if size.aspect > bounds.ASPECT:
        raise BadMedia(f"the longer side is more than {bounds.ASPECT} times the shorter. Crop it.")
    fitted = Size(*(round(side / unit) * unit for side in size))
    if rounded * fitted.area > allowed.most:
        shrink = math.sqrt(count * size.area / allowed.most)
        return Size(*(max(unit, math.floor(side / shrink / unit) * unit) for side in size))
    if rounded * fitted.area < allowed.least:
        grow = math.sqrt(allowed.least / (count * size.area))
        return Size(*(math.ceil(side * grow / unit) * unit for side in size))
    return fitted


@lru_cache(maxsize=256)
def nearest_arrangement(size: Size, side: int, tiles: tuple[int, int]) -> tuple[int, int]:
    """The columns and rows of tiles of this `side` whose aspect ratio is nearest to the image's. Of equally near ones,
    the largest that the image fills by half."""
    aspect = size.width / size.height
    best, nearest = (1, 1), float("inf")
    for columns, rows in _arrangements(tiles):
        off = abs(aspect - columns / rows)
        fills = size.area > 0.5 * side * side * columns * rows
        if off < nearest or (off == nearest and fills):
            best, nearest = (columns, rows), off
    return best


@lru_cache(maxsize=16)
def _arrangements(tiles: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    least, most = tiles
    every = ((columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1))
    return tuple(sorted((each for each in every if each[0] * each[1] >= least), key=lambda each: each[0] * each[1]))
