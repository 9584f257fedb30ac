"""Families that take pictures alone: of a clip they are shown frames, as pictures."""

from __future__ import annotations

from ingot.errors import Unsupported
from ingot.media.layout import ClipHeader, ClipWish, Layout


class PicturesOnly:
    __slots__ = ()

    def clip(self, header: ClipHeader, wish: ClipWish) -> Layout:
        raise Unsupported("The served model takes no clips as such: it is shown their frames, as pictures.")
