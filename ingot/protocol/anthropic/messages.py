"""Anthropic's messages: roles and content blocks on the wire, and the chat that templates take.

A chat has one message per turn, thinking that this server signed, and tool results as messages of their own. Thinking
without a valid signature is left out and named in the receipt.
"""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.errors import BadRequest
from ingot.media.images import ImageFile
from ingot.media.items import RequestImage, RequestMedia, RequestPdf
from ingot.media.pdf import PdfFile
from ingot.protocol.chat.ask import ABOUT_ARGUMENTS, ABOUT_ROLE, tool_call_dict
from ingot.protocol.chat.media import (
    BASE64_IMAGE,
    BASE64_PDF,
    IMAGE_URL,
    PDF_URL,
    MediaPartKind,
    MessageListKind,
    OmittedMedia,
    PastContentKind,
    template_content,
)
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Anything, BodyReading, Bool, Either, ListOf, OneOf, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires, tagged, text_or
from ingot.protocol.served import ThinkingSeal

HOSTED_TOOL_REFUSED = "belongs to a tool that Anthropic's servers run; this server runs none."
NO_FILES = "is not supported: this server stores no files. Send the image itself, in base64."
ABOUT_BLOCK = "The kind of block."
ABOUT_URL = "Its URL, where the settings allow its host, or a data URL."
NO_TOOLSETS = "is not supported: there are no toolsets here."
UPLOADS_REFUSED = {"container_upload": HOSTED_TOOL_REFUSED}
HOSTED_BLOCKS_REFUSED = dict.fromkeys(
    (
        *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
        *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
        *("mcp_tool_use", "mcp_tool_result"),
    ),
    HOSTED_TOOL_REFUSED,
) | {"compaction": "is not supported: this server does not summarise conversations."}


@dataclass(frozen=True, slots=True)
class CacheControl:
    type: str = requires(OneOf(("ephemeral",)), "The kind of caching.")
    ttl: str | None = accepts(OneOf(("5m", "1h")), "The server decides for how long.")
    scope: str | None = accepts(Text(bounds.NAME_CHARS), "Cached prompts are shared by requests of one key.")


def cache_control_field() -> Any:
    """The field `cache_control`, which all blocks may have."""
    return accepts(ObjectOf(CacheControl), "A breakpoint of the prompt cache, which is automatic here.")


@dataclass(frozen=True, slots=True)
class CitationsDisabled:
    enabled: None = refuses("is not supported: no citations are made. Send false.", False)


@dataclass(frozen=True, slots=True)
class TextBlock:
    type: str = requires(OneOf(("text",)), ABOUT_BLOCK)
    text: str = requires(Text(), "The text.")
    cache_control: CacheControl | None = cache_control_field()
    citations: tuple[Any, ...] = accepts(
        ListOf(Anything(dict), bounds.PARTS), "Citations of an earlier answer; not shown to the model.", default=()
    )


TEXT_BLOCKS = ListOf(tagged("type", TextBlock), most=bounds.PARTS)
SYSTEM_PROMPT = Either((Text(), TEXT_BLOCKS))


@dataclass(frozen=True, slots=True)
class Base64ImageSource:
    type: str = requires(OneOf(("base64",)), "The image itself.")
    media_type: str = requires(
        OneOf(("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")), "Its type; the file's own counts."
    )
    data: ImageFile = requires(BASE64_IMAGE, "The file, in base64.")


@dataclass(frozen=True, slots=True)
class UrlImageSource:
    type: str = requires(OneOf(("url",)), "Where the image is.")
    url: ImageFile = requires(IMAGE_URL, ABOUT_URL)


@dataclass(frozen=True, slots=True)
class ImageBlock:
    type: str = requires(OneOf(("image",)), ABOUT_BLOCK)
    source: Base64ImageSource | UrlImageSource = requires(
        tagged("type", Base64ImageSource, UrlImageSource, refused={"file": NO_FILES}), "The image."
    )
    cache_control: CacheControl | None = cache_control_field()

    @property
    def medium(self) -> RequestMedia:
        return RequestImage(self.source.data if isinstance(self.source, Base64ImageSource) else self.source.url)


IMAGE_PARTS = {"image": MediaPartKind("image", ObjectOf(ImageBlock))}
IMAGE_PARTS_REFUSED = {"image": MediaPartKind("image")}


@dataclass(frozen=True, slots=True)
class TextDocumentSource:
    type: str = requires(OneOf(("text",)), "The document is plain text.")
    data: str = requires(Text(), "The text.")
    media_type: str = requires(OneOf(("text/plain",)), "Plain text.")

    @property
    def text(self) -> str:
        return self.data


