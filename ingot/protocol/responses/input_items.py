"""The input items of a response on the wire, and the conversation that they make up."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, get_args

from ingot.errors import BadRequest
from ingot.media.images import ImageFile
from ingot.media.items import RequestImage, RequestMedia, RequestPdf, RequestVideo
from ingot.media.layout import ImageLayoutOptions
from ingot.media.pdf import PdfFile
from ingot.media.video import Video
from ingot.protocol.chat.ask import ABOUT_ARGUMENTS, ABOUT_ROLE, custom_input_as_arguments, tool_call_dict
from ingot.protocol.chat.media import (
    BASE64_PDF,
    IMAGE_URL,
    PDF_URL,
    VIDEO_URL,
    MediaPartKind,
    MessageListKind,
    OmittedMedia,
    template_content,
)
from ingot.protocol.openai.messages import ABOUT_DETAIL, IMAGE_DETAIL, ChatAudioPart, with_options
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import (
    Anything,
    BodyReading,
    Bool,
    FieldKind,
    ListOf,
    OneOf,
    Schema,
    Text,
    generalize_path,
)
from ingot.protocol.schema.objects import IsSet, Never, Not, ObjectOf, accepts, refuses, requires, tagged, text_or
from ingot.protocol.served import ThinkingSeal
from ingot.protocol.terms import Terms

HOSTED_REFUSED: Final = "items belong to a tool that this server does not have."
HOSTED_ITEMS: Final = dict.fromkeys(
    (
        *("file_search_call", "web_search_call", "computer_call", "computer_call_output", "image_generation_call"),
        *("code_interpreter_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
        *("apply_patch_call", "apply_patch_call_output", "tool_search_call", "tool_search_output", "additional_tools"),
        *("program", "program_output", "compaction", "compaction_trigger", "configuration_update"),
    ),
    HOSTED_REFUSED,
)
NAMESPACE_SEPARATOR: Final = "__"
ITEM_IDENTIFIER = Text(bounds.IDENTIFIER_CHARS)
ITEM_STATUS = OneOf(("in_progress", "completed", "incomplete"))
ITEM_TOOL_NAME = Text(bounds.TOOL_NAME_CHARS, least=1)
ITEM_NAMESPACE = Text(bounds.TOOL_NAME_CHARS)
ABOUT_ITEM = "The kind of item."
ABOUT_ITEM_ID = "The item's id."
ABOUT_ITEM_STATUS = "The item's status."
ABOUT_PART = "The kind of part."
CALL_REFUSED: Final = "The user did not allow this call."
NO_FILES: Final = "is not supported: this server stores no files. Send"


@dataclass(frozen=True, slots=True)
class InputText:
    type: str = requires(OneOf(("input_text",)), ABOUT_PART)
    text: str = requires(Text(), "The text.")


@dataclass(frozen=True, slots=True)
class OutputTextInput:
    type: str = requires(OneOf(("output_text",)), ABOUT_PART)
    text: str = requires(Text(), "The text.")
    annotations: tuple[Any, ...] | None = accepts(ListOf(Anything(), bounds.PARTS), "Not shown to the model.")
    logprobs: tuple[Any, ...] | None = accepts(ListOf(Anything(), bounds.PROMPT_TOKENS), "Not shown to the model.")


@dataclass(frozen=True, slots=True)
class RefusalInput:
    type: str = requires(OneOf(("refusal",)), ABOUT_PART)
    refusal: str = requires(Text(), "The assistant's refusal.")

    @property
    def text(self) -> str:
        return self.refusal


@dataclass(frozen=True, slots=True)
class InputImage:
    type: str = requires(OneOf(("input_image",)), ABOUT_PART)
    image_url: ImageFile = requires(IMAGE_URL, "The image, as a data URL.")
    detail: str | None = accepts(IMAGE_DETAIL, ABOUT_DETAIL)
    file_id: None = refuses(f"{NO_FILES} image_url, a data URL.")

    @property
    def medium(self) -> RequestMedia:
        return RequestImage(self.image_url, with_options(ImageLayoutOptions(), detail=self.detail))


@dataclass(frozen=True, slots=True)
class InputVideo:
    type: str = requires(OneOf(("input_video",)), ABOUT_PART)
    video_url: Video = requires(VIDEO_URL, "The video, as a data URL.")

    @property
    def medium(self) -> RequestMedia:
        return RequestVideo(self.video_url)


@dataclass(frozen=True, slots=True)
class InputFile:
    type: str = requires(OneOf(("input_file",)), ABOUT_PART)
    file_data: PdfFile | None = accepts(BASE64_PDF, "A PDF, as a data URL or in base64. Its pages become images.")
    file_url: PdfFile | None = accepts(PDF_URL, "Its URL instead, where the settings allow its host.")
    filename: str | None = accepts(Text(bounds.NAME_CHARS), "Not shown to the model.")
    detail: str | None = accepts(IMAGE_DETAIL, ABOUT_DETAIL)
    file_id: None = refuses(f"{NO_FILES} file_data.")

    @property
    def medium(self) -> RequestMedia:
        file = self.file_data or self.file_url
        assert file is not None, "the rules of the record require one of them"
        return RequestPdf(file, with_options(ImageLayoutOptions(), detail=self.detail))


ONE_FILE: Final = (
    Never((Not(IsSet("file_data")), Not(IsSet("file_url"))), "input_file: file_data is required.", "file_data"),
    Never((IsSet("file_data"), IsSet("file_url")), "input_file: file_data and file_url are two files.", "file_url"),
)
INPUT_MEDIA: Final = {
    "input_image": MediaPartKind("image", ObjectOf(InputImage)),
    "input_video": MediaPartKind("video", ObjectOf(InputVideo)),
    "input_file": MediaPartKind("file", ObjectOf(InputFile, rules=ONE_FILE)),
    "input_audio": MediaPartKind("audio", ObjectOf(ChatAudioPart)),
}
InputContentPart = (
    InputText | OutputTextInput | RefusalInput | InputImage | InputVideo | InputFile | ChatAudioPart | OmittedMedia
)
INPUT_CONTENT = text_or(tagged("type", InputText, OutputTextInput, RefusalInput, media=INPUT_MEDIA))
ToolResultPart = InputText | InputImage | InputVideo | InputFile | ChatAudioPart | OmittedMedia
TOOL_RESULT_CONTENT = text_or(tagged("type", InputText, media=INPUT_MEDIA))


@dataclass(frozen=True, slots=True)
class MessageInput:
    role: str = requires(OneOf(("user", "assistant", "system", "developer")), ABOUT_ROLE)
    content: str | tuple[InputContentPart, ...] = requires(INPUT_CONTENT, "The message.")
    type: str | None = accepts(OneOf(("message",)), "The kind of item; may be left out of messages.")
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    status: str | None = accepts(ITEM_STATUS, ABOUT_ITEM_STATUS)
    phase: str | None = accepts(OneOf(("commentary", "final_answer")), "Not shown to the model.")


@dataclass(frozen=True, slots=True)
class FunctionCallInput:
    type: str = requires(OneOf(("function_call",)), ABOUT_ITEM)
    call_id: str = requires(ITEM_IDENTIFIER, "The call's id, to which its output answers.")
    name: str = requires(ITEM_TOOL_NAME, "The function that was called.")
    arguments: Any = accepts(Anything(), ABOUT_ARGUMENTS)
    namespace: str | None = accepts(ITEM_NAMESPACE, "The namespace that the function is of.")
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    status: str | None = accepts(ITEM_STATUS, ABOUT_ITEM_STATUS)


@dataclass(frozen=True, slots=True)
class FunctionOutputInput:
    type: str = requires(OneOf(("function_call_output",)), ABOUT_ITEM)
    call_id: str = requires(ITEM_IDENTIFIER, "The call that this answers.")
    output: str | tuple[ToolResultPart, ...] = requires(TOOL_RESULT_CONTENT, "What the function returned.")
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    name: str | None = accepts(ITEM_NAMESPACE, "The function that was called.")
    namespace: str | None = accepts(ITEM_NAMESPACE, "The namespace that it is of.")
    status: str | None = accepts(ITEM_STATUS, ABOUT_ITEM_STATUS)


@dataclass(frozen=True, slots=True)
class CustomCallInput:
    type: str = requires(OneOf(("custom_tool_call",)), ABOUT_ITEM)
    call_id: str = requires(ITEM_IDENTIFIER, "The call's id, to which its output answers.")
    name: str = requires(ITEM_TOOL_NAME, "The tool that was called.")
    input: str = requires(Text(), "Its input.")
    namespace: str | None = accepts(ITEM_NAMESPACE, "The namespace that the tool is of.")
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    status: str | None = accepts(ITEM_STATUS, ABOUT_ITEM_STATUS)

    @property
    def arguments(self) -> str:
        return custom_input_as_arguments(self.input)


@dataclass(frozen=True, slots=True)
class CustomOutputInput:
    type: str = requires(OneOf(("custom_tool_call_output",)), ABOUT_ITEM)
    call_id: str = requires(ITEM_IDENTIFIER, "The call that this answers.")
    output: str | tuple[ToolResultPart, ...] = requires(TOOL_RESULT_CONTENT, "What the tool returned.")
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    name: str | None = accepts(ITEM_NAMESPACE, "The tool that was called.")
    status: str | None = accepts(ITEM_STATUS, ABOUT_ITEM_STATUS)


@dataclass(frozen=True, slots=True)
class SummaryTextInput:
    type: str = requires(OneOf(("summary_text",)), ABOUT_PART)
    text: str = requires(Text(), "The text.")


@dataclass(frozen=True, slots=True)
class ReasoningTextInput:
    type: str = requires(OneOf(("reasoning_text", "text")), ABOUT_PART)
    text: str = requires(Text(), "The text.")


@dataclass(frozen=True, slots=True)
class ReasoningInput:
    """An assistant's thinking: `encrypted_content` if there is any, else `content`, else the summary."""

    type: str = requires(OneOf(("reasoning",)), ABOUT_ITEM)
    summary: tuple[SummaryTextInput, ...] = accepts(
        ListOf(ObjectOf(SummaryTextInput), bounds.PARTS), "A summary.", default=()
    )
    content: tuple[ReasoningTextInput, ...] | None = accepts(
        ListOf(ObjectOf(ReasoningTextInput), bounds.PARTS), "The thinking."
    )
    encrypted_content: str | None = accepts(Text(), "The thinking, encrypted by this server.")
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    status: str | None = accepts(ITEM_STATUS, ABOUT_ITEM_STATUS)

    def thinking(self, seal: ThinkingSeal) -> str | None:
        """None where another server encrypted it, or this one for another key."""
        if self.encrypted_content:
            return seal.open(self.encrypted_content)
        return "".join(part.text for part in self.content or self.summary)


