"""The messages of a chat on the wire, and as a chat template takes them; and the options for images and videos, under
the names that several servers have for them."""

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
from ingot.protocol.chat.ask import ABOUT_ARGUMENTS, ABOUT_ROLE, custom_input_as_arguments, tool_call_dict
from ingot.protocol.chat.media import (
    BASE64_AUDIO,
    BASE64_PDF,
    IMAGE_URL,
    TEXT_ONLY_REFUSAL,
    VIDEO_FRAMES,
    VIDEO_URL,
    MediaPartKind,
    MessageListKind,
    OmittedMedia,
    template_part,
)
from ingot.protocol.schema.bounds import IDENTIFIER_CHARS, MESSAGES, NAME_CHARS, TOOL_CALLS
from ingot.protocol.schema.fields import Anything, Bool, Either, Int, ListOf, Number, OneOf, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires, tagged, text_or

IMAGE_DETAIL: Final = OneOf(("auto", "low", "high"))
ABOUT_DETAIL = "The resolution; `low` takes few tokens. The default is the model's own."
ABOUT_KEYFRAMES = (
    "Use the keyframe nearest to each frame instead, where one is within half of the distance between frames. "
    "Long videos are decoded many times as fast."
)
ABOUT_SPEAKER = "A name for the speaker, for templates that show one."
CALL_ID = "The call's id, to which a tool message answers."
IMAGE_PIXELS: Final = Int(bounds.PIXEL_LIMIT)
VIDEO_TOTAL_PIXELS: Final = Int((1, bounds.PIXELS * bounds.FRAMES[1]))
FRAME_COUNT: Final = Int(bounds.FRAMES)
VIDEO_FRAME_RATE: Final = Number(bounds.FPS)


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """A request's defaults for its images and videos."""

    image: ImageLayoutOptions = ImageLayoutOptions()
    video: VideoLayoutOptions = VideoLayoutOptions()


def with_options(defaults: Any, **options: Any) -> Any:
    """`defaults` with the options that are not None."""
    return replace(defaults, **{name: value for name, value in options.items() if value is not None})


@dataclass(frozen=True, slots=True)
class ProcessorOptions:
    """vLLM's `mm_processor_kwargs`."""

    min_pixels: int | None = accepts(IMAGE_PIXELS, "Least pixels that an image or frame is resized to.")
    max_pixels: int | None = accepts(IMAGE_PIXELS, "Most pixels of one.")
    total_pixels: int | None = accepts(VIDEO_TOTAL_PIXELS, "Most pixels of all frames of a video together.")
    fps: float | None = accepts(VIDEO_FRAME_RATE, "Frames per second of a video.")
    max_frames: int | None = accepts(FRAME_COUNT, "Most frames of a video.")
    num_frames: int | None = accepts(FRAME_COUNT, "The exact number of frames of a video.")


@dataclass(frozen=True, slots=True)
class VideoReadingOptions:
    num_frames: int | None = accepts(FRAME_COUNT, "The exact number of frames of a video.")
    fps: float | None = accepts(VIDEO_FRAME_RATE, "Frames per second of a video.")
    keyframes: bool | None = accepts(Bool(), ABOUT_KEYFRAMES)


@dataclass(frozen=True, slots=True)
class MediaReadingOptions:
    """vLLM's `media_io_kwargs`."""

    video: VideoReadingOptions | None = accepts(ObjectOf(VideoReadingOptions), "How videos are read.")


def read_media_options(
    processor: ProcessorOptions | None, reading: MediaReadingOptions | None, fps: float | None, max_frames: int | None
) -> MediaOptions:
    """The defaults that several fields set together; of two for the same option, the more specific one counts."""
    general = processor or ProcessorOptions()
    video = (reading.video if reading is not None else None) or VideoReadingOptions()
    return MediaOptions(
        ImageLayoutOptions("auto", general.min_pixels, general.max_pixels),
        VideoLayoutOptions(
            fps=fps or video.fps or general.fps,
            max_frames=max_frames or general.max_frames,
            frames=video.num_frames or general.num_frames,
            min_pixels=general.min_pixels,
            max_pixels=general.max_pixels,
            total_pixels=general.total_pixels,
            keyframes=bool(video.keyframes),
        ),
    )


@dataclass(frozen=True, slots=True)
class ChatTextPart:
    type: str = requires(OneOf(("text",)), "The kind of part.")
    text: str = requires(Text(), "The text.")


@dataclass(frozen=True, slots=True)
class ChatRefusalPart:
    type: str = requires(OneOf(("refusal",)), "The kind of part.")
    refusal: str = requires(Text(), "The assistant's refusal.")

    @property
    def text(self) -> str:
        return self.refusal


