"""Images, videos, audio and files in messages: as data URLs, plain base64, or addresses to fetch them from.

A vision model is shown them, in whichever message they stand. One that reads text alone is not: in a question they are
refused, as an answer would be to something else. But what tools gave back, and what was said before the last answer, is
in every request that follows, and to refuse it would end the conversation for good. There a few words stand in their
place, and the receipt says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from ingot.engine.speech_request import TranscribedText, UntranscribedAudio, known_transcripts
from ingot.errors import BadMedia, BadRequest, IngotError, Unsupported
from ingot.media import bounds, fetch
from ingot.media.audio import AudioFile
from ingot.media.fetch import fetched_file
from ingot.media.images import ImageFile
from ingot.media.items import RequestImage, RequestMedia, RequestPdf, RequestVideo
from ingot.media.pdf import PdfFile
from ingot.media.video import Video, VideoFile, VideoFrames
from ingot.protocol.schema.bounds import PARTS
from ingot.protocol.schema.fields import BodyReading, DelegateKind, FieldKind, ListOf, Schema, Text, note_ignored
from ingot.protocol.terms import Terms

FRAMES_MEDIA_TYPE: Final = "video/jpeg"
FETCHING_REFUSED: Final = (
    "this server fetches nothing. Send the file itself, as a data URL, or start the server with --media-hosts."
)


@dataclass(frozen=True, slots=True)
class ImageUrlKind(DelegateKind):
    """A data URL, or an address where the settings allow to fetch from it."""

    def parse(self, value: object, path: str, reading: BodyReading) -> ImageFile:
        url = self.kind(reading.terms).parse(value, path, reading)
        with counting_media(path, reading):
            return ImageFile.of(_bytes_of_url(url, path, reading))

    def kind(self, terms: Terms) -> FieldKind:
        return Text(least=1)


@dataclass(frozen=True, slots=True)
class Base64ImageKind(DelegateKind):
    """The bare file, as Ollama's and Anthropic's clients send it."""

    def parse(self, value: object, path: str, reading: BodyReading) -> ImageFile:
        text = self.kind(reading.terms).parse(value, path, reading)
        with counting_media(path, reading):
            return ImageFile.of(fetch.decode_base64(text))

    def kind(self, terms: Terms) -> FieldKind:
        return Text(least=1)


@dataclass(frozen=True, slots=True)
class PdfUrlKind(DelegateKind):
    """A PDF, as a data URL or an address. Each of its pages counts as a picture."""

    def parse(self, value: object, path: str, reading: BodyReading) -> PdfFile:
        url = self.kind(reading.terms).parse(value, path, reading)
        with counting_media(path, reading):
            return _count_pdf_pages(PdfFile.of(_bytes_of_url(url, path, reading)), path, reading)

    def kind(self, terms: Terms) -> FieldKind:
        return Text(least=1)


@dataclass(frozen=True, slots=True)
class Base64PdfKind(DelegateKind):
    """The bare file; a data URL will do."""

    def parse(self, value: object, path: str, reading: BodyReading) -> PdfFile:
        text = self.kind(reading.terms).parse(value, path, reading)
        with counting_media(path, reading):
            bare = fetch.split_data_url(text)[1] if text[:5].lower() == "data:" else text
            return _count_pdf_pages(PdfFile.of(fetch.decode_base64(bare)), path, reading)

    def kind(self, terms: Terms) -> FieldKind:
        return Text(least=1)


@dataclass(frozen=True, slots=True)
class VideoUrlKind(DelegateKind):
    """The same for clips; `data:video/jpeg;base64,` is followed by frames, with commas between."""

    def parse(self, value: object, path: str, reading: BodyReading) -> Video:
        url = self.kind(reading.terms).parse(value, path, reading)
        with counting_media(path, reading):
            if url[:5].lower() == "data:":
                stated, text = fetch.split_data_url(url)
                if stated == FRAMES_MEDIA_TYPE:
                    return VideoFrames(tuple(map(_read_frame, _split_frames(text))))
            return VideoFile.of(_bytes_of_url(url, path, reading))

    def kind(self, terms: Terms) -> FieldKind:
        return Text(least=1)


@dataclass(frozen=True, slots=True)
class VideoFramesKind(DelegateKind):
    """A clip as a list of pictures."""

    def parse(self, value: object, path: str, reading: BodyReading) -> Video:
        urls = self.kind(reading.terms).parse(value, path, reading)
        with counting_media(path, reading):
            return VideoFrames(tuple(ImageFile.of(_bytes_of_url(url, path, reading)) for url in urls))

    def kind(self, terms: Terms) -> ListOf:
        return ListOf(Text(least=1), most=bounds.SENT_FRAMES, least=1)


@dataclass(frozen=True, slots=True)
class Base64AudioKind(DelegateKind):
    """A sound, of which the model is given what is spoken in it."""

    def parse(self, value: object, path: str, reading: BodyReading) -> TranscribedText:
        text = self.kind(reading.terms).parse(value, path, reading)
        with counting_media(path, reading):
            known = known_transcripts.get()
            if known is None:
                raise Unsupported(f"{path}: sounds are not written down at this address.", param=path)
            data = fetch.decode_base64(fetch.split_data_url(text)[1] if text[:5].lower() == "data:" else text)
            digest = blake2b(data, digest_size=16).digest()
            if digest not in known:
                raise UntranscribedAudio(digest, AudioFile(data))
            return known[digest]

    def kind(self, terms: Terms) -> FieldKind:
        return Text(least=1)


@contextmanager
def counting_media(path: str, reading: BodyReading) -> Iterator[None]:
    """One more of a body's pictures and clips; what is wrong with it is told with its place."""
    _count_media(1, path, reading)
    try:
        yield
    except IngotError as error:
        raise media_error_at(error, path) from error


