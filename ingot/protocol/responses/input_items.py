"""The items of a response's input as they come over the wire."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, get_args

from ingot.media.layout import PictureWish
from ingot.media.medium import Medium, PdfMedium, PictureMedium
from ingot.media.pdf import PdfFile
from ingot.media.picture import Picture
from ingot.protocol.chat.custom_tools import custom_arguments
from ingot.protocol.chat.media import MediaTag, MessageList, Unseen
from ingot.protocol.chat.media_fields import ABOUT_DETAIL, DETAIL, told
from ingot.protocol.chat.media_files import Base64Pdf, PdfUrl, PictureUrl
from ingot.protocol.chat.sealing import ThinkingSeal
from ingot.protocol.openai.messages import AudioPart
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Anything, BodyReading, Kind, ListOf, OneOf, Schema, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires, tagged, text_or
from ingot.protocol.schema.rules import Given, Never, Not
from ingot.protocol.terms import Terms

NO_HOSTED: Final = "items belong to a tool that this server does not have."
HOSTED_ITEMS: Final = dict.fromkeys(
    (
        *("file_search_call", "web_search_call", "computer_call", "computer_call_output", "image_generation_call"),
        *("code_interpreter_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
        *("apply_patch_call", "apply_patch_call_output", "tool_search_call", "tool_search_output", "additional_tools"),
        *("program", "program_output", "compaction", "compaction_trigger", "configuration_update"),
        *("mcp_approval_request", "mcp_approval_response"),
    ),
    NO_HOSTED,
)
NAME_JOINT: Final = "__"
IDENTIFIER = Text(bounds.IDENTIFIER_CHARS)
STATUS = OneOf(("in_progress", "completed", "incomplete"))
ABOUT_ID = "The item's id."
ABOUT_STATUS = "How far the item came."


@dataclass(frozen=True, slots=True)
class InputText:
    type: str = requires(OneOf(("input_text",)), "The kind of part.")
    text: str = requires(Text(), "The text.")


@dataclass(frozen=True, slots=True)
class PastText:
    type: str = requires(OneOf(("output_text",)), "The kind of part.")
    text: str = requires(Text(), "The text.")
    annotations: tuple[Any, ...] | None = accepts(ListOf(Anything(), bounds.PARTS), "Not shown to the model.")
    logprobs: tuple[Any, ...] | None = accepts(ListOf(Anything(), bounds.PROMPT_TOKENS), "Not shown to the model.")


@dataclass(frozen=True, slots=True)
class PastRefusal:
    type: str = requires(OneOf(("refusal",)), "The kind of part.")
    refusal: str = requires(Text(), "What the assistant said when it declined.")

    @property
    def text(self) -> str:
        return self.refusal


@dataclass(frozen=True, slots=True)
class InputImage:
    type: str = requires(OneOf(("input_image",)), "The kind of part.")
    image_url: Picture = requires(PictureUrl(), "The picture, as a data URL.")
    detail: str | None = accepts(DETAIL, ABOUT_DETAIL)
    file_id: None = refuses("is not supported: this server keeps no files. Send image_url, a data URL.")

    @property
    def medium(self) -> Medium:
        return PictureMedium(self.image_url, told(PictureWish(), detail=self.detail))


@dataclass(frozen=True, slots=True)
class InputFile:
    type: str = requires(OneOf(("input_file",)), "The kind of part.")
    file_data: PdfFile | None = accepts(Base64Pdf(), "A PDF, as a data URL or in base64. Its pages become pictures.")
    file_url: PdfFile | None = accepts(PdfUrl(), "Its address instead, where the settings allow to fetch it.")
    filename: str | None = accepts(Text(bounds.NAME_CHARS), "Not shown to the model.")
    detail: str | None = accepts(DETAIL, ABOUT_DETAIL)
    file_id: None = refuses("is not supported: this server keeps no files. Send file_data.")

    @property
    def medium(self) -> Medium:
        file = self.file_data or self.file_url
        assert file is not None, "the rules of the record want one of them"
        return PdfMedium(file, told(PictureWish(), detail=self.detail))


ONE_FILE: Final = (
    Never((Not(Given("file_data")), Not(Given("file_url"))), "input_file: file_data is required.", "file_data"),
    Never((Given("file_data"), Given("file_url")), "input_file: file_data and file_url are two files.", "file_url"),
)
MEDIA: Final = {
    "input_image": MediaTag("image", ObjectOf(InputImage)),
    "input_file": MediaTag("file", ObjectOf(InputFile, rules=ONE_FILE)),
    "input_audio": MediaTag("audio", ObjectOf(AudioPart)),
}
ContentPart = InputText | PastText | PastRefusal | InputImage | InputFile | AudioPart | Unseen
CONTENT = text_or(tagged("type", InputText, PastText, PastRefusal, media=MEDIA))
ResultPart = InputText | InputImage | InputFile | AudioPart | Unseen
RESULT = text_or(tagged("type", InputText, media=MEDIA))


@dataclass(frozen=True, slots=True)
class MessageInput:
    role: str = requires(OneOf(("user", "assistant", "system", "developer")), "Who speaks.")
    content: str | tuple[ContentPart, ...] = requires(CONTENT, "What is said.")
    type: str | None = accepts(OneOf(("message",)), "The kind of item; may be left out of messages.")
    id: str | None = accepts(IDENTIFIER, ABOUT_ID)
    status: str | None = accepts(STATUS, ABOUT_STATUS)
    phase: str | None = accepts(OneOf(("commentary", "final_answer")), "Not shown to the model.")


@dataclass(frozen=True, slots=True)
class FunctionCallInput:
    type: str = requires(OneOf(("function_call",)), "The kind of item.")
    call_id: str = requires(IDENTIFIER, "The call's id, to which its output answers.")
    name: str = requires(Text(bounds.TOOL_NAME_CHARS, least=1), "The function that was called.")
    arguments: Any = accepts(Anything(), "Its arguments, as JSON text; what is no JSON object is shown as it is.")
    namespace: str | None = accepts(Text(bounds.TOOL_NAME_CHARS), "The namespace that the function is of.")
    id: str | None = accepts(IDENTIFIER, ABOUT_ID)
    status: str | None = accepts(STATUS, ABOUT_STATUS)


@dataclass(frozen=True, slots=True)
class FunctionOutputInput:
    type: str = requires(OneOf(("function_call_output",)), "The kind of item.")
    call_id: str = requires(IDENTIFIER, "The call that this answers.")
    output: str | tuple[ResultPart, ...] = requires(RESULT, "What the function returned.")
    id: str | None = accepts(IDENTIFIER, ABOUT_ID)
    name: str | None = accepts(Text(bounds.TOOL_NAME_CHARS), "The function that was called.")
    namespace: str | None = accepts(Text(bounds.TOOL_NAME_CHARS), "The namespace that it is of.")
    status: str | None = accepts(STATUS, ABOUT_STATUS)


@dataclass(frozen=True, slots=True)
class CustomCallInput:
    type: str = requires(OneOf(("custom_tool_call",)), "The kind of item.")
    call_id: str = requires(IDENTIFIER, "The call's id, to which its output answers.")
    name: str = requires(Text(bounds.TOOL_NAME_CHARS, least=1), "The tool that was called.")
    input: str = requires(Text(), "What it was called with.")
    namespace: str | None = accepts(Text(bounds.TOOL_NAME_CHARS), "The namespace that the tool is of.")
    id: str | None = accepts(IDENTIFIER, ABOUT_ID)
    status: str | None = accepts(STATUS, ABOUT_STATUS)

    @property
    def arguments(self) -> str:
        return custom_arguments(self.input)


@dataclass(frozen=True, slots=True)
class CustomOutputInput:
    type: str = requires(OneOf(("custom_tool_call_output",)), "The kind of item.")
    call_id: str = requires(IDENTIFIER, "The call that this answers.")
    output: str | tuple[ResultPart, ...] = requires(RESULT, "What the tool returned.")
    id: str | None = accepts(IDENTIFIER, ABOUT_ID)
    name: str | None = accepts(Text(bounds.TOOL_NAME_CHARS), "The tool that was called.")
    status: str | None = accepts(STATUS, ABOUT_STATUS)


@dataclass(frozen=True, slots=True)
class SummaryPart:
    type: str = requires(OneOf(("summary_text",)), "The kind of part.")
    text: str = requires(Text(), "The text.")


@dataclass(frozen=True, slots=True)
class ThoughtPart:
    type: str = requires(OneOf(("reasoning_text", "text")), "The kind of part.")
    text: str = requires(Text(), "The text.")


@dataclass(frozen=True, slots=True)
class ReasoningInput:
    """What an assistant thought. Where `encrypted_content` is given it counts, else `content`, else the summary."""

    type: str = requires(OneOf(("reasoning",)), "The kind of item.")
    summary: tuple[SummaryPart, ...] = accepts(ListOf(ObjectOf(SummaryPart), bounds.PARTS), "A summary.", default=())
    content: tuple[ThoughtPart, ...] | None = accepts(ListOf(ObjectOf(ThoughtPart), bounds.PARTS), "The thinking.")
    encrypted_content: str | None = accepts(Text(), "The thinking as this server sealed it.")
    id: str | None = accepts(IDENTIFIER, ABOUT_ID)
    status: str | None = accepts(STATUS, ABOUT_STATUS)

    def thought(self, seal: ThinkingSeal) -> str | None:
        """None where another server sealed it, or this one for another key: nobody here vouches for any of it."""
        if self.encrypted_content:
            return seal.open(self.encrypted_content)
        return "".join(part.text for part in self.content or self.summary)


@dataclass(frozen=True, slots=True)
class McpErrorInput:
    type: str = requires(OneOf(("mcp_tool_execution_error",)), "What went wrong.")
    content: str = requires(Text(), "In words.")


@dataclass(frozen=True, slots=True)
class McpCallInput:
    """A call that the server made, with what came of it."""

    type: str = requires(OneOf(("mcp_call",)), "The kind of item.")
    id: str = requires(IDENTIFIER, ABOUT_ID)
    server_label: str = requires(Text(bounds.TOOL_NAME_CHARS, least=1), "The server that has the tool.")
    name: str = requires(Text(bounds.TOOL_NAME_CHARS, least=1), "The tool that was called.")
    arguments: Any = accepts(Anything(), "Its arguments, as JSON text; what is no JSON object is shown as it is.")
    call_id: str | None = accepts(IDENTIFIER, "The id by which the conversation knows the call.")
    output: str | None = accepts(Text(), "What the tool returned.")
    error: McpErrorInput | None = accepts(ObjectOf(McpErrorInput), "Why it did not.")
    status: str | None = accepts(OneOf(("in_progress", "completed", "incomplete", "calling", "failed")), ABOUT_STATUS)
    approval_request_id: None = refuses("is not supported: calls are not approved one by one.")

    @property
    def result(self) -> str:
        return self.error.content if self.error is not None else self.output or ""


@dataclass(frozen=True, slots=True)
class McpListInput:
    """A listing of a server's tools. The model is shown what is offered now, not what once was."""

    type: str = requires(OneOf(("mcp_list_tools",)), "The kind of item.")
    server_label: str = requires(Text(bounds.TOOL_NAME_CHARS), "The server.")
    tools: tuple[Any, ...] = requires(ListOf(Anything(dict), bounds.TOOLS), "Its tools.")
    id: str | None = accepts(IDENTIFIER, ABOUT_ID)
    error: str | None = accepts(Text(), "Why they could not be listed.")


