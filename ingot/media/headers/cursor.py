"""Bytes read from front to back, never beyond their end, and only so many pieces of them."""

from __future__ import annotations

from ingot.media.bounds import HEADER_STEPS


class Damaged(Exception):
    """The bytes are not what their beginning says they are; the message ends the sentence "the file …"."""


class Cursor:
    """How many pieces are taken is bounded: a hostile file may consist of millions of empty ones."""

    def __init__(self, data: bytes, at: int = 0, *, steps: int = HEADER_STEPS) -> None:
        self._data, self.at, self._steps = data, at, steps

    @property
    def left(self) -> int:
        return max(0, len(self._data) - self.at)

    def take(self, count: int) -> bytes:
        self._steps -= 1
        if self._steps < 0:
            raise Damaged("is cut into too many pieces")
        if count > self.left:
            raise Damaged("ends before its header does")
        self.at += count
        return self._data[self.at - count : self.at]

    def skip(self, count: int) -> None:
        """Beyond the end, too: then nothing is left."""
        self.at += count

    def big(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def little(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")