@dataclass(frozen=True, slots=True)
class ChatImageUrl:
    url: ImageFile = requires(IMAGE_URL, "The image, as a data URL.")
    detail: str | None = accepts(IMAGE_DETAIL, ABOUT_DETAIL)


@dataclass(frozen=True, slots=True)
class ChatImagePart:
    type: str = requires(OneOf(("image_url",)), "The kind of part.")
    image_url: ChatImageUrl | ImageFile = requires(Either((IMAGE_URL, ObjectOf(ChatImageUrl))), "The image.")
    min_pixels: int | None = accepts(IMAGE_PIXELS, "Least pixels that it is resized to.")
    max_pixels: int | None = accepts(IMAGE_PIXELS, "Most pixels.")

    def medium(self, defaults: MediaOptions) -> RequestMedia:
        image = self.image_url if isinstance(self.image_url, ChatImageUrl) else ChatImageUrl(self.image_url, None)
        options = {"detail": image.detail, "min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return RequestImage(image.url, with_options(defaults.image, **options))


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoOptions:
    fps: float | None = accepts(VIDEO_FRAME_RATE, "Frames per second.")
    max_frames: int | None = accepts(FRAME_COUNT, "Most frames.")
    nframes: int | None = accepts(FRAME_COUNT, "The exact number of frames.")
    min_pixels: int | None = accepts(IMAGE_PIXELS, "Least pixels that a frame is resized to.")
    max_pixels: int | None = accepts(IMAGE_PIXELS, "Most pixels of a frame.")
    total_pixels: int | None = accepts(VIDEO_TOTAL_PIXELS, "Most pixels of all frames together.")
    keyframes: bool | None = accepts(Bool(), ABOUT_KEYFRAMES)

    def layout_options(self, defaults: MediaOptions) -> Any:
        same = ("fps", "max_frames", "min_pixels", "max_pixels", "total_pixels", "keyframes")
        return with_options(defaults.video, frames=self.nframes, **{name: getattr(self, name) for name in same})


@dataclass(frozen=True, slots=True)
class ChatVideoUrl:
    url: Video = requires(VIDEO_URL, "The video, as a data URL.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatVideoUrlPart(VideoOptions):
    type: str = requires(OneOf(("video_url",)), "The kind of part.")
    video_url: ChatVideoUrl = requires(ObjectOf(ChatVideoUrl), "The video.")

    def medium(self, defaults: MediaOptions) -> RequestMedia:
        return RequestVideo(self.video_url.url, self.layout_options(defaults))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatVideoPart(VideoOptions):
    type: str = requires(OneOf(("video",)), "The kind of part.")
    video: Video = requires(Either((VIDEO_URL, VIDEO_FRAMES)), "The video as a data URL, or a list of its frames.")

    def medium(self, defaults: MediaOptions) -> RequestMedia:
        return RequestVideo(self.video, self.layout_options(defaults))


@dataclass(frozen=True, slots=True)
class FileContent:
    file_data: PdfFile = requires(BASE64_PDF, "A PDF, as a data URL or in base64. Its pages become images.")
    filename: str | None = accepts(Text(NAME_CHARS), "Not shown to the model.")
    file_id: None = refuses("is not supported: this server stores no files. Send file_data.")


@dataclass(frozen=True, slots=True)
class ChatFilePart:
    type: str = requires(OneOf(("file",)), "The kind of part.")
    file: FileContent = requires(ObjectOf(FileContent), "The file.")

    def medium(self, defaults: MediaOptions) -> RequestMedia:
        return RequestPdf(self.file.file_data, defaults.image)


@dataclass(frozen=True, slots=True)
class AudioContent:
    data: TranscribedText = requires(BASE64_AUDIO, "The audio in base64: FLAC, MP3, MP4, M4A, Ogg, WAV, WebM or AAC.")
    format: str | None = accepts(Text(NAME_CHARS), "Its format; found out from the file itself.")


@dataclass(frozen=True, slots=True)
class ChatAudioPart:
    type: str = requires(OneOf(("input_audio",)), "The kind of part.")
    input_audio: AudioContent = requires(
        ObjectOf(AudioContent), "The audio, of which the model is given the transcript."
    )

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


class ChatMessageFields:
    """What messages of all roles have."""

    __slots__ = ()
    role: str
    content: Any
    name: str | None

    def as_dict(self, defaults: MediaOptions) -> dict[str, Any]:
        """As templates take it. Parts stay parts, which the template joins or not."""
        content = self.content
        if content is not None and not isinstance(content, str):
            content = [
                template_part(part.medium(defaults) if isinstance(part, ChatMediaPart) else part.text)
                for part in content
            ]
        made = {"role": self.role, "content": content}
        return made if self.name is None else made | {"name": self.name}


@dataclass(frozen=True, slots=True)
class ChatInstruction(ChatMessageFields):
    role: str = requires(OneOf(("system", "developer")), ABOUT_ROLE)
    content: ChatContent = requires(CHAT_INSTRUCTION_CONTENT, "The instructions.")
    name: str | None = accepts(Text(NAME_CHARS), ABOUT_SPEAKER)


@dataclass(frozen=True, slots=True)
class ChatUserMessage(ChatMessageFields):
    role: str = requires(OneOf(("user",)), ABOUT_ROLE)
    content: ChatContent = requires(CHAT_CONTENT, "The user's message.")
    name: str | None = accepts(Text(NAME_CHARS), ABOUT_SPEAKER)


@dataclass(frozen=True, slots=True)
class ChatPastFunction:
    name: str = requires(Text(NAME_CHARS, least=1), "The function's name.")
    arguments: Any = accepts(Anything(), ABOUT_ARGUMENTS)


@dataclass(frozen=True, slots=True)
class ChatPastCustom:
    name: str = requires(Text(NAME_CHARS, least=1), "The tool's name.")
    input: str = requires(Text(), "Its input.")


@dataclass(frozen=True, slots=True)
class ChatPastCustomCall:
    id: str = requires(Text(IDENTIFIER_CHARS), CALL_ID)
    type: str = requires(OneOf(("custom",)), "A custom tool was called.")
    custom: ChatPastCustom = requires(ObjectOf(ChatPastCustom), "What was called.")

    def as_dict(self) -> dict[str, Any]:
        return tool_call_dict(self.id, self.custom.name, custom_input_as_arguments(self.custom.input))


@dataclass(frozen=True, slots=True)
class ChatPastToolCall:
    id: str = requires(Text(IDENTIFIER_CHARS), CALL_ID)
    type: str = requires(OneOf(("function",)), "A function was called.")
    function: ChatPastFunction = requires(ObjectOf(ChatPastFunction), "What was called.")

    def as_dict(self) -> dict[str, Any]:
        return tool_call_dict(self.id, self.function.name, self.function.arguments)


@dataclass(frozen=True, slots=True)
class ChatAssistantMessage(ChatMessageFields):
    role: str = requires(OneOf(("assistant",)), ABOUT_ROLE)
    content: ChatContent | None = accepts(CHAT_ANSWER_CONTENT, "The assistant's answer; none is an empty turn.")
    name: str | None = accepts(Text(NAME_CHARS), ABOUT_SPEAKER)
    refusal: str | None = accepts(Text(), "The assistant's refusal, used where there is no content.")
    tool_calls: tuple[ChatPastToolCall | ChatPastCustomCall, ...] = accepts(
        ListOf(tagged("type", ChatPastToolCall, ChatPastCustomCall), TOOL_CALLS), "The calls it made.", default=()
    )
    reasoning_content: str | None = accepts(Text(), "Its thinking, for templates that show past thinking.")
    reasoning: str | None = accepts(Text(), "Another name of reasoning_content.")
    audio: None = refuses(f"is refused: audio {TEXT_ONLY_REFUSAL}")
    function_call: None = refuses("is not supported; send `tool_calls`, which replaced it.")

    def as_dict(self, defaults: MediaOptions) -> dict[str, Any]:
        message = ChatMessageFields.as_dict(self, defaults)
        if self.content is None:
            message["content"] = self.refusal
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if thinking := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thinking
        return message


@dataclass(frozen=True, slots=True)
class ChatToolMessage(ChatMessageFields):
    role: str = requires(OneOf(("tool",)), ABOUT_ROLE)
    content: ChatContent = requires(CHAT_CONTENT, "What the tool returned.")
    tool_call_id: str = requires(Text(IDENTIFIER_CHARS), "The call that this answers.")
    name: str | None = accepts(Text(NAME_CHARS), "The function that was called, for templates that show it.")

    def as_dict(self, defaults: MediaOptions) -> dict[str, Any]:
        return ChatMessageFields.as_dict(self, defaults) | {"tool_call_id": self.tool_call_id}


ChatMessage = ChatInstruction | ChatUserMessage | ChatAssistantMessage | ChatToolMessage

CHAT_MESSAGE = tagged(
    *("role", ChatInstruction, ChatUserMessage, ChatAssistantMessage, ChatToolMessage),
    refused={"function": "messages are not supported; send role 'tool', which replaced it."},
)
CHAT_CONVERSATION = MessageListKind(ListOf(CHAT_MESSAGE, most=MESSAGES, least=1))


def messages_as_dicts(
    messages: tuple[ChatMessage, ...], defaults: MediaOptions = MediaOptions()
) -> list[dict[str, Any]]:
    """As templates take them."""
    return [message.as_dict(defaults) for message in messages]
