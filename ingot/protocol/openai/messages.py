"""The messages of a chat as they come over the wire, and as a chat template takes them; and what requests may say of
how images and videos are shown to the model, in the words of several servers and clients."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from ingot.engine.speech_request import TranscribedText
from ingot.media import bounds
from ingot.media.images import ImageFile
from ingot.media.items import RequestImage, RequestMedia, RequestPdf, RequestVideo
from ingot.media.layout import ImageLayoutOptions, VideoLayoutOptions
from ingot.media.pdf import PdfFile
from ingot.media.video import Video
from ingot.protocol.chat.ask import custom_input_as_arguments
from ingot.protocol.chat.media import (
    TEXT_ONLY_REFUSAL,
    Base64AudioKind,
    Base64PdfKind,
    ImageUrlKind,
    MediaPartKind,
    MessageListKind,
    OmittedMedia,
    VideoFramesKind,
    VideoUrlKind,
    template_part,
)
from ingot.protocol.schema.bounds import IDENTIFIER_CHARS, MESSAGES, NAME_CHARS, TOOL_CALLS
from ingot.protocol.schema.fields import Anything, Bool, Either, Int, ListOf, Number, OneOf, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires, tagged, text_or
from ingot.text.parser.arguments import arguments_as_text

IMAGE_DETAIL: Final = OneOf(("auto", "low", "high"))
ABOUT_DETAIL = "How finely it is shown; `low` takes few tokens. By default as the model's makers say."
ABOUT_KEYFRAMES = (
    "Show the keyframe nearest to each frame instead, where one is no further away than half of what frames are apart. "
    "Long clips are unpacked many times as fast."
)
IMAGE_PIXELS: Final = Int(bounds.PIXEL_LIMIT)
VIDEO_TOTAL_PIXELS: Final = Int((1, bounds.PIXELS * bounds.FRAMES[1]))
VIDEO_FRAMES: Final = Int(bounds.FRAMES)
VIDEO_FRAME_RATE: Final = Number(bounds.FPS)


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """What holds where a picture or a clip does not say otherwise itself."""

    picture: ImageLayoutOptions = ImageLayoutOptions()
    clip: VideoLayoutOptions = VideoLayoutOptions()


def with_options_said(layout_options: Any, **said: Any) -> Any:
    """A wish with what is said besides."""
    return replace(layout_options, **{name: value for name, value in said.items() if value is not None})


@dataclass(frozen=True, slots=True)
class ProcessorOptions:
    """vLLM's `mm_processor_kwargs`."""

    min_pixels: int | None = accepts(IMAGE_PIXELS, "Least pixels that a picture or frame is resized to.")
    max_pixels: int | None = accepts(IMAGE_PIXELS, "Most pixels of one.")
    total_pixels: int | None = accepts(VIDEO_TOTAL_PIXELS, "Most pixels of all frames of a clip together.")
    fps: float | None = accepts(VIDEO_FRAME_RATE, "Frames that are shown of a second of a clip.")
    max_frames: int | None = accepts(VIDEO_FRAMES, "Most frames of a clip.")
    num_frames: int | None = accepts(VIDEO_FRAMES, "Exactly so many frames of a clip.")


@dataclass(frozen=True, slots=True)
class VideoReadingOptions:
    num_frames: int | None = accepts(VIDEO_FRAMES, "Exactly so many frames of a clip.")
    fps: float | None = accepts(VIDEO_FRAME_RATE, "Frames that are shown of a second of a clip.")
    keyframes: bool | None = accepts(Bool(), ABOUT_KEYFRAMES)


@dataclass(frozen=True, slots=True)
class MediaReadingOptions:
    """vLLM's `media_io_kwargs`."""

    video: VideoReadingOptions | None = accepts(ObjectOf(VideoReadingOptions), "How clips are read.")