@dataclass(frozen=True, slots=True)
class BlocksDocumentSource:
    type: str = requires(OneOf(("content",)), "The document is made of blocks.")
    content: str | tuple[TextBlock | OmittedMedia, ...] = requires(
        text_or(tagged("type", TextBlock, refused=UPLOADS_REFUSED, media=IMAGE_PARTS_REFUSED)), "The blocks."
    )

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(block.text for block in self.content)


@dataclass(frozen=True, slots=True)
class Base64PdfSource:
    type: str = requires(OneOf(("base64",)), "The document is a PDF, whose pages become images.")
    media_type: str = requires(OneOf(("application/pdf",)), "Its type.")
    data: PdfFile = requires(BASE64_PDF, "The file, in base64.")


@dataclass(frozen=True, slots=True)
class UrlPdfSource:
    type: str = requires(OneOf(("url",)), "Where the PDF is.")
    url: PdfFile = requires(PDF_URL, ABOUT_URL)


FILE_SOURCES = {
    "file": MediaPartKind("document", refusal="is not supported: this server stores no files. Send the document."),
    "base64": MediaPartKind("document", ObjectOf(Base64PdfSource)),
    "url": MediaPartKind("document", ObjectOf(UrlPdfSource)),
}


@dataclass(frozen=True, slots=True)
class DocumentBlock:
    type: str = requires(OneOf(("document",)), ABOUT_BLOCK)
    source: TextDocumentSource | BlocksDocumentSource | Base64PdfSource | UrlPdfSource | OmittedMedia = requires(
        tagged(
            *("type", TextDocumentSource, BlocksDocumentSource),
            media=FILE_SOURCES,
        ),
        "The document, or its text.",
    )
    title: str | None = accepts(Text(), "Its title.")
    context: str | None = accepts(Text(), "What the model should know about it.")
    citations: CitationsDisabled | None = accepts(ObjectOf(CitationsDisabled), "Citations are not supported.")
    cache_control: CacheControl | None = cache_control_field()

    @property
    def parts(self) -> list[str | RequestMedia]:
        """Its text, or the pages of a PDF."""
        about = [part for part in (self.title, self.context) if part]
        if isinstance(self.source, Base64PdfSource | UrlPdfSource):
            file = self.source.data if isinstance(self.source, Base64PdfSource) else self.source.url
            return [*(["\n".join(about)] if about else []), RequestPdf(file)]
        return ["\n".join([*about, *([self.source.text] if self.source.text else [])])]


@dataclass(frozen=True, slots=True)
class SearchResultBlock:
    type: str = requires(OneOf(("search_result",)), ABOUT_BLOCK)
    source: str = requires(Text(), "Where it was found.")
    title: str = requires(Text(), "Its title.")
    content: tuple[TextBlock, ...] = requires(TEXT_BLOCKS, "What was found.")
    citations: CitationsDisabled | None = accepts(ObjectOf(CitationsDisabled), "Citations are not supported.")
    cache_control: CacheControl | None = cache_control_field()

    @property
    def text(self) -> str:
        return "\n".join((f"{self.title} ({self.source})", *(block.text for block in self.content)))


@dataclass(frozen=True, slots=True)
class ToolReferenceBlock:
    type: str = requires(OneOf(("tool_reference",)), ABOUT_BLOCK)
    tool_name: str = requires(Text(bounds.TOOL_NAME_CHARS), "A tool whose loading was deferred.")
    cache_control: CacheControl | None = cache_control_field()

    @property
    def text(self) -> str:
        return f"The tool {self.tool_name} may be called now."


ToolResultContent = OmittedMedia | ImageBlock | TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock
TEXT_LIKE_BLOCKS = (TextBlock, DocumentBlock, SearchResultBlock)
TOOL_RESULT = ListOf(
    tagged("type", *TEXT_LIKE_BLOCKS, ToolReferenceBlock, refused=UPLOADS_REFUSED, media=IMAGE_PARTS), most=bounds.PARTS
)


def content_of_block(block: ToolResultContent) -> list[str | RequestMedia]:
    if isinstance(block, DocumentBlock):
        return block.parts
    return [block.medium if isinstance(block, ImageBlock) else block.text]


