"""The answers of `/v1/responses`: a response, its items, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import TokenInfo, Usage
from ingot.errors import IngotError
from ingot.protocol.chat.answers import IgnoredNote, Receipt
from ingot.protocol.openai.chat_answers import ChatTokenLogprob, chat_token_logprob

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ResponseItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseEventType = Literal[
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


class OutputTextPart(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningTextPart(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryTextPart(Struct, tag_field="type", tag="summary_text"):
    text: str


class MessageOutputItem(Struct, tag_field="type", tag="message"):
    id: str
    status: ResponseItemStatus
    content: list[OutputTextPart]
    role: Literal["assistant"] = "assistant"


class ReasoningOutputItem(Struct, tag_field="type", tag="reasoning"):
    """The thinking is in `summary` where a summary was requested, else in `content`; always in full."""

    id: str
    status: ResponseItemStatus
    summary: list[SummaryTextPart]
    content: list[ReasoningTextPart] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET


class FunctionCallOutputItem(Struct, tag_field="type", tag="function_call"):
    id: str
    status: ResponseItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomCallOutputItem(Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ResponseItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class McpError(Struct, tag_field="type", tag="mcp_tool_execution_error"):
    content: str


class McpCallOutputItem(Struct, tag_field="type", tag="mcp_call"):
    """A call that the server itself made. `call_id` is its id in the model's conversation."""

    id: str
    status: Literal["in_progress", "completed", "incomplete", "calling", "failed"]
    call_id: str
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: McpError | None = None
    approval_request_id: str | None = None


class McpApprovalRequestItem(Struct, tag_field="type", tag="mcp_approval_request"):
    """A call that the server makes once the client approves it."""

    id: str
    server_label: str
    name: str
    arguments: str


class McpListedTool(Struct):
    name: str
    description: str | None
    input_schema: dict[str, Any]
    annotations: None = None


class McpListOutputItem(Struct, tag_field="type", tag="mcp_list_tools"):
    id: str
    server_label: str
    tools: list[McpListedTool]
    error: None = None


class McpServerListed(Struct):
    server_label: str
    tools: list[McpListedTool]


class McpServerList(Struct):
    data: list[McpServerListed]
    object: Literal["list"] = "list"


ResponseOutputItem = (
    MessageOutputItem
    | ReasoningOutputItem
    | FunctionCallOutputItem
    | CustomCallOutputItem
    | McpCallOutputItem
    | McpApprovalRequestItem
    | McpListOutputItem
)


class ResponseErrorBody(Struct):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str

    @classmethod
    def of(cls, error: IngotError) -> ResponseErrorBody:
        if error.status == 429:
            return cls("rate_limit_exceeded", error.message)
        return cls("invalid_prompt" if 400 <= error.status < 499 else "server_error", error.message)


class ResponseIncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseInputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int


class ResponseOutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    """`cache_write_tokens` are the prompt tokens that were computed and cached."""

    input_tokens: int
    input_tokens_details: ResponseInputTokensDetails
    output_tokens: int
    output_tokens_details: ResponseOutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage, *, cached: bool) -> ResponseUsage:
        written = usage.prompt_tokens - usage.cached_tokens if cached else 0
        return cls(
            usage.prompt_tokens,
            ResponseInputTokensDetails(usage.cached_tokens, written),
            usage.completion_tokens,
            ResponseOutputTokensDetails(usage.thinking_tokens),
            usage.prompt_tokens + usage.completion_tokens,
        )


class ResponseReasoningEcho(Struct):
    effort: str | None = None
    summary: str | None = None


class ResponseTextEcho(Struct):
    format: dict[str, Any]


class ResponseBody(Struct, kw_only=True):
    """A response so far, with the request's parameters."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    error: ResponseErrorBody | None = None
    incomplete_details: ResponseIncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[ResponseOutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoningEcho
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: ResponseTextEcho
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
    """One event of the stream; its type decides which fields it has."""

    type: ResponseEventType
    sequence_number: int
    response: ResponseBody | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    item: ResponseOutputItem | UnsetType = UNSET
    part: OutputTextPart | ReasoningTextPart | SummaryTextPart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ResponseTokens(Struct):
    """The number of tokens of a response's prompt."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
    ingot: IgnoredNote | UnsetType = UNSET


class DeletedResponse(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(Struct):
    """The input items of a response, including those of the responses before it."""

    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool
    object: Literal["list"] = "list"


def token_logprobs(tokens: tuple[TokenInfo, ...]) -> list[ChatTokenLogprob]:
    return [chat_token_logprob(token) for token in tokens]