@dataclass(frozen=True, slots=True)
class ReferenceInput:
    """Stands for an item of an earlier response. Resolved before the conversation is made."""

    id: str = requires(IDENTIFIER, "The id of an item of a stored response.")
    type: str | None = accepts(OneOf(("item_reference",)), "The kind of item.")


Item = (
    MessageInput
    | FunctionCallInput
    | FunctionOutputInput
    | CustomCallInput
    | CustomOutputInput
    | ReasoningInput
    | McpCallInput
    | McpListInput
    | ReferenceInput
)

MESSAGE, REFERENCE = ObjectOf(MessageInput), ObjectOf(ReferenceInput)
TYPED = tagged("type", *get_args(Item), refused=HOSTED_ITEMS)


@dataclass(frozen=True, slots=True)
class InputItem(Kind):
    """What the field `type` says; without one, a message where there is a role, else a reference."""

    types, words = (dict,), "an item"

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        if isinstance(value, dict) and value.get("type") is None:
            return (MESSAGE if "role" in value else REFERENCE).parse(value, path, reading)
        return TYPED.parse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        return TYPED.schema(terms)


ITEMS = MessageList(ListOf(InputItem(), most=bounds.MESSAGES))


def joined_name(space: str | None, name: str) -> str:
    """What the model calls a tool that belongs to a namespace or to an MCP server."""
    return f"{space}{NAME_JOINT}{name}" if space else name
