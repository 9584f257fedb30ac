"""Pictures and clips as they come over the wire: in data URLs, in plain base64, or as addresses to fetch them from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from ingot.engine.speech_request import Transcript, Untranscribed, transcripts
from ingot.errors import BadMedia, BadRequest, IngotError, Unsupported
from ingot.media import bounds, data_url
from ingot.media.audio import Sound
from ingot.media.clip import Clip, ClipFile, ClipFrames
from ingot.media.fetched import fetched_bytes
from ingot.media.pdf import PdfFile
from ingot.media.picture import Picture
from ingot.protocol.schema.fields import BodyReading, Delegate, Kind, ListOf, Text
from ingot.protocol.terms import Terms

FRAMES: Final = "video/jpeg"
NO_FETCHING: Final = (
    "this server fetches nothing. Send the file itself, as a data URL, or start the server with --media-hosts."
)


@dataclass(frozen=True, slots=True)
class PictureUrl(Delegate):
    """A data URL, or an address where the settings allow to fetch from it."""

    def parse(self, value: object, path: str, reading: BodyReading) -> Picture:
        url = self.kind(reading.terms).parse(value, path, reading)
        with counted(path, reading):
            return Picture.of(_bytes(url, path, reading))

    def kind(self, terms: Terms) -> Kind:
        return Text(least=1)


@dataclass(frozen=True, slots=True)
class Base64Picture(Delegate):
    """The bare file, as Ollama's and Anthropic's clients send it."""

    def parse(self, value: object, path: str, reading: BodyReading) -> Picture:
        text = self.kind(reading.terms).parse(value, path, reading)
        with counted(path, reading):
            return Picture.of(data_url.decoded(text))

    def kind(self, terms: Terms) -> Kind:
        return Text(least=1)


@dataclass(frozen=True, slots=True)
class PdfUrl(Delegate):
    """A PDF, as a data URL or an address. Each of its pages counts as a picture."""

    def parse(self, value: object, path: str, reading: BodyReading) -> PdfFile:
        url = self.kind(reading.terms).parse(value, path, reading)
        with counted(path, reading):
            return _pages_counted(PdfFile.of(_bytes(url, path, reading)), path, reading)

    def kind(self, terms: Terms) -> Kind:
        return Text(least=1)


@dataclass(frozen=True, slots=True)
class Base64Pdf(Delegate):
    """The bare file; a data URL will do."""

    def parse(self, value: object, path: str, reading: BodyReading) -> PdfFile:
        text = self.kind(reading.terms).parse(value, path, reading)
        with counted(path, reading):
            bare = data_url.split(text)[1] if text[:5].lower() == "data:" else text
            return _pages_counted(PdfFile.of(data_url.decoded(bare)), path, reading)

    def kind(self, terms: Terms) -> Kind:
        return Text(least=1)


@dataclass(frozen=True, slots=True)
class ClipUrl(Delegate):
    """The same for clips; `data:video/jpeg;base64,` is followed by frames, with commas between."""

    def parse(self, value: object, path: str, reading: BodyReading) -> Clip:
        url = self.kind(reading.terms).parse(value, path, reading)
        with counted(path, reading):
            if url[:5].lower() == "data:":
                stated, text = data_url.split(url)
                if stated == FRAMES:
                    return ClipFrames(tuple(map(_frame, _cut(text))))
            return ClipFile.of(_bytes(url, path, reading))

    def kind(self, terms: Terms) -> Kind:
        return Text(least=1)


@dataclass(frozen=True, slots=True)
class FrameList(Delegate):
    """A clip as a list of pictures."""

    def parse(self, value: object, path: str, reading: BodyReading) -> Clip:
        urls = self.kind(reading.terms).parse(value, path, reading)
        with counted(path, reading):
            return ClipFrames(tuple(Picture.of(_bytes(url, path, reading)) for url in urls))

    def kind(self, terms: Terms) -> ListOf:
        return ListOf(Text(least=1), most=bounds.SENT_FRAMES, least=1)


@dataclass(frozen=True, slots=True)
class Base64Sound(Delegate):
    """A sound, of which the model is given what is spoken in it."""

    def parse(self, value: object, path: str, reading: BodyReading) -> Transcript:
        text = self.kind(reading.terms).parse(value, path, reading)
        with counted(path, reading):
            known = transcripts.get()
            if known is None:
                raise Unsupported(f"{path}: sounds are not written down at this address.", param=path)
            data = data_url.decoded(data_url.split(text)[1] if text[:5].lower() == "data:" else text)
            digest = blake2b(data, digest_size=16).digest()
            if digest not in known:
                raise Untranscribed(digest, Sound(data))
            return known[digest]

    def kind(self, terms: Terms) -> Kind:
        return Text(least=1)


@contextmanager
def counted(path: str, reading: BodyReading) -> Iterator[None]:
    """One more of a body's pictures and clips; what is wrong with it is told with its place."""
    _count(1, path, reading)
    try:
        yield
    except IngotError as error:
        raise placed(error, path) from error


def _count(more: int, path: str, reading: BodyReading) -> None:
    reading.media += more
    if reading.media > bounds.ITEMS:
        raise BadRequest(f"{path}: a request holds at most {bounds.ITEMS} pictures, pages and clips.", param=path)


def _pages_counted(file: PdfFile, path: str, reading: BodyReading) -> PdfFile:
    _count(len(file.pages) - 1, path, reading)
    return file


def placed(error: IngotError, path: str) -> IngotError:
    """The error, with the place that it is about."""
    if not isinstance(error, BadMedia):
        return error
    return BadMedia(f"{path}: {error.message}", param=path)


def _bytes(url: str, path: str, reading: BodyReading) -> bytes:
    scheme = url[:8].lower()
    if scheme.startswith("data:"):
        return data_url.decoded(data_url.split(url)[1])
    if not scheme.startswith(("http://", "https://")):
        raise BadMedia("expected a data URL, as in data:image/png;base64,…; files of this machine are not read.")
    hosts = reading.terms.media.hosts
    if not hosts:
        raise Unsupported(f"{path}: {NO_FETCHING}", param=path)
    reading.fetched += 1
    if reading.fetched > bounds.FETCHED_ITEMS:
        raise BadRequest(f"{path}: at most {bounds.FETCHED_ITEMS} files of a request are fetched.", param=path)
    found = fetched_bytes(url, hosts)
    reading.fetched_bytes += len(found)
    if reading.fetched_bytes > bounds.FETCHED_BYTES:
        raise BadMedia(f"the files of a request that are fetched have at most {bounds.FETCHED_BYTES} bytes together.")
    return found


def _cut(text: str) -> list[str]:
    if text.count(",") >= bounds.SENT_FRAMES:
        raise BadMedia(f"a clip has at most {bounds.SENT_FRAMES} frames.")
    return text.split(",")


def _frame(text: str) -> Picture:
    return Picture.of(data_url.decoded(text))


def is_media(part: Any) -> bool:
    return isinstance(part, dict) and "medium" in part
