"""What `/v1/responses` gives: a response, its items, and the events that tell of it while it is made."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import TokenInfo, Usage
from ingot.errors import IngotError
from ingot.protocol.chat.answers import Note, Receipt
from ingot.protocol.openai.chat_answers import TokenEntry, entry

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
EventType = Literal[
    "response.queued",
    "response.created",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
    "response.output_item.added",
    "response.output_item.done",
    "response.content_part.added",
    "response.content_part.done",
    "response.output_text.delta",
    "response.output_text.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.reasoning_summary_part.added",
    "response.reasoning_summary_part.done",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
    "response.mcp_list_tools.in_progress",
    "response.mcp_list_tools.completed",
    "response.mcp_call.in_progress",
    "response.mcp_call_arguments.delta",
    "response.mcp_call_arguments.done",
    "response.mcp_call.completed",
    "response.mcp_call.failed",
]


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenEntry] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    text: str


class MessageItem(Struct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """The thinking stands in `summary` where a summary was asked for, else in `content`; always whole."""

    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomCallItem(Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class McpError(Struct, tag_field="type", tag="mcp_tool_execution_error"):
    content: str


class McpCallItem(Struct, tag_field="type", tag="mcp_call"):
    """A call that the server itself made. `call_id` is the one that the model's conversation knows it by."""

    id: str
    status: Literal["in_progress", "completed", "incomplete", "calling", "failed"]
    call_id: str
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: McpError | None = None
    approval_request_id: None = None


class McpListedTool(Struct):
    name: str
    description: str | None
    input_schema: dict[str, Any]
    annotations: None = None


class McpListItem(Struct, tag_field="type", tag="mcp_list_tools"):
    id: str
    server_label: str
    tools: list[McpListedTool]
    error: None = None


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | McpCallItem | McpListItem


class ResponseFault(Struct):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str

    @classmethod
    def of(cls, error: IngotError) -> ResponseFault:
        if error.status == 429:
            return cls("rate_limit_exceeded", error.message)
        return cls("invalid_prompt" if 400 <= error.status < 499 else "server_error", error.message)


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    """`cache_write_tokens` are the tokens of the prompt that were computed and are kept for requests to come."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage, *, kept: bool) -> ResponseUsage:
        written = usage.prompt_tokens - usage.cached_tokens if kept else 0
        return cls(
            usage.prompt_tokens,
            InputTokensDetails(usage.cached_tokens, written),
            usage.completion_tokens,
            OutputTokensDetails(usage.thinking_tokens),
            usage.prompt_tokens + usage.completion_tokens,
        )


class ReasoningEcho(Struct):
    effort: str | None = None
    summary: str | None = None


class TextEcho(Struct):
    format: dict[str, Any]


class ResponseBody(Struct, kw_only=True):
    """A response as it stands: what was asked, given back, and what has come of it so far."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    ingot: Receipt | UnsetType = UNSET


class ResponseEvent(Struct, kw_only=True):
    """One event of the stream; which fields it has follows from its type."""

    type: EventType
    sequence_number: int
    response: ResponseBody | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | SummaryText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[TokenEntry] | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ResponseTokens(Struct):
    """What a response would take as a prompt."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
    ingot: Note | UnsetType = UNSET


class DeletedResponse(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(Struct):
    """The items that a response answered, those of the responses before it included."""

    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool
    object: Literal["list"] = "list"


def entries(tokens: tuple[TokenInfo, ...]) -> list[TokenEntry]:
    return [entry(token) for token in tokens]