def read_media_options(
    processor: ProcessorOptions | None, reading: MediaReadingOptions | None, fps: float | None, max_frames: int | None
) -> MediaOptions:
    """What several fields say together; of two that say the same thing, the more particular one counts."""
    said = processor or ProcessorOptions()
    clip = (reading.video if reading is not None else None) or VideoReadingOptions()
    return MediaOptions(
        ImageLayoutOptions("auto", said.min_pixels, said.max_pixels),
        VideoLayoutOptions(
            fps=fps or clip.fps or said.fps,
            max_frames=max_frames or said.max_frames,
            frames=clip.num_frames or said.num_frames,
            min_pixels=said.min_pixels,
            max_pixels=said.max_pixels,
            total_pixels=said.total_pixels,
            keyframes=bool(clip.keyframes),
        ),
    )


@dataclass(frozen=True, slots=True)
class ChatTextPart:
    type: str = requires(OneOf(("text",)), "The kind of part.")
    text: str = requires(Text(), "The text.")


@dataclass(frozen=True, slots=True)
class ChatRefusalPart:
    type: str = requires(OneOf(("refusal",)), "The kind of part.")
    refusal: str = requires(Text(), "What the assistant said when it declined.")

    @property
    def text(self) -> str:
        return self.refusal


@dataclass(frozen=True, slots=True)
class ChatImageUrl:
    url: ImageFile = requires(ImageUrlKind(), "The picture, as a data URL.")
    detail: str | None = accepts(IMAGE_DETAIL, ABOUT_DETAIL)