@dataclass(frozen=True, slots=True)
class ToolResultBlock:
    type: str = requires(OneOf(("tool_result",)), ABOUT_BLOCK)
    tool_use_id: str = requires(Text(bounds.IDENTIFIER_CHARS), "The call that this answers.")
    content: str | tuple[ToolResultContent, ...] = accepts(
        Either((Text(), PastContentKind(TOOL_RESULT))), "What the tool returned.", default=""
    )
    is_error: bool = accepts(Bool(), "The content is an error of the tool.", default=False)
    toolset_name: None = refuses(NO_TOOLSETS)
    cache_control: CacheControl | None = cache_control_field()

    @property
    def template_content(self) -> str | list[dict[str, Any]]:
        """A text, or parts where it has images."""
        error = "The tool failed: " if self.is_error else ""
        if isinstance(self.content, str):
            return error + self.content
        parts = [part for block in self.content for part in content_of_block(block)]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return error + "\n".join(texts)
        return template_content([error, *parts] if error else parts)

    @property
    def loaded(self) -> set[str]:
        """The deferred tools that may be called from here on."""
        blocks = () if isinstance(self.content, str) else self.content
        return {block.tool_name for block in blocks if isinstance(block, ToolReferenceBlock)}


@dataclass(frozen=True, slots=True)
class ToolCaller:
    type: str = requires(OneOf(("direct",)), "The caller: the model itself.")


@dataclass(frozen=True, slots=True)
class ToolUseBlock:
    type: str = requires(OneOf(("tool_use",)), ABOUT_BLOCK)
    id: str = requires(Text(bounds.IDENTIFIER_CHARS), "The call's id, to which a tool_result answers.")
    name: str = requires(Text(bounds.NAME_CHARS, least=1), "The tool's name.")
    input: Any = accepts(Anything(), ABOUT_ARGUMENTS)
    caller: ToolCaller | None = accepts(ObjectOf(ToolCaller), "Calls are the model's own.")
    toolset_name: None = refuses(NO_TOOLSETS)
    cache_control: CacheControl | None = cache_control_field()


@dataclass(frozen=True, slots=True)
class ThinkingBlock:
    type: str = requires(OneOf(("thinking",)), ABOUT_BLOCK)
    thinking: str = requires(Text(), "The model's thinking.")
    signature: str = accepts(
        Text(), "As it came. Thinking that this server did not sign is left out of the prompt.", default=""
    )
    cache_control: CacheControl | None = cache_control_field()


@dataclass(frozen=True, slots=True)
class RedactedThinkingBlock:
    type: str = requires(OneOf(("redacted_thinking",)), ABOUT_BLOCK)
    data: str = requires(Text(), "Encrypted by another server; left out of the prompt.")
    cache_control: CacheControl | None = cache_control_field()


UserBlock = OmittedMedia | ImageBlock | TextBlock | DocumentBlock | SearchResultBlock | ToolResultBlock
AssistantBlock = OmittedMedia | TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class BlocksMessage:
    """A message whose content is a text or blocks."""

    __slots__ = ()
    content: Any

    @property
    def blocks(self) -> tuple[Any, ...]:
        return (TextBlock("text", self.content),) if isinstance(self.content, str) else self.content


@dataclass(frozen=True, slots=True)
class AnthropicUserMessage(BlocksMessage):
    role: str = requires(OneOf(("user",)), ABOUT_ROLE)
    content: str | tuple[UserBlock, ...] = requires(
        text_or(
            tagged("type", *TEXT_LIKE_BLOCKS, ToolResultBlock, refused=UPLOADS_REFUSED, media=IMAGE_PARTS), least=1
        ),
        "The user's message, and tool results.",
    )