@dataclass(frozen=True, slots=True)
class McpErrorInput:
    type: str = requires(OneOf(("mcp_tool_execution_error",)), "What went wrong.")
    content: str = requires(Text(), "The message.")


@dataclass(frozen=True, slots=True)
class McpCallInput:
    """A call that the server made, with its result."""

    type: str = requires(OneOf(("mcp_call",)), ABOUT_ITEM)
    id: str = requires(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    server_label: str = requires(ITEM_TOOL_NAME, "The server that has the tool.")
    name: str = requires(ITEM_TOOL_NAME, "The tool that was called.")
    arguments: Any = accepts(Anything(), ABOUT_ARGUMENTS)
    call_id: str | None = accepts(ITEM_IDENTIFIER, "The call's id in the conversation.")
    output: str | None = accepts(Text(), "What the tool returned.")
    error: McpErrorInput | None = accepts(ObjectOf(McpErrorInput), "Its error.")
    status: str | None = accepts(
        OneOf(("in_progress", "completed", "incomplete", "calling", "failed")), ABOUT_ITEM_STATUS
    )
    approval_request_id: str | None = accepts(ITEM_IDENTIFIER, "The request by which it was approved.")

    @property
    def result(self) -> str:
        return self.error.content if self.error is not None else self.output or ""


@dataclass(frozen=True, slots=True)
class McpApprovalRequestInput:
    """A call that the server asked about."""

    type: str = requires(OneOf(("mcp_approval_request",)), ABOUT_ITEM)
    id: str = requires(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    server_label: str = requires(ITEM_TOOL_NAME, "The server that has the tool.")
    name: str = requires(ITEM_TOOL_NAME, "The tool that the model wants to call.")
    arguments: Any = accepts(Anything(), ABOUT_ARGUMENTS)


@dataclass(frozen=True, slots=True)
class McpApprovalInput:
    """The client's decision about a call. An approved one is made at once; of the other the model learns."""

    type: str = requires(OneOf(("mcp_approval_response",)), ABOUT_ITEM)
    approval_request_id: str = requires(ITEM_IDENTIFIER, "The request that this answers.")
    approve: bool = requires(Bool(), "Whether the call may be made.")
    reason: str | None = accepts(Text(), "Why not; shown to the model.")
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)


@dataclass(frozen=True, slots=True)
class McpListInput:
    """A listing of a server's tools. The model is shown the current tools instead."""

    type: str = requires(OneOf(("mcp_list_tools",)), ABOUT_ITEM)
    server_label: str = requires(ITEM_NAMESPACE, "The server.")
    tools: tuple[Any, ...] = requires(ListOf(Anything(dict), bounds.TOOLS), "Its tools.")
    id: str | None = accepts(ITEM_IDENTIFIER, ABOUT_ITEM_ID)
    error: str | None = accepts(Text(), "Why they could not be listed.")


@dataclass(frozen=True, slots=True)
class ItemReferenceInput:
    """Refers to an item of an earlier response. Resolved before the conversation is built."""

    id: str = requires(ITEM_IDENTIFIER, "The id of an item of a stored response.")
    type: str | None = accepts(OneOf(("item_reference",)), ABOUT_ITEM)


AnyInputItem = (
    MessageInput
    | FunctionCallInput
    | FunctionOutputInput
    | CustomCallInput
    | CustomOutputInput
    | ReasoningInput
    | McpCallInput
    | McpApprovalRequestInput
    | McpApprovalInput
    | McpListInput
    | ItemReferenceInput
)

MESSAGE_ITEM, REFERENCE_ITEM = ObjectOf(MessageInput), ObjectOf(ItemReferenceInput)
TYPED_ITEMS = tagged("type", *get_args(AnyInputItem), refused=HOSTED_ITEMS)


@dataclass(frozen=True, slots=True)
class InputItemKind(FieldKind):
    """The kind that `type` names; without one, a message where there is a role, else a reference."""

    types, words = (dict,), "an item"

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        if isinstance(value, dict) and value.get("type") is None:
            return (MESSAGE_ITEM if "role" in value else REFERENCE_ITEM).parse(value, path, reading)
        return TYPED_ITEMS.parse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        return TYPED_ITEMS.schema(terms)


INPUT_ITEMS = MessageListKind(ListOf(InputItemKind(), most=bounds.MESSAGES))


def namespaced_tool_name(space: str | None, name: str) -> str:
    """The model's name for a tool of a namespace or of an MCP server."""
    return f"{space}{NAMESPACE_SEPARATOR}{name}" if space else name


class InputConversation:
    """Builds chat messages from items, in order; `finish` after the last.

    An answer is one message in a chat and several items here: consecutive thinking, text and calls become one message
    again, so that the prompt is the one that the model continued. Thinking that was encrypted elsewhere is left out
    rather than refused, so that an agent can change servers.
    """

    def __init__(self, seal: ThinkingSeal) -> None:
        self._seal = seal
        self.left_out: list[str] = []  # thinking that was encrypted elsewhere
        self._messages: list[dict[str, Any]] = []
        self._call_names: dict[str, str] = {}  # by call id
        self._answer: dict[str, Any] | None = None  # the assistant's message that items are still added to
        self._ends_in_text = False  # the answer's last item was a message
        self._asked: dict[str, McpApprovalRequestInput] = {}  # calls that no decision has answered yet
        self._results: list[tuple[str, str]] = []  # of the server's own calls, which follow the whole answer

    def add(self, item: AnyInputItem, path: str) -> None:
        match item:
            case MessageInput(role="assistant"):
                self._add_text(text_of_content(item.content))
            case MessageInput():
                self._add_results()
                self._append({"role": item.role, "content": template_parts(item.content)})
            case ReasoningInput():
                thinking = item.thinking(self._seal)
                if thinking is None:
                    self.left_out.append(generalize_path(f"{path}.encrypted_content"))
                self._add_thinking(thinking or "")
            case FunctionCallInput() | CustomCallInput():
                self._add_call(item.call_id, namespaced_tool_name(item.namespace, item.name), item.arguments)
            case FunctionOutputInput() | CustomOutputInput():
                self._add_results()
                self._add_result(item.call_id, template_parts(item.output))
            case McpCallInput():
                call_id = item.call_id or item.id
                self._add_call(call_id, namespaced_tool_name(item.server_label, item.name), item.arguments)
                self._results.append((call_id, item.result))
            case McpApprovalRequestInput():
                self._asked[item.id] = item
            case McpApprovalInput():
                self._add_decision(item, path)
            case ItemReferenceInput():
                raise BadRequest(f"{path}: the item of a reference must not be a reference itself.", param=path)

    def finish(self) -> list[dict[str, Any]]:
        self._add_results()
        return self._messages

    def _add_decision(self, item: McpApprovalInput, path: str) -> None:
        """An approved call has, or gets, an item of its own; one that was refused is there with the refusal."""
        asked = self._asked.pop(item.approval_request_id, None)
        if asked is None:
            where = f"{path}.approval_request_id"
            raise BadRequest(f"{where}: nothing before asks for an approval of that id.", param=where)
        if not item.approve:
            self._add_call(asked.id, namespaced_tool_name(asked.server_label, asked.name), asked.arguments)
            self._results.append((asked.id, CALL_REFUSED + (f" {item.reason}" if item.reason else "")))

    def _add_thinking(self, thinking: str) -> None:
        if not thinking:
            return
        self._add_results()
        if self._answer is not None and (self._answer["content"] or "tool_calls" in self._answer):
            self._answer = None
        answer = self._open_answer()
        answer["reasoning_content"] = answer.get("reasoning_content", "") + thinking
        self._ends_in_text = False

    def _add_text(self, text: str) -> None:
        self._add_results()
        if self._ends_in_text:  # two messages in a row are two turns
            self._answer = None
        answer = self._open_answer()
        answer["content"] = (answer["content"] or "") + text
        self._ends_in_text = True

    def _add_call(self, call_id: str, name: str, arguments: Any) -> None:
        self._open_answer().setdefault("tool_calls", []).append(tool_call_dict(call_id, name, arguments))
        self._call_names[call_id] = name
        self._ends_in_text = False

    def _add_results(self) -> None:
        results, self._results = self._results, []
        for call_id, result in results:
            self._add_result(call_id, result)

    def _add_result(self, call_id: str, content: str | list[dict[str, Any]]) -> None:
        message = {"role": "tool", "tool_call_id": call_id, "content": content}
        name = self._call_names.get(call_id)
        self._append(message if name is None else message | {"name": name})

    def _open_answer(self) -> dict[str, Any]:
        if self._answer is None:
            self._answer = {"role": "assistant", "content": None}
            self._messages.append(self._answer)
            self._ends_in_text = False
        return self._answer

    def _append(self, message: dict[str, Any]) -> None:
        self._answer, self._ends_in_text = None, False
        self._messages.append(message)


def template_parts(content: str | tuple[InputContentPart, ...]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    media = (InputImage, InputVideo, InputFile)
    return template_content([part.medium if isinstance(part, media) else part.text for part in content]) or []


def text_of_content(content: str | tuple[InputContentPart, ...]) -> str:
    """An assistant's text; its messages have no media."""
    if isinstance(content, str):
        return content
    names = {InputImage: "image", InputVideo: "video", InputFile: "file"}
    return "".join(
        OmittedMedia(names[type(part)], supported=True).text
        if isinstance(part, InputImage | InputVideo | InputFile)
        else part.text
        for part in content
    )
