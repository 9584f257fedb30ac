"""Wishes that a family has no rule for are refused by name."""

from __future__ import annotations

from ingot.errors import Unsupported
from ingot.media.layout import PictureWish


def refuse_pixels(wish: PictureWish, family: str) -> None:
    for name in ("min_pixels", "max_pixels"):
        if getattr(wish, name) is not None:
            raise Unsupported(
                f"{name} is not supported: {family} resizes every picture by a rule of its own. Leave it out.",
                param=name,
            )
