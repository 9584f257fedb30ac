"""What a model that sees says of media, before any pixel is unpacked: its own processor's rules, as arithmetic."""

from __future__ import annotations

from typing import Protocol

from ingot.media.layout import ClipHeader, ClipWish, Layout, MediaKind, PictureWish, Placeholder
from ingot.media.size import Size


class Processor(Protocol):
    """Frozen, and equal to another of the same rules: `repr` of one names them all, for keys of what is computed.

    Any thread may ask. A wish that the family has no rule for raises Unsupported, which names it.
    """

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        """What is written for each kind that the model takes; it takes no others."""

    def picture(self, size: Size, wish: PictureWish) -> Layout: ...

    def clip(self, header: ClipHeader, wish: ClipWish) -> Layout:
        """Only of models that take clips as such."""