def _count_media(more: int, path: str, reading: BodyReading) -> None:
    reading.media += more
    if reading.media > bounds.ITEMS:
        raise BadRequest(f"{path}: a request holds at most {bounds.ITEMS} pictures, pages and clips.", param=path)


def _count_pdf_pages(file: PdfFile, path: str, reading: BodyReading) -> PdfFile:
    _count_media(len(file.pages) - 1, path, reading)
    return file


def media_error_at(error: IngotError, path: str) -> IngotError:
    """The error, with the place that it is about."""
    if not isinstance(error, BadMedia):
        return error
    return BadMedia(f"{path}: {error.message}", param=path)


def _bytes_of_url(url: str, path: str, reading: BodyReading) -> bytes:
    scheme = url[:8].lower()
    if scheme.startswith("data:"):
        return fetch.decode_base64(fetch.split_data_url(url)[1])
    if not scheme.startswith(("http://", "https://")):
        raise BadMedia("expected a data URL, as in data:image/png;base64,…; files of this machine are not read.")
    hosts = reading.terms.media.hosts
    if not hosts:
        raise Unsupported(f"{path}: {FETCHING_REFUSED}", param=path)
    reading.fetched += 1
    if reading.fetched > bounds.FETCHED_ITEMS:
        raise BadRequest(f"{path}: at most {bounds.FETCHED_ITEMS} files of a request are fetched.", param=path)
    found = fetched_file(url, hosts)
    reading.fetched_bytes += len(found)
    if reading.fetched_bytes > bounds.FETCHED_BYTES:
        raise BadMedia(f"the files of a request that are fetched have at most {bounds.FETCHED_BYTES} bytes together.")
    return found


def _split_frames(text: str) -> list[str]:
    if text.count(",") >= bounds.SENT_FRAMES:
        raise BadMedia(f"a clip has at most {bounds.SENT_FRAMES} frames.")
    return text.split(",")


def _read_frame(text: str) -> ImageFile:
    return ImageFile.of(fetch.decode_base64(text))


def is_media_part(part: Any) -> bool:
    return isinstance(part, dict) and "medium" in part


TEXT_ONLY_REFUSAL: Final = "input is not supported: the served model is run on text alone."


def why_media_is_refused(terms: Terms) -> str:
    """Why the served model is not shown something, and what to do; ends the sentence "… (image)"."""
    name = terms.models[0] if terms.models else "the served model"
    if terms.media.withheld:
        return f"input is not supported: {name} is run on text alone. Start the server without --text-only."
    if terms.media.kinds:
        return f"input is not supported here: {name} takes text, pictures and clips, of the user and of tools."
    return f"input is not supported: {name} is run on text alone. Send text, or serve a model that takes pictures."


def why_audio_is_refused(terms: Terms) -> str:
    """The same of sounds."""
    name = terms.models[0] if terms.models else "the served model"
    where = "" if terms.task("audio").models else " to a server that was started with --audio-model"
    return f"input is not supported: {name} does not hear. Send an input_audio part in a user's message{where}."


