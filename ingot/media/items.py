"""Media items: an image, a video or a PDF of a request with its options, and what the engine gets of it in addition to
the prompt's tokens.

Nothing is decoded here; a `PixelSource` has a worker do that when its pixels are requested.
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
    image: ImageFile
    layout_options: ImageLayoutOptions = field(default_factory=ImageLayoutOptions)

    def shown(self, processor: MediaProcessor) -> Iterator[PlacedMedia]:
        """Raises BadMedia or Unsupported where the model cannot take it."""
        layout = processor.image_layout(self.image.size, self.layout_options)
        yield _place_media(processor, "image", layout, self.image.digest, self.image)


@dataclass(frozen=True, slots=True)
class RequestVideo:
    video: Video
    layout_options: VideoLayoutOptions = field(default_factory=VideoLayoutOptions)

    def shown(self, processor: MediaProcessor) -> Iterator[PlacedMedia]:
        """A video where the model takes video, otherwise some of its frames as images."""
        header = self.video.keyed if self.layout_options.keyframes else self.video.header
        if "video" in processor.placeholders:
            layout = processor.video_layout(header, self.layout_options)
            yield _place_media(processor, "video", layout, self.video.digest, SampledFrames(self.video, layout.frames))
            return
        if self.layout_options.total_pixels is not None:
            raise Unsupported(
                "total_pixels is for models that take video; this one takes only frames as images. Leave it out."
            )
        layout_options = ImageLayoutOptions(
            min_pixels=self.layout_options.min_pixels, max_pixels=self.layout_options.max_pixels
        )
        for number in self._stills(header):
            still = SampledFrames(self.video, (number,))
            yield _place_media(
                processor, "image", processor.image_layout(still.size, layout_options), still.digest, still
            )

    def _stills(self, header: VideoHeader) -> list[int]:
        most = self.layout_options.max_frames or bounds.STILLS
        count = self.layout_options.frames or round(header.seconds * (self.layout_options.fps or 1.0))
        return snap_to_keyframes(spread_frames(header.frames, max(1, min(count, most, header.frames))), header.keys)


@dataclass(frozen=True, slots=True)
class RequestPdf:
    file: PdfFile
    layout_options: ImageLayoutOptions = field(default_factory=ImageLayoutOptions)

    def shown(self, processor: MediaProcessor) -> Iterator[PlacedMedia]:
        """Page by page, as images."""
        for number in range(len(self.file.pages)):
            page = PdfPage(self.file, number)
            yield _place_media(
                processor, "image", processor.image_layout(page.size, self.layout_options), page.digest, page
            )


RequestMedia = RequestImage | RequestVideo | RequestPdf


def _place_media(
    processor: MediaProcessor, kind: MediaKind, layout: Layout, content: bytes, source: PixelSource
) -> PlacedMedia:
    return PlacedMedia.of(kind, processor.placeholders[kind], layout, content, repr(processor), source)


TokenSpan = tuple[int, int]
"""Tokens [begin, end) of a prompt."""


class PixelSource(Protocol):
    """Has the file, which is small, and has a worker decode it on request. For any thread, also repeatedly."""

    @property
    def size(self) -> Size:
        """Of a frame, as displayed."""

    def unpacking(self, views: Sequence[View]) -> DecodingMemory:
        """The memory for these views of a frame."""

    def frames(self, *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        """One after another, each in all views, so that only one need be in memory, which is reserved until the next is
        requested. Raises BadMedia where the file is damaged."""


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """An image or a video of a conversation, laid out for the served model and not decoded yet."""

    kind: MediaKind
    placeholder: Placeholder
    layout: Layout
    digest: bytes  # of its content and of everything that the layout depends on
    source: PixelSource = field(repr=False, compare=False)

    @classmethod
    def of(
        cls, kind: MediaKind, placeholder: Placeholder, layout: Layout, content: bytes, rules: str, source: PixelSource
    ) -> PlacedMedia:
        """`content` is the digest of the file; `rules` is the processor's `repr`."""
        named = f"{kind}\n{rules}\n{layout!r}".encode()
        return cls(kind, placeholder, layout, blake2b(content + named, digest_size=32).digest(), source)

    def __str__(self) -> str:
        """For the identity of conversations."""
        return f"{self.kind} {self.digest.hex()}"


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image or a video of a prompt.

    Tokens [begin, end) depend on it: the cache keys of these and all later tokens include `digest`. Features replace
    the tokens in `runs`, `layout.features` in all, in the encoder's order; between the runs may be tokens that the
    family writes (line breaks, tile positions, timestamps).
    """

    kind: MediaKind
    digest: bytes
    runs: tuple[TokenSpan, ...]
    layout: Layout
    source: PixelSource = field(repr=False, compare=False)

    @property
    def begin(self) -> int:
        return self.runs[0][0] - self.layout.around[0]

    @property
    def end(self) -> int:
        return self.runs[-1][1] + self.layout.around[1]

    @property
    def grid(self) -> Grid:
        return self.layout.grid
