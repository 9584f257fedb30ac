"""What a picture's first bytes say of it, without unpacking anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ingot.media.size import Size

PictureFormat = Literal["png", "jpeg", "webp", "gif", "bmp"]
ANIMATED: Final = "is animated: send one picture, or a clip"


@dataclass(frozen=True, slots=True)
class PictureHeader:
    """`width` and `height` are those of the stored picture; `orientation` says, as EXIF does, how it is turned."""

    format: PictureFormat
    width: int
    height: int
    orientation: int = 1

    @property
    def stored(self) -> Size:
        return Size(self.width, self.height)

    @property
    def shown(self) -> Size:
        """The picture as people see it: orientations from 5 on lie on their side."""
        return Size(self.height, self.width) if self.orientation >= 5 else self.stored
