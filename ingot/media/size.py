"""Width and height, in pixels."""

from __future__ import annotations

from typing import NamedTuple


class Size(NamedTuple):
    width: int
    height: int

    @property
    def area(self) -> int:
        return self.width * self.height

    @property
    def aspect(self) -> float:
        """The longer side over the shorter."""
        return max(self) / min(self)
