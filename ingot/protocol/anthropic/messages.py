"""Anthropic's messages as they come over the wire: roles, and the blocks that their contents are made of."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.media.medium import Medium, PdfMedium, PictureMedium
from ingot.media.pdf import PdfFile
from ingot.media.picture import Picture
from ingot.protocol.chat.media import InPast, MediaTag, MessageList, Unseen
from ingot.protocol.chat.media_files import Base64Pdf, Base64Picture, PdfUrl, PictureUrl
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Anything, Bool, Either, ListOf, OneOf, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires, tagged, text_or

HOSTED = "is of a tool that Anthropic's servers run; this server runs none."
NO_FILES = "is not supported: this server keeps no files. Send the picture itself, in base64."
UPLOADS = {"container_upload": HOSTED}
SERVED_ELSEWHERE = dict.fromkeys(
    (
        *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
        *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
        *("mcp_tool_use", "mcp_tool_result"),
    ),
    HOSTED,
) | {"compaction": "is not supported: this server does not summarise conversations."}


@dataclass(frozen=True, slots=True)
class CacheControl:
    type: str = requires(OneOf(("ephemeral",)), "What may be kept.")
    ttl: str | None = accepts(OneOf(("5m", "1h")), "The server itself decides for how long.")
    scope: str | None = accepts(Text(bounds.NAME_CHARS), "Kept prompts are shared by requests of one key.")


def marks() -> Any:
    """The field `cache_control`, which blocks of every kind may have."""
    return accepts(ObjectOf(CacheControl), "A mark for the prompt cache, which here is automatic.")


@dataclass(frozen=True, slots=True)
class CitationsOff:
    enabled: None = refuses("is not supported: no citations are made. Send false.", False)


@dataclass(frozen=True, slots=True)
class TextBlock:
    type: str = requires(OneOf(("text",)), "The kind of block.")
    text: str = requires(Text(), "The text.")
    cache_control: CacheControl | None = marks()
    citations: tuple[Any, ...] = accepts(
        ListOf(Anything(dict), bounds.PARTS), "What an earlier answer cited; the model does not see it.", default=()
    )


TEXT_BLOCKS = ListOf(tagged("type", TextBlock), most=bounds.PARTS)
SYSTEM = Either((Text(), TEXT_BLOCKS))


@dataclass(frozen=True, slots=True)
class Base64Image:
    type: str = requires(OneOf(("base64",)), "The picture itself.")
    media_type: str = requires(
        OneOf(("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")), "Its type; the file's own counts."
    )
    data: Picture = requires(Base64Picture(), "The file, in base64.")

    @property
    def picture(self) -> Picture:
        return self.data


@dataclass(frozen=True, slots=True)
class UrlImage:
    type: str = requires(OneOf(("url",)), "Where the picture is.")
    url: Picture = requires(PictureUrl(), "Its address, where the settings allow to fetch it, or a data URL.")

    @property
    def picture(self) -> Picture:
        return self.url


@dataclass(frozen=True, slots=True)
class ImageBlock:
    type: str = requires(OneOf(("image",)), "The kind of block.")
    source: Base64Image | UrlImage = requires(
        tagged("type", Base64Image, UrlImage, refused={"file": NO_FILES}), "The picture."
    )
    cache_control: CacheControl | None = marks()

    @property
    def medium(self) -> Medium:
        return PictureMedium(self.source.picture)


IMAGE = {"image": MediaTag("image", ObjectOf(ImageBlock))}
NO_IMAGE = {"image": MediaTag("image")}


@dataclass(frozen=True, slots=True)
class PlainSource:
    type: str = requires(OneOf(("text",)), "The document is plain text.")
    data: str = requires(Text(), "The text.")
    media_type: str = requires(OneOf(("text/plain",)), "Plain text.")

    @property
    def text(self) -> str:
        return self.data


@dataclass(frozen=True, slots=True)
class BlocksSource:
    type: str = requires(OneOf(("content",)), "The document is made of blocks.")
    content: str | tuple[TextBlock | Unseen, ...] = requires(
        text_or(tagged("type", TextBlock, refused=UPLOADS, media=NO_IMAGE)), "The blocks."
    )

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(block.text for block in self.content)


@dataclass(frozen=True, slots=True)
class Base64Source:
    type: str = requires(OneOf(("base64",)), "The document is a PDF, whose pages are shown as pictures.")
    media_type: str = requires(OneOf(("application/pdf",)), "Its type.")
    data: PdfFile = requires(Base64Pdf(), "The file, in base64.")

    @property
    def file(self) -> PdfFile:
        return self.data


@dataclass(frozen=True, slots=True)
class UrlSource:
    type: str = requires(OneOf(("url",)), "Where the PDF is.")
    url: PdfFile = requires(PdfUrl(), "Its address, where the settings allow to fetch it, or a data URL.")

    @property
    def file(self) -> PdfFile:
        return self.url


PDFS = {
    "base64": MediaTag("document", ObjectOf(Base64Source)),
    "url": MediaTag("document", ObjectOf(UrlSource)),
}


@dataclass(frozen=True, slots=True)
class DocumentBlock:
    type: str = requires(OneOf(("document",)), "The kind of block.")
    source: PlainSource | BlocksSource | Base64Source | UrlSource | Unseen = requires(
        tagged(
            *("type", PlainSource, BlocksSource),
            refused={"file": "is not supported: this server keeps no files. Send the document itself."},
            unseen={"file": "document"},
            media=PDFS,
        ),
        "The document, or its text.",
    )
    title: str | None = accepts(Text(), "Its title.")
    context: str | None = accepts(Text(), "What the model should know of it.")
    citations: CitationsOff | None = accepts(ObjectOf(CitationsOff), "Citations are not made.")
    cache_control: CacheControl | None = marks()

    @property
    def said(self) -> list[str | Medium]:
        """Texts, and the pages of a PDF."""
        about = [part for part in (self.title, self.context) if part]
        if isinstance(self.source, Base64Source | UrlSource):
            return [*(["\n".join(about)] if about else []), PdfMedium(self.source.file)]
        return ["\n".join([*about, *([self.source.text] if self.source.text else [])])]


@dataclass(frozen=True, slots=True)
class SearchResultBlock:
    type: str = requires(OneOf(("search_result",)), "The kind of block.")
    source: str = requires(Text(), "Where it was found.")
    title: str = requires(Text(), "Its title.")
    content: tuple[TextBlock, ...] = requires(TEXT_BLOCKS, "What was found.")
    citations: CitationsOff | None = accepts(ObjectOf(CitationsOff), "Citations are not made.")
    cache_control: CacheControl | None = marks()

    @property
    def text(self) -> str:
        return "\n".join((f"{self.title} ({self.source})", *(block.text for block in self.content)))


@dataclass(frozen=True, slots=True)
class ToolReferenceBlock:
    type: str = requires(OneOf(("tool_reference",)), "The kind of block.")
    tool_name: str = requires(Text(bounds.TOOL_NAME_CHARS), "A tool whose loading was deferred.")
    cache_control: CacheControl | None = marks()

    @property
    def text(self) -> str:
        return f"The tool {self.tool_name} may be called now."


ToolResultContent = Unseen | ImageBlock | TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock
TOLD = (TextBlock, DocumentBlock, SearchResultBlock)
TOOL_RESULT = ListOf(tagged("type", *TOLD, ToolReferenceBlock, refused=UPLOADS, media=IMAGE), most=bounds.PARTS)


def said_by(block: ToolResultContent) -> list[str | Medium]:
    if isinstance(block, DocumentBlock):
        return block.said
    return [block.medium if isinstance(block, ImageBlock) else block.text]


@dataclass(frozen=True, slots=True)
class ToolResultBlock:
    type: str = requires(OneOf(("tool_result",)), "The kind of block.")
    tool_use_id: str = requires(Text(bounds.IDENTIFIER_CHARS), "The call that this answers.")
    content: str | tuple[ToolResultContent, ...] = accepts(
        Either((Text(), InPast(TOOL_RESULT))), "What the tool returned.", default=""
    )
    is_error: bool = accepts(Bool(), "The tool failed, and says how.", default=False)
    toolset_name: None = refuses("is not supported: there are no toolsets here.")
    cache_control: CacheControl | None = marks()

    @property
    def said(self) -> str | list[str | Medium]:
        """A text, or where there are pictures in it texts and those."""
        failed = "The tool failed: " if self.is_error else ""
        if isinstance(self.content, str):
            return failed + self.content
        said = [each for block in self.content for each in said_by(block)]
        texts = [each for each in said if isinstance(each, str)]
        if len(texts) == len(said):
            return failed + "\n".join(texts)
        return [failed, *said] if failed else said

    @property
    def loaded(self) -> set[str]:
        """The deferred tools that may be called from here on."""
        blocks = () if isinstance(self.content, str) else self.content
        return {block.tool_name for block in blocks if isinstance(block, ToolReferenceBlock)}


@dataclass(frozen=True, slots=True)
class Caller:
    type: str = requires(OneOf(("direct",)), "Who called: the model itself.")


@dataclass(frozen=True, slots=True)
class ToolUseBlock:
    type: str = requires(OneOf(("tool_use",)), "The kind of block.")
    id: str = requires(Text(bounds.IDENTIFIER_CHARS), "The call's id, to which a tool_result answers.")
    name: str = requires(Text(bounds.NAME_CHARS, least=1), "The tool's name.")
    input: Any = accepts(Anything(), "Its arguments; what is no JSON object is shown as it is.")
    caller: Caller | None = accepts(ObjectOf(Caller), "Calls are the model's own.")
    toolset_name: None = refuses("is not supported: there are no toolsets here.")
    cache_control: CacheControl | None = marks()


@dataclass(frozen=True, slots=True)
class ThinkingBlock:
    type: str = requires(OneOf(("thinking",)), "The kind of block.")
    thinking: str = requires(Text(), "What the model thought.")
    signature: str = accepts(
        Text(), "As it came. Thinking that this server did not sign is left out of the prompt.", default=""
    )
    cache_control: CacheControl | None = marks()


@dataclass(frozen=True, slots=True)
class RedactedBlock:
    type: str = requires(OneOf(("redacted_thinking",)), "The kind of block.")
    data: str = requires(Text(), "What another server sealed; left out of the prompt.")
    cache_control: CacheControl | None = marks()


UserBlock = Unseen | ImageBlock | TextBlock | DocumentBlock | SearchResultBlock | ToolResultBlock
AssistantBlock = Unseen | TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock


@dataclass(frozen=True, slots=True)
class UserMessage:
    role: str = requires(OneOf(("user",)), "Who speaks.")
    content: str | tuple[UserBlock, ...] = requires(
        text_or(tagged("type", *TOLD, ToolResultBlock, refused=UPLOADS, media=IMAGE), least=1),
        "What the user says, and what tools returned.",
    )

    @property
    def blocks(self) -> tuple[UserBlock, ...]:
        return (TextBlock("text", self.content),) if isinstance(self.content, str) else self.content


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    role: str = requires(OneOf(("assistant",)), "Who speaks.")
    content: str | tuple[AssistantBlock, ...] = requires(
        text_or(
            tagged(
                *("type", TextBlock, ThinkingBlock, RedactedBlock, ToolUseBlock),
                refused=UPLOADS | SERVED_ELSEWHERE,
                media=NO_IMAGE,
            )
        ),
        "What the assistant said, thought and called.",
    )

    @property
    def blocks(self) -> tuple[AssistantBlock, ...]:
        return (TextBlock("text", self.content),) if isinstance(self.content, str) else self.content


@dataclass(frozen=True, slots=True)
class SystemMessage:
    role: str = requires(OneOf(("system",)), "Who speaks.")
    content: str | tuple[TextBlock, ...] = requires(
        Either((Text(least=1), TEXT_BLOCKS)), "Instructions that hold from here on."
    )

    @property
    def blocks(self) -> tuple[TextBlock, ...]:
        return (TextBlock("text", self.content),) if isinstance(self.content, str) else self.content


Message = UserMessage | AssistantMessage | SystemMessage
CONVERSATION = MessageList(
    ListOf(tagged("role", UserMessage, AssistantMessage, SystemMessage), most=bounds.MESSAGES, least=1)
)
