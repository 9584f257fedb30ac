"""Anthropic's messages: roles and content blocks as they come over the wire, and the chat that templates take.

A chat has one message for each turn, thinking that this server signed, and tool results as messages of their own.
Thinking without a valid signature is left out, and the receipt says so.
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
from ingot.protocol.chat.media import (
    Base64ImageKind,
    Base64PdfKind,
    ImageUrlKind,
    MediaPartKind,
    MessageListKind,
    OmittedMedia,
    PastContentKind,
    PdfUrlKind,
    template_content,
)
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Anything, BodyReading, Bool, Either, ListOf, OneOf, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires, tagged, text_or
from ingot.protocol.served import ThinkingSeal
from ingot.text.parser.arguments import arguments_as_text

HOSTED_TOOL_REFUSED = "is of a tool that Anthropic's servers run; this server runs none."
NO_FILES = "is not supported: this server keeps no files. Send the picture itself, in base64."
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
    type: str = requires(OneOf(("ephemeral",)), "What may be kept.")
    ttl: str | None = accepts(OneOf(("5m", "1h")), "The server itself decides for how long.")
    scope: str | None = accepts(Text(bounds.NAME_CHARS), "Kept prompts are shared by requests of one key.")


def cache_control_field() -> Any:
    """The field `cache_control`, which blocks of every kind may have."""
    return accepts(ObjectOf(CacheControl), "A mark for the prompt cache, which here is automatic.")


@dataclass(frozen=True, slots=True)
class CitationsDisabled:
    enabled: None = refuses("is not supported: no citations are made. Send false.", False)


@dataclass(frozen=True, slots=True)
class TextBlock:
    type: str = requires(OneOf(("text",)), "The kind of block.")
    text: str = requires(Text(), "The text.")
    cache_control: CacheControl | None = cache_control_field()
    citations: tuple[Any, ...] = accepts(
        ListOf(Anything(dict), bounds.PARTS), "What an earlier answer cited; the model does not see it.", default=()
    )


TEXT_BLOCKS = ListOf(tagged("type", TextBlock), most=bounds.PARTS)
SYSTEM_PROMPT = Either((Text(), TEXT_BLOCKS))


@dataclass(frozen=True, slots=True)
class Base64ImageSource:
    type: str = requires(OneOf(("base64",)), "The picture itself.")
    media_type: str = requires(
        OneOf(("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")), "Its type; the file's own counts."
    )
    data: ImageFile = requires(Base64ImageKind(), "The file, in base64.")

    @property
    def picture(self) -> ImageFile:
        return self.data


@dataclass(frozen=True, slots=True)
class UrlImageSource:
    type: str = requires(OneOf(("url",)), "Where the picture is.")
    url: ImageFile = requires(ImageUrlKind(), "Its address, where the settings allow to fetch it, or a data URL.")

    @property
    def picture(self) -> ImageFile:
        return self.url


@dataclass(frozen=True, slots=True)
class ImageBlock:
    type: str = requires(OneOf(("image",)), "The kind of block.")
    source: Base64ImageSource | UrlImageSource = requires(
        tagged("type", Base64ImageSource, UrlImageSource, refused={"file": NO_FILES}), "The picture."
    )
    cache_control: CacheControl | None = cache_control_field()

    @property
    def medium(self) -> RequestMedia:
        return RequestImage(self.source.picture)


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
    type: str = requires(OneOf(("base64",)), "The document is a PDF, whose pages are shown as pictures.")
    media_type: str = requires(OneOf(("application/pdf",)), "Its type.")
    data: PdfFile = requires(Base64PdfKind(), "The file, in base64.")

    @property
    def file(self) -> PdfFile:
        return self.data


@dataclass(frozen=True, slots=True)
class UrlPdfSource:
    type: str = requires(OneOf(("url",)), "Where the PDF is.")
    url: PdfFile = requires(PdfUrlKind(), "Its address, where the settings allow to fetch it, or a data URL.")

    @property
    def file(self) -> PdfFile:
        return self.url


PDF_SOURCES = {
    "base64": MediaPartKind("document", ObjectOf(Base64PdfSource)),
    "url": MediaPartKind("document", ObjectOf(UrlPdfSource)),
}


@dataclass(frozen=True, slots=True)
class DocumentBlock:
    type: str = requires(OneOf(("document",)), "The kind of block.")
    source: TextDocumentSource | BlocksDocumentSource | Base64PdfSource | UrlPdfSource | OmittedMedia = requires(
        tagged(
            *("type", TextDocumentSource, BlocksDocumentSource),
            refused={"file": "is not supported: this server keeps no files. Send the document itself."},
            unseen={"file": "document"},
            media=PDF_SOURCES,
        ),
        "The document, or its text.",
    )
    title: str | None = accepts(Text(), "Its title.")
    context: str | None = accepts(Text(), "What the model should know of it.")
    citations: CitationsDisabled | None = accepts(ObjectOf(CitationsDisabled), "Citations are not made.")
    cache_control: CacheControl | None = cache_control_field()

    @property
    def said(self) -> list[str | RequestMedia]:
        """Texts, and the pages of a PDF."""
        about = [part for part in (self.title, self.context) if part]
        if isinstance(self.source, Base64PdfSource | UrlPdfSource):
            return [*(["\n".join(about)] if about else []), RequestPdf(self.source.file)]
        return ["\n".join([*about, *([self.source.text] if self.source.text else [])])]


@dataclass(frozen=True, slots=True)
class SearchResultBlock:
    type: str = requires(OneOf(("search_result",)), "The kind of block.")
    source: str = requires(Text(), "Where it was found.")
    title: str = requires(Text(), "Its title.")
    content: tuple[TextBlock, ...] = requires(TEXT_BLOCKS, "What was found.")
    citations: CitationsDisabled | None = accepts(ObjectOf(CitationsDisabled), "Citations are not made.")
    cache_control: CacheControl | None = cache_control_field()

    @property
    def text(self) -> str:
        return "\n".join((f"{self.title} ({self.source})", *(block.text for block in self.content)))


@dataclass(frozen=True, slots=True)
class ToolReferenceBlock:
    type: str = requires(OneOf(("tool_reference",)), "The kind of block.")
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
        return block.said
    return [block.medium if isinstance(block, ImageBlock) else block.text]


@dataclass(frozen=True, slots=True)
class ToolResultBlock:
    type: str = requires(OneOf(("tool_result",)), "The kind of block.")
    tool_use_id: str = requires(Text(bounds.IDENTIFIER_CHARS), "The call that this answers.")
    content: str | tuple[ToolResultContent, ...] = accepts(
        Either((Text(), PastContentKind(TOOL_RESULT))), "What the tool returned.", default=""
    )
    is_error: bool = accepts(Bool(), "The tool failed, and says how.", default=False)
    toolset_name: None = refuses("is not supported: there are no toolsets here.")
    cache_control: CacheControl | None = cache_control_field()

    @property
    def said(self) -> str | list[str | RequestMedia]:
        """A text, or where there are pictures in it texts and those."""
        failed = "The tool failed: " if self.is_error else ""
        if isinstance(self.content, str):
            return failed + self.content
        said = [each for block in self.content for each in content_of_block(block)]
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
class ToolCaller:
    type: str = requires(OneOf(("direct",)), "Who called: the model itself.")


@dataclass(frozen=True, slots=True)
class ToolUseBlock:
    type: str = requires(OneOf(("tool_use",)), "The kind of block.")
    id: str = requires(Text(bounds.IDENTIFIER_CHARS), "The call's id, to which a tool_result answers.")
    name: str = requires(Text(bounds.NAME_CHARS, least=1), "The tool's name.")
    input: Any = accepts(Anything(), "Its arguments; what is no JSON object is shown as it is.")
    caller: ToolCaller | None = accepts(ObjectOf(ToolCaller), "Calls are the model's own.")
    toolset_name: None = refuses("is not supported: there are no toolsets here.")
    cache_control: CacheControl | None = cache_control_field()


@dataclass(frozen=True, slots=True)
class ThinkingBlock:
    type: str = requires(OneOf(("thinking",)), "The kind of block.")
    thinking: str = requires(Text(), "What the model thought.")
    signature: str = accepts(
        Text(), "As it came. Thinking that this server did not sign is left out of the prompt.", default=""
    )
    cache_control: CacheControl | None = cache_control_field()


@dataclass(frozen=True, slots=True)
class RedactedThinkingBlock:
    type: str = requires(OneOf(("redacted_thinking",)), "The kind of block.")
    data: str = requires(Text(), "What another server sealed; left out of the prompt.")
    cache_control: CacheControl | None = cache_control_field()


UserBlock = OmittedMedia | ImageBlock | TextBlock | DocumentBlock | SearchResultBlock | ToolResultBlock
AssistantBlock = OmittedMedia | TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


@dataclass(frozen=True, slots=True)
class AnthropicUserMessage:
    role: str = requires(OneOf(("user",)), "Who speaks.")
    content: str | tuple[UserBlock, ...] = requires(
        text_or(
            tagged("type", *TEXT_LIKE_BLOCKS, ToolResultBlock, refused=UPLOADS_REFUSED, media=IMAGE_PARTS), least=1
        ),
        "What the user says, and what tools returned.",
    )

    @property
    def blocks(self) -> tuple[UserBlock, ...]:
        return (TextBlock("text", self.content),) if isinstance(self.content, str) else self.content


@dataclass(frozen=True, slots=True)
class AnthropicAssistantMessage:
    role: str = requires(OneOf(("assistant",)), "Who speaks.")
    content: str | tuple[AssistantBlock, ...] = requires(
        text_or(
            tagged(
                *("type", TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
                refused=UPLOADS_REFUSED | HOSTED_BLOCKS_REFUSED,
                media=IMAGE_PARTS_REFUSED,
            )
        ),
        "What the assistant said, thought and called.",
    )

    @property
    def blocks(self) -> tuple[AssistantBlock, ...]:
        return (TextBlock("text", self.content),) if isinstance(self.content, str) else self.content


@dataclass(frozen=True, slots=True)
class AnthropicSystemMessage:
    role: str = requires(OneOf(("system",)), "Who speaks.")
    content: str | tuple[TextBlock, ...] = requires(
        Either((Text(least=1), TEXT_BLOCKS)), "Instructions that hold from here on."
    )

    @property
    def blocks(self) -> tuple[TextBlock, ...]:
        return (TextBlock("text", self.content),) if isinstance(self.content, str) else self.content


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
    """`reading` is told which thinking was left out, as not signed here."""
    told: list[TemplateMessage] = []
    if system:
        told.append(text_message("system", [system] if isinstance(system, str) else [block.text for block in system]))
    called: dict[str, str] = {}  # names by ids
    for at, message in enumerate(messages):
        path = f"messages.{at}"
        match message:
            case AnthropicSystemMessage():
                told.append(text_message("system", [block.text for block in message.blocks]))
            case AnthropicUserMessage():
                told += user_messages(message, called, path)
            case AnthropicAssistantMessage():
                told.append(assistant_message(message, seal, path, reading))
                called |= {block.id: block.name for block in message.blocks if isinstance(block, ToolUseBlock)}
    return told


def user_messages(message: AnthropicUserMessage, called: dict[str, str], path: str) -> Iterator[TemplateMessage]:
    """A turn of the user's: the results of tools, and what is said before, between and after them."""
    texts: list[str | RequestMedia] = []
    for at, block in enumerate(message.blocks):
        if not isinstance(block, ToolResultBlock):
            texts += content_of_block(block)
            continue
        if texts:
            yield text_message("user", texts)
            texts = []
        name = called.get(block.tool_use_id)
        if name is None:
            where = f"{path}.content.{at}.tool_use_id"
            raise BadRequest(f"{where}: no tool_use before it has the id '{block.tool_use_id[:100]}'.", param=where)
        said = block.said
        content = said if isinstance(said, str) else template_content(said)
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}
    if texts:
        yield text_message("user", texts)


