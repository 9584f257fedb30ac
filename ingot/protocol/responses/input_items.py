"""The input items of a response as they come over the wire, and the conversation that they make up."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, get_args

from ingot.errors import BadRequest
from ingot.media.images import ImageFile
from ingot.media.items import RequestImage, RequestMedia, RequestPdf
from ingot.media.layout import ImageLayoutOptions
from ingot.media.pdf import PdfFile
from ingot.protocol.chat.ask import custom_input_as_arguments
from ingot.protocol.chat.media import (
    Base64PdfKind,
    ImageUrlKind,
    MediaPartKind,
    MessageListKind,
    OmittedMedia,
    PdfUrlKind,
    template_content,
)
from ingot.protocol.openai.messages import ABOUT_DETAIL, IMAGE_DETAIL, ChatAudioPart, with_options_said
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Anything, BodyReading, FieldKind, ListOf, OneOf, Schema, Text, generalize_path
from ingot.protocol.schema.objects import IsGiven, Never, Not, ObjectOf, accepts, refuses, requires, tagged, text_or
from ingot.protocol.served import ThinkingSeal
from ingot.protocol.terms import Terms
from ingot.text.parser.arguments import arguments_as_text

HOSTED_REFUSED: Final = "items belong to a tool that this server does not have."
HOSTED_ITEMS: Final = dict.fromkeys(
    (
        *("file_search_call", "web_search_call", "computer_call", "computer_call_output", "image_generation_call"),
        *("code_interpreter_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
        *("apply_patch_call", "apply_patch_call_output", "tool_search_call", "tool_search_output", "additional_tools"),
        *("program", "program_output", "compaction", "compaction_trigger", "configuration_update"),
        *("mcp_approval_request", "mcp_approval_response"),
    ),
    HOSTED_REFUSED,
)
NAMESPACE_SEPARATOR: Final = "__"
ITEM_IDENTIFIER = Text(bounds.IDENTIFIER_CHARS)
ITEM_STATUS = OneOf(("in_progress", "completed", "incomplete"))
ABOUT_ITEM_ID = "The item's id."
ABOUT_ITEM_STATUS = "How far the item came."


@dataclass(frozen=True, slots=True)
class InputText:
    type: str = requires(OneOf(("input_text",)), "The kind of part.")
    text: str = requires(Text(), "The text.")


@dataclass(frozen=True, slots=True)
class OutputTextInput:
    type: str = requires(OneOf(("output_text",)), "The kind of part.")
    text: str = requires(Text(), "The text.")
    annotations: tuple[Any, ...] | None = accepts(ListOf(Anything(), bounds.PARTS), "Not shown to the model.")
    logprobs: tuple[Any, ...] | None = accepts(ListOf(Anything(), bounds.PROMPT_TOKENS), "Not shown to the model.")


@dataclass(frozen=True, slots=True)
class RefusalInput:
    type: str = requires(OneOf(("refusal",)), "The kind of part.")
    refusal: str = requires(Text(), "What the assistant said when it declined.")

    @property
    def text(self) -> str:
        return self.refusal


@dataclass(frozen=True, slots=True)
class InputImage:
    type: str = requires(OneOf(("input_image",)), "The kind of part.")
    image_url: ImageFile = requires(ImageUrlKind(), "The picture, as a data URL.")
    detail: str | None = accepts(IMAGE_DETAIL, ABOUT_DETAIL)
    file_id: None = refuses("is not supported: this server keeps no files. Send image_url, a data URL.")

    @property
    def medium(self) -> RequestMedia:
        return RequestImage(self.image_url, with_options_said(ImageLayoutOptions(), detail=self.detail))


@dataclass(frozen=True, slots=True)
class InputFile:
    type: str = requires(OneOf(("input_file",)), "The kind of part.")
    file_data: PdfFile | None = accepts(
        Base64PdfKind(), "A PDF, as a data URL or in base64. Its pages become pictures."
    )
    file_url: PdfFile | None = accepts(PdfUrlKind(), "Its address instead, where the settings allow to fetch it.")
    filename: str | None = accepts(Text(bounds.NAME_CHARS), "Not shown to the model.")
    detail: str | None = accepts(IMAGE_DETAIL, ABOUT_DETAIL)
    file_id: None = refuses("is not supported: this server keeps no files. Send file_data.")

    @property
    def medium(self) -> RequestMedia:
        file = self.file_data or self.file_url
        assert file is not None, "the rules of the record want one of them"
        return RequestPdf(file, with_options_said(ImageLayoutOptions(), detail=self.detail))


ONE_FILE: Final = (
    Never((Not(IsGiven("file_data")), Not(IsGiven("file_url"))), "input_file: file_data is required.", "file_data"),
    Never((IsGiven("file_data"), IsGiven("file_url")), "input_file: file_data and file_url are two files.", "file_url"),
)
INPUT_MEDIA: Final = {
    "input_image": MediaPartKind("image", ObjectOf(InputImage)),
    "input_file": MediaPartKind("file", ObjectOf(InputFile, rules=ONE_FILE)),
    "input_audio": MediaPartKind("audio", ObjectOf(ChatAudioPart)),
}
InputContentPart = InputText | OutputTextInput | RefusalInput | InputImage | InputFile | ChatAudioPart | OmittedMedia
INPUT_CONTENT = text_or(tagged("type", InputText, OutputTextInput, RefusalInput, media=INPUT_MEDIA))
ToolResultPart = InputText | InputImage | InputFile | ChatAudioPart | OmittedMedia
TOOL_RESULT_CONTENT = text_or(tagged("type", InputText, media=INPUT_MEDIA))


@dataclass(frozen=True, slots=True)
class MessageInput:
    role: str = requires(OneOf(("user", "assistant", "system", "developer")), "Who speaks.")
    content: str | tuple[InputContentPart, ...] = requires(INPUT_CONTENT, "What is said.")
    type: str | None = accepts(OneOf(("message",)), "The kind of item; may be left out of messages.")
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    status: str | None = accepts(ITEM_STATUS, ABOUT_ITEM_STATUS)
    phase: str | None = accepts(OneOf(("commentary", "final_answer")), "Not shown to the model.")


@dataclass(frozen=True, slots=True)
class FunctionCallInput:
    type: str = requires(OneOf(("function_call",)), "The kind of item.")
    call_id: str = requires(ITEM_IDENTIFIER, "The call's id, to which its output answers.")
    name: str = requires(Text(bounds.TOOL_NAME_CHARS, least=1), "The function that was called.")
    arguments: Any = accepts(Anything(), "Its arguments, as JSON text; what is no JSON object is shown as it is.")
    namespace: str | None = accepts(Text(bounds.TOOL_NAME_CHARS), "The namespace that the function is of.")
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    status: str | None = accepts(ITEM_STATUS, ABOUT_ITEM_STATUS)


@dataclass(frozen=True, slots=True)
class FunctionOutputInput:
    type: str = requires(OneOf(("function_call_output",)), "The kind of item.")
    call_id: str = requires(ITEM_IDENTIFIER, "The call that this answers.")
    output: str | tuple[ToolResultPart, ...] = requires(TOOL_RESULT_CONTENT, "What the function returned.")
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    name: str | None = accepts(Text(bounds.TOOL_NAME_CHARS), "The function that was called.")
    namespace: str | None = accepts(Text(bounds.TOOL_NAME_CHARS), "The namespace that it is of.")
    status: str | None = accepts(ITEM_STATUS, ABOUT_ITEM_STATUS)


@dataclass(frozen=True, slots=True)
class CustomCallInput:
    type: str = requires(OneOf(("custom_tool_call",)), "The kind of item.")
    call_id: str = requires(ITEM_IDENTIFIER, "The call's id, to which its output answers.")
    name: str = requires(Text(bounds.TOOL_NAME_CHARS, least=1), "The tool that was called.")
    input: str = requires(Text(), "What it was called with.")
    namespace: str | None = accepts(Text(bounds.TOOL_NAME_CHARS), "The namespace that the tool is of.")
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    status: str | None = accepts(ITEM_STATUS, ABOUT_ITEM_STATUS)

    @property
    def arguments(self) -> str:
        return custom_input_as_arguments(self.input)


@dataclass(frozen=True, slots=True)
class CustomOutputInput:
    type: str = requires(OneOf(("custom_tool_call_output",)), "The kind of item.")
    call_id: str = requires(ITEM_IDENTIFIER, "The call that this answers.")
    output: str | tuple[ToolResultPart, ...] = requires(TOOL_RESULT_CONTENT, "What the tool returned.")
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    name: str | None = accepts(Text(bounds.TOOL_NAME_CHARS), "The tool that was called.")
    status: str | None = accepts(ITEM_STATUS, ABOUT_ITEM_STATUS)


@dataclass(frozen=True, slots=True)
class SummaryTextInput:
    type: str = requires(OneOf(("summary_text",)), "The kind of part.")
    text: str = requires(Text(), "The text.")


@dataclass(frozen=True, slots=True)
class ReasoningTextInput:
    type: str = requires(OneOf(("reasoning_text", "text")), "The kind of part.")
    text: str = requires(Text(), "The text.")


@dataclass(frozen=True, slots=True)
class ReasoningInput:
    """What an assistant thought. Where `encrypted_content` is given it counts, else `content`, else the summary."""

    type: str = requires(OneOf(("reasoning",)), "The kind of item.")
    summary: tuple[SummaryTextInput, ...] = accepts(
        ListOf(ObjectOf(SummaryTextInput), bounds.PARTS), "A summary.", default=()
    )
    content: tuple[ReasoningTextInput, ...] | None = accepts(
        ListOf(ObjectOf(ReasoningTextInput), bounds.PARTS), "The thinking."
    )
    encrypted_content: str | None = accepts(Text(), "The thinking as this server sealed it.")
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    status: str | None = accepts(ITEM_STATUS, ABOUT_ITEM_STATUS)

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
    id: str = requires(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    server_label: str = requires(Text(bounds.TOOL_NAME_CHARS, least=1), "The server that has the tool.")
    name: str = requires(Text(bounds.TOOL_NAME_CHARS, least=1), "The tool that was called.")
    arguments: Any = accepts(Anything(), "Its arguments, as JSON text; what is no JSON object is shown as it is.")
    call_id: str | None = accepts(ITEM_IDENTIFIER, "The id by which the conversation knows the call.")
    output: str | None = accepts(Text(), "What the tool returned.")
    error: McpErrorInput | None = accepts(ObjectOf(McpErrorInput), "Why it did not.")
    status: str | None = accepts(
        OneOf(("in_progress", "completed", "incomplete", "calling", "failed")), ABOUT_ITEM_STATUS
    )
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
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    error: str | None = accepts(Text(), "Why they could not be listed.")


@dataclass(frozen=True, slots=True)
class ItemReferenceInput:
    """Stands for an item of an earlier response. Resolved before the conversation is made."""

    id: str = requires(ITEM_IDENTIFIER, "The id of an item of a stored response.")
    type: str | None = accepts(OneOf(("item_reference",)), "The kind of item.")


AnyInputItem = (
    MessageInput
    | FunctionCallInput
    | FunctionOutputInput
    | CustomCallInput
    | CustomOutputInput
    | ReasoningInput
    | McpCallInput
    | McpListInput
    | ItemReferenceInput
)

MESSAGE_ITEM, REFERENCE_ITEM = ObjectOf(MessageInput), ObjectOf(ItemReferenceInput)
TYPED_ITEMS = tagged("type", *get_args(AnyInputItem), refused=HOSTED_ITEMS)


@dataclass(frozen=True, slots=True)
class InputItemKind(FieldKind):
    """What the field `type` says; without one, a message where there is a role, else a reference."""

    types, words = (dict,), "an item"

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        if isinstance(value, dict) and value.get("type") is None:
            return (MESSAGE_ITEM if "role" in value else REFERENCE_ITEM).parse(value, path, reading)
        return TYPED_ITEMS.parse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        return TYPED_ITEMS.schema(terms)


INPUT_ITEMS = MessageListKind(ListOf(InputItemKind(), most=bounds.MESSAGES))


def namespaced_tool_name(space: str | None, name: str) -> str:
    """What the model calls a tool that belongs to a namespace or to an MCP server."""
    return f"{space}{NAMESPACE_SEPARATOR}{name}" if space else name


class InputConversation:
    """Items, in order, put together to messages as a chat has them.

    An answer is one message in a chat and several items here: thinking, text and calls that follow one another are
    made one message again, so that the prompt is the one that the model went on from. `finish` after the last. Thinking
    that was sealed elsewhere is left out rather than refused: an agent that was moved here must get on.
    """

    def __init__(self, seal: ThinkingSeal) -> None:
        self._seal = seal
        self.left_out: list[str] = []  # thinking that was sealed elsewhere
        self._messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of the tools called, by call id
        self._answer: dict[str, Any] | None = None  # the assistant's message that items are still added to
        self._said_last = False
        self._results: list[tuple[str, str]] = []  # of the server's own calls, which follow the whole answer

    def add(self, item: AnyInputItem, path: str) -> None:
        match item:
            case MessageInput(role="assistant"):
                self._say(text_of_content(item.content))
            case MessageInput():
                self._tell({"role": item.role, "content": template_parts(item.content)})
            case ReasoningInput():
                thought = item.thought(self._seal)
                if thought is None:
                    self.left_out.append(generalize_path(f"{path}.encrypted_content"))
                self._think(thought or "")
            case FunctionCallInput() | CustomCallInput():
                self._call(item.call_id, namespaced_tool_name(item.namespace, item.name), item.arguments)
            case FunctionOutputInput() | CustomOutputInput():
                self._settle()
                self._result(item.call_id, template_parts(item.output))
            case McpCallInput():
                call_id = item.call_id or item.id
                self._call(call_id, namespaced_tool_name(item.server_label, item.name), item.arguments)
                self._results.append((call_id, item.result))
            case ItemReferenceInput():
                raise BadRequest(f"{path}: an item that is referred to must not be a reference itself.", param=path)

    def finish(self) -> list[dict[str, Any]]:
        self._settle()
        return self._messages

    def _think(self, thought: str) -> None:
        if not thought:
            return
        self._settle()
        answer = self._begun()
        if answer["content"] or "tool_calls" in answer:
            self._answer = None
            answer = self._begun()
        answer["reasoning_content"] = answer.get("reasoning_content", "") + thought
        self._said_last = False

    def _say(self, text: str) -> None:
        self._settle()
        if self._said_last:  # two messages in a row are two turns
            self._answer = None
        answer = self._begun()
        answer["content"] = (answer["content"] or "") + text
        self._said_last = True

    def _call(self, call_id: str, name: str, arguments: Any) -> None:
        function = {"name": name, "arguments": arguments_as_text(arguments)}
        self._begun().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._names[call_id] = name
        self._said_last = False

    def _settle(self) -> None:
        results, self._results = self._results, []
        for call_id, result in results:
            self._result(call_id, result)

    def _result(self, call_id: str, content: str | list[dict[str, Any]]) -> None:
        message = {"role": "tool", "tool_call_id": call_id, "content": content}
        name = self._names.get(call_id)
        self._append(message if name is None else message | {"name": name})

    def _begun(self) -> dict[str, Any]:
        if self._answer is None:
            self._answer = {"role": "assistant", "content": None}
            self._messages.append(self._answer)
            self._said_last = False
        return self._answer

    def _tell(self, message: dict[str, Any]) -> None:
        self._settle()
        self._append(message)

    def _append(self, message: dict[str, Any]) -> None:
        self._answer, self._said_last = None, False
        self._messages.append(message)


def template_parts(content: str | tuple[InputContentPart, ...]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    media = (InputImage, InputFile)
    return template_content([part.medium if isinstance(part, media) else part.text for part in content]) or []


def text_of_content(content: str | tuple[InputContentPart, ...]) -> str:
    """What an assistant said, who shows no pictures."""
    if isinstance(content, str):
        return content
    return "".join(_text_of_part(part) for part in content)


def _text_of_part(part: InputContentPart) -> str:
    if isinstance(part, InputImage | InputFile):
        return OmittedMedia("image" if isinstance(part, InputImage) else "file", taken=True).text
    return part.text