@dataclass(frozen=True, slots=True)
class AnthropicAssistantMessage(BlocksMessage):
    role: str = requires(OneOf(("assistant",)), ABOUT_ROLE)
    content: str | tuple[AssistantBlock, ...] = requires(
        text_or(
            tagged(
                *("type", TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
                refused=UPLOADS_REFUSED | HOSTED_BLOCKS_REFUSED,
                media=IMAGE_PARTS_REFUSED,
            )
        ),
        "The assistant's text, thinking and calls.",
    )


@dataclass(frozen=True, slots=True)
class AnthropicSystemMessage(BlocksMessage):
    role: str = requires(OneOf(("system",)), ABOUT_ROLE)
    content: str | tuple[TextBlock, ...] = requires(
        Either((Text(least=1), TEXT_BLOCKS)), "Instructions that apply from here on."
    )


AnthropicMessage = AnthropicUserMessage | AnthropicAssistantMessage | AnthropicSystemMessage
ANTHROPIC_CONVERSATION = MessageListKind(
    ListOf(
        tagged("role", AnthropicUserMessage, AnthropicAssistantMessage, AnthropicSystemMessage),
        most=bounds.MESSAGES,
        least=1,
    )
)


TemplateMessage = dict[str, Any]


def messages_to_chat(
    system: str | tuple[TextBlock, ...] | None,
    messages: tuple[AnthropicMessage, ...],
    seal: ThinkingSeal,
    reading: BodyReading,
) -> list[TemplateMessage]:
    """Names in `reading` the thinking that is left out, as it was not signed here."""
    chat: list[TemplateMessage] = []
    if system:
        chat.append(text_message("system", [system] if isinstance(system, str) else [block.text for block in system]))
    call_names: dict[str, str] = {}  # by id
    for at, message in enumerate(messages):
        path = f"messages.{at}"
        match message:
            case AnthropicSystemMessage():
                chat.append(text_message("system", [block.text for block in message.blocks]))
            case AnthropicUserMessage():
                chat += user_messages(message, call_names, path)
            case AnthropicAssistantMessage():
                chat.append(assistant_message(message, seal, path, reading))
                call_names |= {block.id: block.name for block in message.blocks if isinstance(block, ToolUseBlock)}
    return chat


def user_messages(message: AnthropicUserMessage, call_names: dict[str, str], path: str) -> Iterator[TemplateMessage]:
    """A user's turn: tool results, and the user's own messages before, between and after them."""
    parts: list[str | RequestMedia] = []
    for at, block in enumerate(message.blocks):
        if not isinstance(block, ToolResultBlock):
            parts += content_of_block(block)
            continue
        if parts:
            yield text_message("user", parts)
            parts = []
        name = call_names.get(block.tool_use_id)
        if name is None:
            where = f"{path}.content.{at}.tool_use_id"
            raise BadRequest(f"{where}: no tool_use before it has the id '{block.tool_use_id[:100]}'.", param=where)
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": block.template_content}
    if parts:
        yield text_message("user", parts)


def assistant_message(
    message: AnthropicAssistantMessage, seal: ThinkingSeal, path: str, reading: BodyReading
) -> TemplateMessage:
    # An empty text may be a keep-alive of ours.
    texts = [block.text for block in message.blocks if isinstance(block, TextBlock | OmittedMedia) and block.text]
    calls = [tool_call_dict(b.id, b.name, b.input) for b in message.blocks if isinstance(b, ToolUseBlock)]
    thoughts = []
    for at, block in enumerate(message.blocks):
        if isinstance(block, ThinkingBlock | RedactedThinkingBlock):
            thought = verified_thinking(block, seal)
            if thought is None:
                reading.ignore(f"{path}.content.{at}.{block.type}")
            else:
                thoughts.append(thought)
    chat: TemplateMessage = {"role": "assistant", "content": None}
    if texts or not calls:
        chat = text_message("assistant", texts)
    if calls:
        chat["tool_calls"] = calls
    if thoughts:
        chat["reasoning_content"] = "\n".join(thoughts)
    return chat


def verified_thinking(block: ThinkingBlock | RedactedThinkingBlock, seal: ThinkingSeal) -> str | None:
    """The thinking, if this server generated it. Other thinking is left out rather than refused: an agent that changes
    servers within a conversation sends back what other servers signed."""
    if isinstance(block, RedactedThinkingBlock):
        return None
    signed = seal.open(block.signature)
    return signed if block.thinking in (signed, "") else None


def text_message(role: str, parts: Sequence[str | RequestMedia]) -> TemplateMessage:
    return {"role": role, "content": template_content(parts)}


def loaded_tool_names(messages: Iterable[AnthropicMessage]) -> set[str]:
    """The deferred tools that results have named."""
    return {
        name
        for message in messages
        if isinstance(message, AnthropicUserMessage)
        for block in message.blocks
        if isinstance(block, ToolResultBlock)
        for name in block.loaded
    }


def clear_thinking(messages: list[TemplateMessage], keep: int) -> list[str]:
    """Removes the thinking of all but the newest `keep` turns that have any; returns it, by turn.

    A turn is all messages of the assistant between two messages of the user, tool results aside. An empty text remains:
    without one, the thinking that the server remembers would come back.
    """
    turns: list[list[TemplateMessage]] = [[]]
    for message in messages:
        if message["role"] == "user":
            turns.append([])
        elif "reasoning_content" in message:
            turns[-1].append(message)
    with_thinking = [turn for turn in turns if turn]
    cleared = with_thinking[: len(with_thinking) - keep] if keep else with_thinking
    thoughts = ["\n".join(message["reasoning_content"] for message in turn) for turn in cleared]
    for turn in cleared:
        for message in turn:
            message["reasoning_content"] = ""
    return thoughts
