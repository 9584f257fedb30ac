"""What the engine gets of a picture or a clip beside the prompt's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from ingot.media.layout import Grid, Layout, MediaKind, Placeholder
from ingot.media.picture import BICUBIC, Pixels, Unpacking, View
from ingot.media.size import Size

Span = tuple[int, int]
"""Tokens [begin, end) of a prompt."""


class PixelSource(Protocol):
    """Keeps what was sent, which is small, and has a worker unpack it when it is asked to. Any thread may ask, also
    twice."""

    @property
    def size(self) -> Size:
        """Of a frame, as it is shown."""

    def unpacking(self, views: Sequence[View]) -> Unpacking:
        """What it may take to make these views of a frame."""

    def frames(self, *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        """One after another, each in all views, so that no more than one need be held. Raises BadMedia where the file
        is damaged. What a frame takes is booked until the next is asked for."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A picture or a clip in its place in a conversation, laid out for the served model, and nothing unpacked yet."""

    kind: MediaKind
    placeholder: Placeholder
    layout: Layout
    digest: bytes  # of its content and of everything that the layout depends on
    source: PixelSource = field(repr=False, compare=False)

    @classmethod
    def of(
        cls, kind: MediaKind, placeholder: Placeholder, layout: Layout, content: bytes, rules: str, source: PixelSource
    ) -> Shown:
        """`content` is the digest of the file; `rules` name the processor's, all of them."""
        named = f"{kind}\n{rules}\n{layout!r}".encode()
        return cls(kind, placeholder, layout, blake2b(content + named, digest_size=32).digest(), source)

    def __str__(self) -> str:
        """Names it where a conversation is named by what was said in it."""
        return f"{self.kind} {self.digest.hex()}"


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A picture or a clip of a prompt.

    Tokens [begin, end) depend on it: what is computed of them, and of whatever follows, is keyed by `digest` as well.
    In `runs` are those among them that features take the place of, `layout.features` in all and in the tower's order;
    between them may stand what the family writes there (breaks of lines, places of tiles, times).
    """

    kind: MediaKind
    digest: bytes
    runs: tuple[Span, ...]
    layout: Layout
    source: PixelSource = field(repr=False, compare=False)

    @property
    def begin(self) -> int:
        return self.runs[0][0]

    @property
    def end(self) -> int:
        return self.runs[-1][1]

    @property
    def grid(self) -> Grid:
        return self.layout.grid
