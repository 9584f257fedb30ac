"""A picture or a clip of a request, with what that says of how to show it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ingot.errors import Unsupported
from ingot.media import bounds
from ingot.media.clip import Clip, PickedFrames
from ingot.media.items import PixelSource, Shown
from ingot.media.layout import ClipHeader, ClipWish, Layout, MediaKind, PictureWish
from ingot.media.pdf import PdfFile, PdfPage
from ingot.media.picture import Picture
from ingot.media.processor import Processor
from ingot.media.sampling import near, spread


@dataclass(frozen=True, slots=True)
class PictureMedium:
    picture: Picture
    wish: PictureWish = field(default_factory=PictureWish)

    def shown(self, processor: Processor) -> Iterator[Shown]:
        """Raises BadMedia or Unsupported where the model cannot be shown it so."""
        layout = processor.picture(self.picture.size, self.wish)
        yield _shown(processor, "image", layout, self.picture.digest, self.picture)


@dataclass(frozen=True, slots=True)
class ClipMedium:
    clip: Clip
    wish: ClipWish = field(default_factory=ClipWish)

    def shown(self, processor: Processor) -> Iterator[Shown]:
        """As a clip where the model takes such, else some of its frames, as pictures."""
        header = self.clip.keyed if self.wish.keyframes else self.clip.header
        if "video" in processor.placeholders:
            layout = processor.clip(header, self.wish)
            yield _shown(processor, "video", layout, self.clip.digest, PickedFrames(self.clip, layout.frames))
            return
        if self.wish.total_pixels is not None:
            raise Unsupported(
                "total_pixels is of clips, and this model is shown their frames as pictures. Leave it out."
            )
        wish = PictureWish(min_pixels=self.wish.min_pixels, max_pixels=self.wish.max_pixels)
        for number in self._stills(header):
            still = PickedFrames(self.clip, (number,))
            yield _shown(processor, "image", processor.picture(still.size, wish), still.digest, still)

    def _stills(self, header: ClipHeader) -> list[int]:
        most = self.wish.max_frames or bounds.STILLS
        wanted = self.wish.frames or round(header.seconds * (self.wish.fps or 1.0))
        return near(spread(header.frames, max(1, min(wanted, most, header.frames))), header.keys)


@dataclass(frozen=True, slots=True)
class PdfMedium:
    file: PdfFile
    wish: PictureWish = field(default_factory=PictureWish)

    def shown(self, processor: Processor) -> Iterator[Shown]:
        """Page by page, as pictures."""
        for number in range(len(self.file.pages)):
            page = PdfPage(self.file, number)
            yield _shown(processor, "image", processor.picture(page.size, self.wish), page.digest, page)


Medium = PictureMedium | ClipMedium | PdfMedium


def _shown(processor: Processor, kind: MediaKind, layout: Layout, content: bytes, source: PixelSource) -> Shown:
    return Shown.of(kind, processor.placeholders[kind], layout, content, repr(processor), source)