@dataclass(frozen=True, slots=True)
class ChatImagePart:
    type: str = requires(OneOf(("image_url",)), "The kind of part.")
    image_url: ChatImageUrl | ImageFile = requires(Either((ImageUrlKind(), ObjectOf(ChatImageUrl))), "The picture.")
    min_pixels: int | None = accepts(IMAGE_PIXELS, "Least pixels that it is resized to.")
    max_pixels: int | None = accepts(IMAGE_PIXELS, "Most pixels.")

    def medium(self, wishes: MediaOptions) -> RequestMedia:
        held = self.image_url if isinstance(self.image_url, ChatImageUrl) else ChatImageUrl(self.image_url, None)
        said = {"detail": held.detail, "min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return RequestImage(held.url, with_options_said(wishes.picture, **said))


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoOptions:
    fps: float | None = accepts(VIDEO_FRAME_RATE, "Frames that are shown of a second.")
    max_frames: int | None = accepts(VIDEO_FRAMES, "Most frames.")
    nframes: int | None = accepts(VIDEO_FRAMES, "Exactly so many frames.")
    min_pixels: int | None = accepts(IMAGE_PIXELS, "Least pixels that a frame is resized to.")
    max_pixels: int | None = accepts(IMAGE_PIXELS, "Most pixels of a frame.")
    total_pixels: int | None = accepts(VIDEO_TOTAL_PIXELS, "Most pixels of all frames together.")
    keyframes: bool | None = accepts(Bool(), ABOUT_KEYFRAMES)

    def layout_options(self, wishes: MediaOptions) -> Any:
        said = {name: getattr(self, name) for name in ("min_pixels", "max_pixels", "total_pixels", "keyframes")}
        return with_options_said(wishes.clip, fps=self.fps, max_frames=self.max_frames, frames=self.nframes, **said)


@dataclass(frozen=True, slots=True)
class ChatVideoUrl:
    url: Video = requires(VideoUrlKind(), "The clip, as a data URL.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatVideoUrlPart(VideoOptions):
    type: str = requires(OneOf(("video_url",)), "The kind of part.")
    video_url: ChatVideoUrl = requires(ObjectOf(ChatVideoUrl), "The clip.")

    def medium(self, wishes: MediaOptions) -> RequestMedia:
        return RequestVideo(self.video_url.url, self.layout_options(wishes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatVideoPart(VideoOptions):
    type: str = requires(OneOf(("video",)), "The kind of part.")
    video: Video = requires(
        Either((VideoUrlKind(), VideoFramesKind())), "The clip as a data URL, or a list of its frames."
    )

    def medium(self, wishes: MediaOptions) -> RequestMedia:
        return RequestVideo(self.video, self.layout_options(wishes))


@dataclass(frozen=True, slots=True)
class FileContent:
    file_data: PdfFile = requires(
        Base64PdfKind(), "A PDF, as a data URL or in base64. Its pages are shown as pictures."
    )
    filename: str | None = accepts(Text(NAME_CHARS), "Not shown to the model.")
    file_id: None = refuses("is not supported: this server keeps no files. Send file_data.")


@dataclass(frozen=True, slots=True)
class ChatFilePart:
    type: str = requires(OneOf(("file",)), "The kind of part.")
    file: FileContent = requires(ObjectOf(FileContent), "The file.")

    def medium(self, wishes: MediaOptions) -> RequestMedia:
        return RequestPdf(self.file.file_data, wishes.picture)


@dataclass(frozen=True, slots=True)
class AudioContent:
    data: TranscribedText = requires(
        Base64AudioKind(), "The sound in base64: FLAC, MP3, MP4, M4A, Ogg, WAV, WebM or AAC."
    )
    format: str | None = accepts(Text(NAME_CHARS), "What it is; the file itself tells.")


@dataclass(frozen=True, slots=True)
class ChatAudioPart:
    type: str = requires(OneOf(("input_audio",)), "The kind of part.")
    input_audio: AudioContent = requires(ObjectOf(AudioContent), "The sound, which the model that hears writes down.")

    @property
    def text(self) -> TranscribedText:
        return self.input_audio.data


CHAT_MEDIA_PARTS = {
    "image_url": MediaPartKind("image", ObjectOf(ChatImagePart)),
    "video_url": MediaPartKind("video", ObjectOf(ChatVideoUrlPart)),
    "video": MediaPartKind("video", ObjectOf(ChatVideoPart)),
    "input_audio": MediaPartKind("audio", ObjectOf(ChatAudioPart)),
    "audio_url": MediaPartKind("audio"),
    "file": MediaPartKind("file", ObjectOf(ChatFilePart)),
}
CHAT_MEDIA_REFUSED = {name: MediaPartKind(tag.what) for name, tag in CHAT_MEDIA_PARTS.items()}
CHAT_CONTENT = text_or(tagged("type", ChatTextPart, media=CHAT_MEDIA_PARTS), least=1)
CHAT_INSTRUCTION_CONTENT = text_or(tagged("type", ChatTextPart, media=CHAT_MEDIA_REFUSED), least=1)
CHAT_ANSWER_CONTENT = text_or(tagged("type", ChatTextPart, ChatRefusalPart, media=CHAT_MEDIA_REFUSED), least=1)
ChatMediaPart = ChatImagePart | ChatVideoUrlPart | ChatVideoPart | ChatFilePart
ChatContent = str | tuple[ChatTextPart | ChatRefusalPart | ChatMediaPart | ChatAudioPart | OmittedMedia, ...]


@dataclass(frozen=True, slots=True)
class ChatInstruction:
    role: str = requires(OneOf(("system", "developer")), "Who speaks.")
    content: ChatContent = requires(CHAT_INSTRUCTION_CONTENT, "The instructions.")
    name: str | None = accepts(Text(NAME_CHARS), "A name for the speaker, for templates that show one.")

    def as_dict(self, wishes: MediaOptions) -> dict[str, Any]:
        return message_as_dict(self.role, self.content, self.name, wishes)


@dataclass(frozen=True, slots=True)
class ChatUserMessage:
    role: str = requires(OneOf(("user",)), "Who speaks.")
    content: ChatContent = requires(CHAT_CONTENT, "What the user says.")
    name: str | None = accepts(Text(NAME_CHARS), "A name for the speaker, for templates that show one.")

    def as_dict(self, wishes: MediaOptions) -> dict[str, Any]:
        return message_as_dict(self.role, self.content, self.name, wishes)


@dataclass(frozen=True, slots=True)
class ChatPastFunction:
    name: str = requires(Text(NAME_CHARS, least=1), "The function's name.")
    arguments: Any = accepts(Anything(), "Its arguments, as JSON text; what is no JSON object is shown as it is.")


@dataclass(frozen=True, slots=True)
class ChatPastCustom:
    name: str = requires(Text(NAME_CHARS, least=1), "The tool's name.")
    input: str = requires(Text(), "What it was given.")


@dataclass(frozen=True, slots=True)
class ChatPastCustomCall:
    id: str = requires(Text(IDENTIFIER_CHARS), "The call's id, to which a tool message answers.")
    type: str = requires(OneOf(("custom",)), "A custom tool was called.")
    custom: ChatPastCustom = requires(ObjectOf(ChatPastCustom), "What was called.")

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.custom.name, "arguments": custom_input_as_arguments(self.custom.input)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatPastToolCall:
    id: str = requires(Text(IDENTIFIER_CHARS), "The call's id, to which a tool message answers.")
    type: str = requires(OneOf(("function",)), "A function was called.")
    function: ChatPastFunction = requires(ObjectOf(ChatPastFunction), "What was called.")

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": arguments_as_text(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatAssistantMessage:
    role: str = requires(OneOf(("assistant",)), "Who speaks.")
    content: ChatContent | None = accepts(CHAT_ANSWER_CONTENT, "What the assistant said; none is an empty turn.")
    name: str | None = accepts(Text(NAME_CHARS), "A name for the speaker, for templates that show one.")
    refusal: str | None = accepts(Text(), "What the assistant said when it declined; stands in for the content.")
    tool_calls: tuple[ChatPastToolCall | ChatPastCustomCall, ...] = accepts(
        ListOf(tagged("type", ChatPastToolCall, ChatPastCustomCall), TOOL_CALLS), "The calls it made.", default=()
    )
    reasoning_content: str | None = accepts(Text(), "What it thought, for templates that show past thinking.")
    reasoning: str | None = accepts(Text(), "Another name of reasoning_content.")
    audio: None = refuses(f"cannot be honoured: audio {TEXT_ONLY_REFUSAL}")
    function_call: None = refuses("is not supported; send `tool_calls`, which replaced it.")

    def as_dict(self, wishes: MediaOptions) -> dict[str, Any]:
        content = self.content if self.content is not None else self.refusal
        message = message_as_dict(self.role, content, self.name, wishes)
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thought
        return message


@dataclass(frozen=True, slots=True)
class ChatToolMessage:
    role: str = requires(OneOf(("tool",)), "Who speaks.")
    content: ChatContent = requires(CHAT_CONTENT, "What the tool returned.")
    tool_call_id: str = requires(Text(IDENTIFIER_CHARS), "The call that this answers.")
    name: str | None = accepts(Text(NAME_CHARS), "The function that was called, for templates that show it.")

    def as_dict(self, wishes: MediaOptions) -> dict[str, Any]:
        return message_as_dict(self.role, self.content, self.name, wishes) | {"tool_call_id": self.tool_call_id}


ChatMessage = ChatInstruction | ChatUserMessage | ChatAssistantMessage | ChatToolMessage

CHAT_MESSAGE = tagged(
    *("role", ChatInstruction, ChatUserMessage, ChatAssistantMessage, ChatToolMessage),
    refused={"function": "messages are not supported; send role 'tool', which replaced it."},
)
CHAT_CONVERSATION = MessageListKind(ListOf(CHAT_MESSAGE, most=MESSAGES, least=1))


def messages_as_dicts(messages: tuple[ChatMessage, ...], wishes: MediaOptions = MediaOptions()) -> list[dict[str, Any]]:
    """As templates take them; pictures and clips are shown as `wishes` say where they do not say it themselves."""
    return [message.as_dict(wishes) for message in messages]


def message_as_dict(role: str, content: ChatContent | None, name: str | None, wishes: MediaOptions) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": content_as_template_parts(content, wishes)}
    return message if name is None else message | {"name": name}


def content_as_template_parts(content: ChatContent | None, wishes: MediaOptions) -> str | list[dict[str, Any]] | None:
    """Parts stay parts: whether and how they are joined is the template's affair."""
    if content is None or isinstance(content, str):
        return content
    return [template_part(part.medium(wishes) if isinstance(part, ChatMediaPart) else part.text) for part in content]
