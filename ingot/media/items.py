"""Media items: an image, a video or a PDF of a request, with what that says of how to show it, and what the engine gets
of it beside the prompt's tokens.

Nothing is decoded here; a `PixelSource` has a worker do that when it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from ingot.errors import Unsupported
from ingot.media import bounds
from ingot.media.images import BICUBIC, DecodingMemory, ImageFile, Pixels, View
from ingot.media.layout import (
    Grid,
    ImageLayoutOptions,
    Layout,
    MediaKind,
    MediaProcessor,
    Placeholder,
    Size,
    VideoHeader,
    VideoLayoutOptions,
    snap_to_keyframes,
    spread_frames,
)
from ingot.media.pdf import PdfFile, PdfPage
from ingot.media.video import SampledFrames, Video


@dataclass(frozen=True, slots=True)
class RequestImage:
    picture: ImageFile
    layout_options: ImageLayoutOptions = field(default_factory=ImageLayoutOptions)

    def shown(self, processor: MediaProcessor) -> Iterator[PlacedMedia]:
        """Raises BadMedia or Unsupported where the model cannot be shown it so."""
        layout = processor.picture(self.picture.size, self.layout_options)
        yield _place_media(processor, "image", layout, self.picture.digest, self.picture)


@dataclass(frozen=True, slots=True)
class RequestVideo:
    clip: Video
    layout_options: VideoLayoutOptions = field(default_factory=VideoLayoutOptions)

    def shown(self, processor: MediaProcessor) -> Iterator[PlacedMedia]:
        """As a clip where the model takes such, else some of its frames, as pictures."""
        header = self.clip.keyed if self.layout_options.keyframes else self.clip.header
        if "video" in processor.placeholders:
            layout = processor.clip(header, self.layout_options)
            yield _place_media(processor, "video", layout, self.clip.digest, SampledFrames(self.clip, layout.frames))
            return
        if self.layout_options.total_pixels is not None:
            raise Unsupported(
                "total_pixels is of clips, and this model is shown their frames as pictures. Leave it out."
            )
        layout_options = ImageLayoutOptions(
            min_pixels=self.layout_options.min_pixels, max_pixels=self.layout_options.max_pixels
        )
        for number in self._stills(header):
            still = SampledFrames(self.clip, (number,))
            yield _place_media(processor, "image", processor.picture(still.size, layout_options), still.digest, still)

    def _stills(self, header: VideoHeader) -> list[int]:
        most = self.layout_options.max_frames or bounds.STILLS
        wanted = self.layout_options.frames or round(header.seconds * (self.layout_options.fps or 1.0))
        return snap_to_keyframes(spread_frames(header.frames, max(1, min(wanted, most, header.frames))), header.keys)


@dataclass(frozen=True, slots=True)
class RequestPdf:
    file: PdfFile
    layout_options: ImageLayoutOptions = field(default_factory=ImageLayoutOptions)

    def shown(self, processor: MediaProcessor) -> Iterator[PlacedMedia]:
        """Page by page, as pictures."""
        for number in range(len(self.file.pages)):
            page = PdfPage(self.file, number)
            yield _place_media(processor, "image", processor.picture(page.size, self.layout_options), page.digest, page)


RequestMedia = RequestImage | RequestVideo | RequestPdf


def _place_media(
    processor: MediaProcessor, kind: MediaKind, layout: Layout, content: bytes, source: PixelSource
) -> PlacedMedia:
    return PlacedMedia.of(kind, processor.placeholders[kind], layout, content, repr(processor), source)


TokenSpan = tuple[int, int]
"""Tokens [begin, end) of a prompt."""


class PixelSource(Protocol):
    """Keeps what was sent, which is small, and has a worker unpack it when it is asked to. Any thread may ask, also
    twice."""

    @property
    def size(self) -> Size:
        """Of a frame, as it is shown."""

    def unpacking(self, views: Sequence[View]) -> DecodingMemory:
        """What it may take to make these views of a frame."""

    def frames(self, *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        """One after another, each in all views, so that no more than one need be held. Raises BadMedia where the file
        is damaged. What a frame takes is booked until the next is asked for."""


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """A picture or a clip in its place in a conversation, laid out for the served model, and nothing unpacked yet."""

    kind: MediaKind
    placeholder: Placeholder
    layout: Layout
    digest: bytes  # of its content and of everything that the layout depends on
    source: PixelSource = field(repr=False, compare=False)

    @classmethod
    def of(
        cls, kind: MediaKind, placeholder: Placeholder, layout: Layout, content: bytes, rules: str, source: PixelSource
    ) -> PlacedMedia:
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
    runs: tuple[TokenSpan, ...]
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
