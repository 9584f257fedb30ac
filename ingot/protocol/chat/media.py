"""Images, videos, audio and files in messages: as data URLs, plain base64, or URLs to fetch them from.

A vision model takes them in any message. A text-only model refuses them in a question, as it would answer something
else. But tool results, and everything before the last answer, are in every request that follows, and to refuse those
would end the conversation for good. There a short text replaces them, and the receipt names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from ingot.engine.speech_request import TranscribedText, UntranscribedAudio, cached_transcripts
from ingot.errors import BadMedia, BadRequest, Unsupported
from ingot.media import bounds, fetch
from ingot.media.audio import AudioFile
from ingot.media.images import ImageFile
from ingot.media.items import RequestImage, RequestMedia, RequestPdf, RequestVideo
from ingot.media.pdf import PdfFile
from ingot.media.video import Video, VideoFile, VideoFrames
from ingot.protocol.schema.bounds import PARTS
from ingot.protocol.schema.fields import BodyReading, DelegateKind, FieldKind, ListOf, Schema, Text
from ingot.protocol.terms import Terms

FRAMES_MEDIA_TYPE: Final = "video/jpeg"
FETCHING_REFUSED: Final = (
    "this server fetches nothing. Send the file itself, as a data URL, or start the server with --media-hosts."
)


@dataclass(frozen=True, slots=True)
class MediaField(DelegateKind):
    """Text, or texts, from which `read` makes a file. Each file counts towards the request's limit."""

    read: Callable[[Any, str, BodyReading], Any]
    text: FieldKind = Text(least=1)  # noqa: RUF009  (frozen)

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        text = self.text.parse(value, path, reading)
        with counting_media(path, reading):
            return self.read(text, path, reading)

    def kind(self, terms: Terms) -> FieldKind:
        return self.text


@contextmanager
def counting_media(path: str, reading: BodyReading) -> Iterator[None]:
    """Counts one more of a body's media; an error about it names its path."""
    _count_media(1, path, reading)
    try:
        yield
    except BadMedia as error:
        raise BadMedia(f"{path}: {error.message}", param=path) from error


def _count_media(more: int, path: str, reading: BodyReading) -> None:
    reading.media += more
    if reading.media > bounds.ITEMS:
        raise BadRequest(f"{path}: a request holds at most {bounds.ITEMS} images, pages and videos.", param=path)


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
    data = fetch.fetched_file(url, hosts)
    reading.fetched_bytes += len(data)
    if reading.fetched_bytes > bounds.FETCHED_BYTES:
        raise BadMedia(f"the fetched files of a request may have at most {bounds.FETCHED_BYTES} bytes together.")
    return data


def _bytes_of_base64(text: str) -> bytes:
    """The bare file; a data URL will do."""
    return fetch.decode_base64(fetch.split_data_url(text)[1] if text[:5].lower() == "data:" else text)


def _count_pdf_pages(file: PdfFile, path: str, reading: BodyReading) -> PdfFile:
    _count_media(len(file.pages) - 1, path, reading)
    return file


def _read_video(url: str, path: str, reading: BodyReading) -> Video:
    if url[:5].lower() == "data:":
        media_type, text = fetch.split_data_url(url)
        if media_type == FRAMES_MEDIA_TYPE:
            if text.count(",") >= bounds.SENT_FRAMES:
                raise BadMedia(f"a video has at most {bounds.SENT_FRAMES} frames.")
            return VideoFrames(tuple(ImageFile.of(fetch.decode_base64(frame)) for frame in text.split(",")))
    return VideoFile.of(_bytes_of_url(url, path, reading))


def _read_audio(text: str, path: str, reading: BodyReading) -> TranscribedText:
    transcripts = cached_transcripts.get()
    if transcripts is None:
        raise Unsupported(f"{path}: audio is not transcribed at this address.", param=path)
    data = _bytes_of_base64(text)
    digest = blake2b(data, digest_size=16).digest()
    if digest not in transcripts:
        raise UntranscribedAudio(digest, AudioFile(data))
    return transcripts[digest]


IMAGE_URL: Final = MediaField(lambda url, path, reading: ImageFile.of(_bytes_of_url(url, path, reading)))
"""A data URL, or a URL of a host that the settings allow."""
BASE64_IMAGE: Final = MediaField(lambda text, path, reading: ImageFile.of(fetch.decode_base64(text)))
"""The bare file, as Ollama's and Anthropic's clients send it."""
PDF_URL: Final = MediaField(
    lambda url, path, reading: _count_pdf_pages(PdfFile.of(_bytes_of_url(url, path, reading)), path, reading)
)
"""A PDF, each page of which counts as an image."""
BASE64_PDF: Final = MediaField(
    lambda text, path, reading: _count_pdf_pages(PdfFile.of(_bytes_of_base64(text)), path, reading)
)
VIDEO_URL: Final = MediaField(_read_video)
"""A video file; or frames, with commas between them, after `data:video/jpeg;base64,`."""
VIDEO_FRAMES: Final = MediaField(
    lambda urls, path, reading: VideoFrames(tuple(ImageFile.of(_bytes_of_url(url, path, reading)) for url in urls)),
    ListOf(Text(least=1), most=bounds.SENT_FRAMES, least=1),
)
"""A video as a list of images."""
BASE64_AUDIO: Final = MediaField(_read_audio)
"""Audio, of which the model is given the transcript."""


def is_media_part(part: Any) -> bool:
    return isinstance(part, dict) and "medium" in part


TEXT_ONLY_REFUSAL: Final = "input is not supported: the served model is run on text alone."


