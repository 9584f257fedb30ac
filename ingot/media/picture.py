"""A picture as it was sent: its file, and what its header says. Unpacked only when somebody asks for its pixels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from ingot.media.guard import check_bytes
from ingot.media.headers.header import PictureHeader
from ingot.media.headers.reader import picture_header
from ingot.media.size import Size

if TYPE_CHECKING:
    from ingot.media.decoding import Pixels


@dataclass(frozen=True, slots=True)
class Picture:
    data: bytes = field(repr=False)
    header: PictureHeader
    digest: bytes  # of the file

    @classmethod
    def of(cls, data: bytes) -> Picture:
        """Raises BadMedia for what is no picture, or too much of one, without unpacking it."""
        check_bytes(len(data))
        return cls(data, picture_header(data), blake2b(data, digest_size=32).digest())

    @property
    def size(self) -> Size:
        """As it is shown."""
        return self.header.shown

    def frames(self) -> Iterator[Pixels]:
        """The one that it has. Raises BadMedia where the file is damaged behind its header."""
        from ingot.media.decoding import picture_pixels

        yield picture_pixels(self.data, self.header)