@dataclass(frozen=True, slots=True)
class MediaPartKind:
    """What a part of some tag holds, and the record that reads it where the served model may be shown it."""

    what: str
    record: FieldKind | None = None

    def parse(self, value: dict[str, Any], tag: str, path: str, reading: BodyReading) -> Any:
        if self.record is not None and self._is_taken(reading.terms):
            return self.record.parse(value, path, reading)
        held, where = value[tag], f"{path}.{tag}"
        if not reading.past:
            why = why_audio_is_refused(reading.terms) if self.what == "audio" else why_media_is_refused(reading.terms)
            fetched = " Addresses of sounds are not fetched." if held == "audio_url" else ""
            raise Unsupported(f"{where}: '{held}' ({self.what}) {why}{fetched}", param=where)
        note_ignored(f"{path}.{held}", reading)
        return OmittedMedia(self.what, taken=bool(reading.terms.media.kinds))

    def schema(self, tag: str, name: str, terms: Terms) -> Schema:
        if self.record is not None and self._is_taken(terms):
            return self.record.schema(terms)
        return omitted_media_schema(tag, name)

    def _is_taken(self, terms: Terms) -> bool:
        """Sounds are, where there is a model that writes them down."""
        return bool(terms.task("audio").models if self.what == "audio" else terms.media.kinds)


@dataclass(frozen=True, slots=True)
class OmittedMedia:
    """What stands in the place of something that the model cannot see."""

    what: str
    cache_control: None = None
    taken: bool = False  # elsewhere, by this model

    @property
    def text(self) -> str:
        return f"[{self.what} left out{'' if self.taken else ': this model reads text alone'}]"


def template_content(said: Sequence[str | RequestMedia]) -> str | list[dict[str, Any]]:
    """Texts and media as a message's content. A single text is itself; else parts stay parts: whether and how they
    are joined is the template's affair."""
    if len(said) == 1 and isinstance(said[0], str):
        return said[0]
    return [template_part(each) for each in said] or ""


def template_part(said: str | RequestMedia) -> dict[str, Any]:
    match said:
        case str():
            return {"type": "text", "text": said}
        case RequestImage() | RequestPdf():
            return {"type": "image", "medium": said}
        case RequestVideo():
            return {"type": "video", "medium": said}


@dataclass(frozen=True, slots=True)
class MessageListKind(DelegateKind):
    """The messages of a conversation, or its items. Of each it is known whether it is past: before the last answer, or
    what a tool gave back. An answer that is to be continued is not the last one."""

    items: ListOf

    def kind(self, terms: Terms) -> FieldKind:
        return self.items

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[Any, ...]:
        if not isinstance(value, list) or not self.items.least <= len(value) <= self.items.most:
            raise self.refuse(value, path, reading)
        answered = max((at for at, item in enumerate(value[:-1]) if _is_answer(item)), default=-1)
        return tuple(
            PastContentKind(self.items.item).parse(item, f"{path}.{at}", reading)
            if at <= answered or _is_result(item)
            else self.items.item.parse(item, f"{path}.{at}", reading)
            for at, item in enumerate(value)
        )


@dataclass(frozen=True, slots=True)
class PastContentKind(DelegateKind):
    """What nobody is asked to answer to any more."""

    item: FieldKind

    def kind(self, terms: Terms) -> FieldKind:
        return self.item

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        before, reading.past = reading.past, True
        try:
            return self.item.parse(value, path, reading)
        finally:
            reading.past = before


@dataclass(frozen=True, slots=True)
class ImageListKind(DelegateKind):
    """A message's pictures, as a list beside its text."""

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[OmittedMedia | RequestImage, ...]:
        given = self.kind(reading.terms).parse(value, path, reading)
        if reading.terms.media.kinds:
            return tuple(RequestImage(picture) for picture in given)
        if given and not reading.past:
            raise Unsupported(f"{path} (image) {why_media_is_refused(reading.terms)}", param=path)
        if given:
            note_ignored(path, reading)
        return tuple(OmittedMedia("image") for _ in given)

    def kind(self, terms: Terms) -> ListOf:
        return ListOf(Base64ImageKind() if terms.media.kinds else Text(), PARTS)


@dataclass(frozen=True, slots=True)
class MediaOnlyKind(DelegateKind):
    """A field that says how pictures or clips are shown. To a model that takes none it is a hint about nothing."""

    of: FieldKind

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        said = self.of.parse(value, path, reading)
        if reading.terms.media.kinds:
            return said
        note_ignored(path, reading)
        return None

    def kind(self, terms: Terms) -> FieldKind:
        return self.of

    def schema(self, terms: Terms) -> Schema:
        return self.of.schema(terms) if terms.media.kinds or not terms.strict else {"enum": [None]}


def omitted_media_schema(tag: str, name: str) -> Schema:
    return {"type": "object", "properties": {tag: {"const": name}}, "required": [tag]}


def _is_answer(item: Any) -> bool:
    if not isinstance(item, Mapping):
        return False
    return item.get("role") == "assistant" or item.get("type") in ("function_call", "custom_tool_call", "mcp_call")


def _is_result(item: Any) -> bool:
    if not isinstance(item, Mapping):
        return False
    return item.get("role") == "tool" or item.get("type") in ("function_call_output", "custom_tool_call_output")