def why_media_is_refused(what: str, terms: Terms) -> str:
    """Why the served model does not take something, and what to do; ends the sentence "… (image)"."""
    name = terms.models[0] if terms.models else "the served model"
    if what == "audio":
        server = (
            ""
            if terms.task("audio").models
            else " to a server that was started with --audio-model, which transcribes it"
        )
        return f"input is not supported: {name} takes no audio. Send an input_audio part in a user's message{server}."
    if terms.media.withheld:
        return f"input is not supported: {name} is run on text alone. Start the server without --text-only."
    if terms.media.kinds:
        return f"input is not supported here: {name} takes text, images and videos from users and tools."
    return f"input is not supported: {name} is run on text alone. Send text, or serve a vision model."


@dataclass(frozen=True, slots=True)
class MediaPartKind:
    """What a part of some tag holds, and the record that parses it where the served model takes it."""

    what: str
    record: FieldKind | None = None
    refusal: str = ""  # the error; where there is none, the terms say why

    def parse(self, value: dict[str, Any], tag: str, path: str, reading: BodyReading) -> Any:
        if self.record is not None and self._is_supported(reading.terms):
            return self.record.parse(value, path, reading)
        name, where = value[tag], f"{path}.{tag}"
        if not reading.past:
            why = self.refusal or f"({self.what}) {why_media_is_refused(self.what, reading.terms)}"
            fetched = " Audio is not fetched from URLs." if name == "audio_url" else ""
            raise Unsupported(f"{where}: '{name}' {why}{fetched}", param=where)
        reading.ignore_hint(f"{path}.{name}")
        return OmittedMedia(self.what, supported=bool(reading.terms.media.kinds))

    def schema(self, tag: str, name: str, terms: Terms) -> Schema:
        if self.record is not None and self._is_supported(terms):
            return self.record.schema(terms)
        return {"type": "object", "properties": {tag: {"const": name}}, "required": [tag]}

    def _is_supported(self, terms: Terms) -> bool:
        """Audio is, where a speech-to-text model transcribes it."""
        return bool(terms.task("audio").models if self.what == "audio" else terms.media.kinds)


@dataclass(frozen=True, slots=True)
class OmittedMedia:
    """The text that replaces a medium which the model does not take."""

    what: str
    cache_control: None = None
    supported: bool = False  # elsewhere, by this model

    @property
    def text(self) -> str:
        return f"[{self.what} left out{'' if self.supported else ': this model reads text alone'}]"


def template_content(parts: Sequence[str | RequestMedia]) -> str | list[dict[str, Any]]:
    """Texts and media as a message's content. A single text is itself; otherwise parts stay parts, which the template
    joins or not."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [template_part(part) for part in parts] or ""


def template_part(part: str | RequestMedia) -> dict[str, Any]:
    match part:
        case str():
            return {"type": "text", "text": part}
        case RequestImage() | RequestPdf():
            return {"type": "image", "medium": part}
        case RequestVideo():
            return {"type": "video", "medium": part}


@dataclass(frozen=True, slots=True)
class MessageListKind(DelegateKind):
    """The messages of a conversation, or its items. Those up to the last answer, and tool results, are parsed as past.
    An answer that is to be continued is not the last one."""

    items: ListOf

    def kind(self, terms: Terms) -> FieldKind:
        return self.items

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[Any, ...]:
        if not isinstance(value, list) or not self.items.least <= len(value) <= self.items.most:
            raise self.refuse(value, path, reading)
        answers = (at for at, item in enumerate(value[:-1]) if _is_from(item, "assistant", ANSWER_ITEMS))
        last_answer, past = max(answers, default=-1), PastContentKind(self.items.item)
        return tuple(
            (past if at <= last_answer or _is_from(item, "tool", RESULT_ITEMS) else self.items.item).parse(
                item, f"{path}.{at}", reading
            )
            for at, item in enumerate(value)
        )


@dataclass(frozen=True, slots=True)
class PastContentKind(DelegateKind):
    """Content that was answered before."""

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
    """A message's images, as a list next to its text."""

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[OmittedMedia | RequestImage, ...]:
        images = self.kind(reading.terms).parse(value, path, reading)
        if reading.terms.media.kinds:
            return tuple(RequestImage(image) for image in images)
        if images and not reading.past:
            raise Unsupported(f"{path} (image) {why_media_is_refused('image', reading.terms)}", param=path)
        if images:
            reading.ignore_hint(path)
        return tuple(OmittedMedia("image") for _ in images)

    def kind(self, terms: Terms) -> ListOf:
        return ListOf(BASE64_IMAGE if terms.media.kinds else Text(), PARTS)


@dataclass(frozen=True, slots=True)
class MediaOnlyKind(DelegateKind):
    """A field about images or videos, which has no effect on a model that takes none."""

    of: FieldKind

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        parsed = self.of.parse(value, path, reading)
        if reading.terms.media.kinds:
            return parsed
        reading.ignore_hint(path)
        return None

    def kind(self, terms: Terms) -> FieldKind:
        return self.of

    def schema(self, terms: Terms) -> Schema:
        return self.of.schema(terms) if terms.media.kinds or not terms.strict else {"enum": [None]}


ANSWER_ITEMS: Final = ("function_call", "custom_tool_call", "mcp_call")
RESULT_ITEMS: Final = ("function_call_output", "custom_tool_call_output")


def _is_from(item: Any, role: str, types: tuple[str, ...]) -> bool:
    return isinstance(item, Mapping) and (item.get("role") == role or item.get("type") in types)
