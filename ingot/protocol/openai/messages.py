"""The messages of a chat as they come over the wire, and as a chat template takes them."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.engine.speech_request import Transcript
from ingot.media.clip import Clip
from ingot.media.medium import ClipMedium, Medium, PdfMedium, PictureMedium
from ingot.media.pdf import PdfFile
from ingot.media.picture import Picture
from ingot.protocol.chat.custom_tools import custom_arguments
from ingot.protocol.chat.media import TEXT_ONLY, MediaTag, MessageList, Unseen, part_of
from ingot.protocol.chat.media_fields import (
    ABOUT_DETAIL,
    ABOUT_KEYFRAMES,
    DETAIL,
    FRAMES,
    PIXELS,
    RATE,
    TOTAL_PIXELS,
    MediaWishes,
    told,
)
from ingot.protocol.chat.media_files import Base64Pdf, Base64Sound, ClipUrl, FrameList, PictureUrl
from ingot.protocol.schema.bounds import IDENTIFIER_CHARS, MESSAGES, NAME_CHARS, TOOL_CALLS
from ingot.protocol.schema.fields import Anything, Bool, Either, ListOf, OneOf, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires, tagged, text_or
from ingot.text.parse.call_arguments import as_text


@dataclass(frozen=True, slots=True)
class TextPart:
    type: str = requires(OneOf(("text",)), "The kind of part.")
    text: str = requires(Text(), "The text.")


@dataclass(frozen=True, slots=True)
class RefusalPart:
    type: str = requires(OneOf(("refusal",)), "The kind of part.")
    refusal: str = requires(Text(), "What the assistant said when it declined.")

    @property
    def text(self) -> str:
        return self.refusal


@dataclass(frozen=True, slots=True)
class ImageUrl:
    url: Picture = requires(PictureUrl(), "The picture, as a data URL.")
    detail: str | None = accepts(DETAIL, ABOUT_DETAIL)


@dataclass(frozen=True, slots=True)
class ImagePart:
    type: str = requires(OneOf(("image_url",)), "The kind of part.")
    image_url: ImageUrl | Picture = requires(Either((PictureUrl(), ObjectOf(ImageUrl))), "The picture.")
    min_pixels: int | None = accepts(PIXELS, "Least pixels that it is resized to.")
    max_pixels: int | None = accepts(PIXELS, "Most pixels.")

    def medium(self, wishes: MediaWishes) -> Medium:
        held = self.image_url if isinstance(self.image_url, ImageUrl) else ImageUrl(self.image_url, None)
        said = {"detail": held.detail, "min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return PictureMedium(held.url, told(wishes.picture, **said))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipPart:
    fps: float | None = accepts(RATE, "Frames that are shown of a second.")
    max_frames: int | None = accepts(FRAMES, "Most frames.")
    nframes: int | None = accepts(FRAMES, "Exactly so many frames.")
    min_pixels: int | None = accepts(PIXELS, "Least pixels that a frame is resized to.")
    max_pixels: int | None = accepts(PIXELS, "Most pixels of a frame.")
    total_pixels: int | None = accepts(TOTAL_PIXELS, "Most pixels of all frames together.")
    keyframes: bool | None = accepts(Bool(), ABOUT_KEYFRAMES)

    def wish(self, wishes: MediaWishes) -> Any:
        said = {name: getattr(self, name) for name in ("min_pixels", "max_pixels", "total_pixels", "keyframes")}
        return told(wishes.clip, fps=self.fps, max_frames=self.max_frames, frames=self.nframes, **said)


@dataclass(frozen=True, slots=True)
class VideoUrl:
    url: Clip = requires(ClipUrl(), "The clip, as a data URL.")


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoUrlPart(ClipPart):
    type: str = requires(OneOf(("video_url",)), "The kind of part.")
    video_url: VideoUrl = requires(ObjectOf(VideoUrl), "The clip.")

    def medium(self, wishes: MediaWishes) -> Medium:
        return ClipMedium(self.video_url.url, self.wish(wishes))


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoPart(ClipPart):
    type: str = requires(OneOf(("video",)), "The kind of part.")
    video: Clip = requires(Either((ClipUrl(), FrameList())), "The clip as a data URL, or a list of its frames.")

    def medium(self, wishes: MediaWishes) -> Medium:
        return ClipMedium(self.video, self.wish(wishes))


@dataclass(frozen=True, slots=True)
class SentFile:
    file_data: PdfFile = requires(Base64Pdf(), "A PDF, as a data URL or in base64. Its pages are shown as pictures.")
    filename: str | None = accepts(Text(NAME_CHARS), "Not shown to the model.")
    file_id: None = refuses("is not supported: this server keeps no files. Send file_data.")


@dataclass(frozen=True, slots=True)
class FilePart:
    type: str = requires(OneOf(("file",)), "The kind of part.")
    file: SentFile = requires(ObjectOf(SentFile), "The file.")

    def medium(self, wishes: MediaWishes) -> Medium:
        return PdfMedium(self.file.file_data, wishes.picture)


@dataclass(frozen=True, slots=True)
class SentSound:
    data: Transcript = requires(Base64Sound(), "The sound in base64: FLAC, MP3, MP4, M4A, Ogg, WAV, WebM or AAC.")
    format: str | None = accepts(Text(NAME_CHARS), "What it is; the file itself tells.")


@dataclass(frozen=True, slots=True)
class AudioPart:
    type: str = requires(OneOf(("input_audio",)), "The kind of part.")
    input_audio: SentSound = requires(ObjectOf(SentSound), "The sound, which the model that hears writes down.")

    @property
    def text(self) -> Transcript:
        return self.input_audio.data


MEDIA = {
    "image_url": MediaTag("image", ObjectOf(ImagePart)),
    "video_url": MediaTag("video", ObjectOf(VideoUrlPart)),
    "video": MediaTag("video", ObjectOf(VideoPart)),
    "input_audio": MediaTag("audio", ObjectOf(AudioPart)),
    "audio_url": MediaTag("audio"),
    "file": MediaTag("file", ObjectOf(FilePart)),
}
NO_MEDIA = {name: MediaTag(tag.what) for name, tag in MEDIA.items()}
CONTENT = text_or(tagged("type", TextPart, media=MEDIA), least=1)
INSTRUCTIONS = text_or(tagged("type", TextPart, media=NO_MEDIA), least=1)
ANSWER = text_or(tagged("type", TextPart, RefusalPart, media=NO_MEDIA), least=1)
MediaPart = ImagePart | VideoUrlPart | VideoPart | FilePart
Content = str | tuple[TextPart | RefusalPart | MediaPart | AudioPart | Unseen, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    role: str = requires(OneOf(("system", "developer")), "Who speaks.")
    content: Content = requires(INSTRUCTIONS, "The instructions.")
    name: str | None = accepts(Text(NAME_CHARS), "A name for the speaker, for templates that show one.")

    def as_dict(self, wishes: MediaWishes) -> dict[str, Any]:
        return chat_message(self.role, self.content, self.name, wishes)


@dataclass(frozen=True, slots=True)
class UserMessage:
    role: str = requires(OneOf(("user",)), "Who speaks.")
    content: Content = requires(CONTENT, "What the user says.")
    name: str | None = accepts(Text(NAME_CHARS), "A name for the speaker, for templates that show one.")

    def as_dict(self, wishes: MediaWishes) -> dict[str, Any]:
        return chat_message(self.role, self.content, self.name, wishes)


@dataclass(frozen=True, slots=True)
class CalledFunction:
    name: str = requires(Text(NAME_CHARS, least=1), "The function's name.")
    arguments: Any = accepts(Anything(), "Its arguments, as JSON text; what is no JSON object is shown as it is.")


@dataclass(frozen=True, slots=True)
class CalledCustom:
    name: str = requires(Text(NAME_CHARS, least=1), "The tool's name.")
    input: str = requires(Text(), "What it was given.")


@dataclass(frozen=True, slots=True)
class CustomCall:
    id: str = requires(Text(IDENTIFIER_CHARS), "The call's id, to which a tool message answers.")
    type: str = requires(OneOf(("custom",)), "A custom tool was called.")
    custom: CalledCustom = requires(ObjectOf(CalledCustom), "What was called.")

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.custom.name, "arguments": custom_arguments(self.custom.input)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str = requires(Text(IDENTIFIER_CHARS), "The call's id, to which a tool message answers.")
    type: str = requires(OneOf(("function",)), "A function was called.")
    function: CalledFunction = requires(ObjectOf(CalledFunction), "What was called.")

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": as_text(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    role: str = requires(OneOf(("assistant",)), "Who speaks.")
    content: Content | None = accepts(ANSWER, "What the assistant said; none is an empty turn.")
    name: str | None = accepts(Text(NAME_CHARS), "A name for the speaker, for templates that show one.")
    refusal: str | None = accepts(Text(), "What the assistant said when it declined; stands in for the content.")
    tool_calls: tuple[ToolCall | CustomCall, ...] = accepts(
        ListOf(tagged("type", ToolCall, CustomCall), TOOL_CALLS), "The calls it made.", default=()
    )
    reasoning_content: str | None = accepts(Text(), "What it thought, for templates that show past thinking.")
    reasoning: str | None = accepts(Text(), "Another name of reasoning_content.")
    audio: None = refuses(f"cannot be honoured: audio {TEXT_ONLY}")
    function_call: None = refuses("is not supported; send `tool_calls`, which replaced it.")

    def as_dict(self, wishes: MediaWishes) -> dict[str, Any]:
        content = self.content if self.content is not None else self.refusal
        message = chat_message(self.role, content, self.name, wishes)
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thought
        return message


@dataclass(frozen=True, slots=True)
class ToolMessage:
    role: str = requires(OneOf(("tool",)), "Who speaks.")
    content: Content = requires(CONTENT, "What the tool returned.")
    tool_call_id: str = requires(Text(IDENTIFIER_CHARS), "The call that this answers.")
    name: str | None = accepts(Text(NAME_CHARS), "The function that was called, for templates that show it.")

    def as_dict(self, wishes: MediaWishes) -> dict[str, Any]:
        return chat_message(self.role, self.content, self.name, wishes) | {"tool_call_id": self.tool_call_id}


Message = Instruction | UserMessage | AssistantMessage | ToolMessage

MESSAGE = tagged(
    *("role", Instruction, UserMessage, AssistantMessage, ToolMessage),
    refused={"function": "messages are not supported; send role 'tool', which replaced it."},
)
CONVERSATION = MessageList(ListOf(MESSAGE, most=MESSAGES, least=1))


def as_dicts(messages: tuple[Message, ...], wishes: MediaWishes = MediaWishes()) -> list[dict[str, Any]]:  # noqa: B008
    """As templates take them; pictures and clips are shown as `wishes` say where they do not say it themselves."""
    return [message.as_dict(wishes) for message in messages]


def chat_message(role: str, content: Content | None, name: str | None, wishes: MediaWishes) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": plain(content, wishes)}
    return message if name is None else message | {"name": name}


def plain(content: Content | None, wishes: MediaWishes) -> str | list[dict[str, Any]] | None:
    """Parts stay parts: whether and how they are joined is the template's affair."""
    if content is None or isinstance(content, str):
        return content
    return [part_of(part.medium(wishes) if isinstance(part, MediaPart) else part.text) for part in content]