def assistant_message(
    message: AnthropicAssistantMessage, seal: ThinkingSeal, path: str, reading: BodyReading
) -> TemplateMessage:
    # A text without a word may be what filled a silence of ours.
    texts = [block.text for block in message.blocks if isinstance(block, TextBlock | OmittedMedia) and block.text]
    calls = [tool_call_dict(block) for block in message.blocks if isinstance(block, ToolUseBlock)]
    thoughts = []
    for at, block in enumerate(message.blocks):
        if isinstance(block, ThinkingBlock | RedactedThinkingBlock):
            thought = verified_thinking(block, seal)
            if thought is None:
                note_left_out(reading, f"{path}.content.{at}.{block.type}")
            else:
                thoughts.append(thought)
    told: TemplateMessage = {"role": "assistant", "content": None}
    if texts or not calls:
        told = text_message("assistant", texts)
    if calls:
        told["tool_calls"] = calls
    if thoughts:
        told["reasoning_content"] = "\n".join(thoughts)
    return told


def verified_thinking(block: ThinkingBlock | RedactedThinkingBlock, seal: ThinkingSeal) -> str | None:
    """The thinking, if it is word for word what a model here thought.

    What is not is left out rather than refused: an agent that was moved here in mid-conversation sends back what
    other servers signed, and must get on.
    """
    if isinstance(block, RedactedThinkingBlock):
        return None
    signed = seal.open(block.signature)
    return signed if block.thinking in (signed, "") else None


def note_left_out(reading: BodyReading, path: str) -> None:
    if not reading.knows_ignored(path):
        reading.ignore(path)


def tool_call_dict(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": arguments_as_text(block.input)}
    return {"id": block.id, "type": "function", "function": function}


def text_message(role: str, said: Sequence[str | RequestMedia]) -> TemplateMessage:
    return {"role": role, "content": template_content(said)}


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
    """Takes the thinking out of all but the newest `keep` turns that have any; gives back what it was, by turn.

    A turn is what the assistant does between two messages of the user's, the results of tools aside. An empty thought
    stays: where there is none, the thinking that the server remembers would come back.
    """
    turns: list[list[TemplateMessage]] = [[]]
    for message in messages:
        if message["role"] == "user":
            turns.append([])
        elif "reasoning_content" in message:
            turns[-1].append(message)
    thoughtful = [turn for turn in turns if turn]
    forgotten = thoughtful[: len(thoughtful) - keep] if keep else thoughtful
    thoughts = ["\n".join(message["reasoning_content"] for message in turn) for turn in forgotten]
    for turn in forgotten:
        for message in turn:
            message["reasoning_content"] = ""
    return thoughts
