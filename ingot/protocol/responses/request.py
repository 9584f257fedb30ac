"""`POST /v1/responses` and the queries of `/v1/responses/{id}`: OpenAI's fields, and the task that a body becomes
together with the responses before it."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import msgspec
from msgspec import UNSET

from ingot.engine.request import Sampling
from ingot.errors import BadRequest, Unsupported
from ingot.protocol.chat.answers import AnswerHead, GenerationTask, IgnoredNote, PromptSource
from ingot.protocol.chat.ask import (
    REASONING_EFFORTS,
    ChatFieldNames,
    ChatInput,
    JsonObjectResponseFormat,
    OutputGrammar,
    TextResponseFormat,
    ThinkingOptions,
    ToolChoice,
    ToolDefinition,
    json_output,
    thinking_options,
)
from ingot.protocol.chat.generation_fields import ABOUT_HOLD_CALLS, GenerationBody
from ingot.protocol.chat.preparation import PreparedChat, prepare_chat
from ingot.protocol.openai.chat import SERVICE_TIER_REFUSED
from ingot.protocol.responses.answers import (
    InputItemList,
    ResponseBody,
    ResponseReasoningEcho,
    ResponseTextEcho,
    ResponseTokens,
)
from ingot.protocol.responses.input_items import INPUT_ITEMS, AnyInputItem, InputConversation, namespaced_tool_name
from ingot.protocol.responses.output import (
    ApprovedCall,
    ResponseBuilder,
    ResponseBuildOptions,
    make_item_id,
    response_id_of_item,
)
from ingot.protocol.responses.stored_response import StoredResponse
from ingot.protocol.responses.tools import (
    RESPONSE_TOOL_CHOICE,
    RESPONSE_TOOLS,
    RemoteMcpTools,
    ResponseTool,
    ResponseToolChoice,
    Toolbox,
)
from ingot.protocol.schema import bounds, foreign
from ingot.protocol.schema.fields import (
    Anything,
    BodyReading,
    Bool,
    Either,
    HintField,
    Int,
    ListOf,
    MapOf,
    OneOf,
    Text,
)
from ingot.protocol.schema.model_fields import TemplateVariablesField, TokenLimitField
from ingot.protocol.schema.objects import Is, IsSet, Never, Not, ObjectOf, accepts, refuses, requires, tagged
from ingot.protocol.served import ServedModel

ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"
OUTPUT_LOGPROBS: Final = "message.output_text.logprobs"
# The rest are parts of items that no response here has.
INCLUDABLE_FIELDS: Final = (
    ENCRYPTED_REASONING,
    OUTPUT_LOGPROBS,
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


@dataclass(frozen=True, slots=True)
class ResponseStreamOptions:
    include_obfuscation: None = refuses("is not supported: events are never padded. Send false.", False)


@dataclass(frozen=True, slots=True)
class ResponseSchemaFormat:
    type: str = requires(OneOf(("json_schema",)), "JSON by a schema.")
    name: str = requires(Text(bounds.NAME_CHARS, least=1), "What the schema is called.")
    schema: dict[str, Any] = requires(Anything(dict), "The JSON schema.")
    description: str | None = accepts(Text(), "What it is for; not shown to the model.")
    strict: bool | None = accepts(Bool(), "The answer always matches the schema.")

    @property
    def output(self) -> OutputGrammar:
        return json_output(self.schema)


@dataclass(frozen=True, slots=True)
class ResponseTextOptions:
    format: TextResponseFormat | JsonObjectResponseFormat | ResponseSchemaFormat | None = accepts(
        tagged("type", TextResponseFormat, JsonObjectResponseFormat, ResponseSchemaFormat),
        "The format of the answer.",
    )
    verbosity: None = accepts(
        HintField("medium", kind=OneOf(("low", "medium", "high"))), "Not shown to the model. Named in the receipt."
    )


REASONING_SUMMARY = OneOf(
    ("auto", "detailed"),
    {"concise": "is not supported: thinking is not summarised. 'auto' and 'detailed' return all of it."},
)


@dataclass(frozen=True, slots=True)
class ResponseReasoningOptions:
    effort: str | None = accepts(
        OneOf(REASONING_EFFORTS), "How much to think; `none` answers at once. A model that cannot think ignores it."
    )
    summary: str | None = accepts(REASONING_SUMMARY, "Return the thinking as a summary, which has all of it.")
    generate_summary: str | None = accepts(REASONING_SUMMARY, "The older name of `summary`.")
    context: None = refuses("is not supported: the chat template decides which past thinking is shown.", "auto")
    mode: None = refuses("is not supported.", "standard")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesBody(GenerationBody):
    input: str | tuple[AnyInputItem, ...] | None = accepts(
        Either((Text(), INPUT_ITEMS)), "What to answer: a text, or the items of a conversation."
    )
    instructions: str | None = accepts(Text(), "A system message before everything else, for this response alone.")
    previous_response_id: str | None = accepts(
        Text(bounds.IDENTIFIER_CHARS), "A stored response to continue; its conversation comes before the input."
    )
    store: bool | None = accepts(Bool(), "Store the response, to continue or to retrieve it (default: true).")
    background: bool = accepts(Bool(), "Answer at once, and continue without a client.", default=False)
    include: tuple[str, ...] = accepts(
        ListOf(OneOf(INCLUDABLE_FIELDS), most=len(INCLUDABLE_FIELDS)), "Additional parts of the items.", default=()
    )
    max_output_tokens: int | None = accepts(
        TokenLimitField(bounds.MAX_TOKENS), "Most tokens to generate; by default, as many as the context holds."
    )
    max_tool_calls: int | None = accepts(Int(bounds.SERVER_CALLS), "Most calls of MCP tools that the server makes.")
    top_logprobs: int | None = accepts(Int(bounds.TOP_LOGPROBS), "Return this many likeliest tokens.")

    tools: tuple[ResponseTool, ...] = accepts(RESPONSE_TOOLS, "Tools that the model may call.", default=())
    tool_choice: ResponseToolChoice | None = accepts(
        RESPONSE_TOOL_CHOICE, "Whether a tool is called: never, as the model decides (auto), always, or which one."
    )
    parallel_tool_calls: bool = accepts(Bool(), "Whether an answer may hold several calls.", default=True)
    hold_calls: bool | None = accepts(Bool(), ABOUT_HOLD_CALLS)
    reasoning: ResponseReasoningOptions | None = accepts(
        ObjectOf(ResponseReasoningOptions), "How to think, and how to return the thinking."
    )
    text: ResponseTextOptions | None = accepts(ObjectOf(ResponseTextOptions), "The format of the answer.")
    enable_thinking: bool | None = accepts(Bool(), "Switches thinking on or off.")
    thinking_budget: int | None = accepts(
        TokenLimitField(bounds.THINKING_BUDGET), "Most tokens of thinking; it is then closed, and the answer continues."
    )
    chat_template_kwargs: dict[str, Any] | None = accepts(
        TemplateVariablesField(), "Values for variables that the model's chat template reads."
    )

    truncation: str | None = accepts(
        OneOf(("disabled",), {"auto": "is not supported: conversations are never truncated."}),
        "A conversation that is too long is refused.",
    )
    service_tier: str | None = accepts(
        OneOf(
            ("auto", "default"), dict.fromkeys(("flex", "scale", "priority", "fast", "ultrafast"), SERVICE_TIER_REFUSED)
        ),
        "Every request is served alike.",
    )
    metadata: dict[str, str] | None = accepts(
        MapOf(Text(bounds.METADATA_VALUE_CHARS), bounds.METADATA_ENTRIES, bounds.METADATA_KEY_CHARS),
        "Returned with the response.",
    )
    client_metadata: dict[str, Any] | None = accepts(Anything(dict), "About the client; not stored.")
    safety_identifier: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "The end user; returned with the response.")
    prompt_cache_key: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "A hint; prompts are matched by content.")
    prompt_cache_retention: str | None = accepts(
        OneOf(("in_memory", "24h")), "The longest time a prompt may be cached; none outlives the server."
    )
    stream_options: ResponseStreamOptions | None = accepts(  # type: ignore[assignment]
        ObjectOf(ResponseStreamOptions), "How to stream. The last event always has the usage."
    )

    n: None = refuses("is not supported: a response is one answer.", 1)  # type: ignore[assignment]
    conversation: None = refuses("is not supported: continue a response with previous_response_id.")
    prompt: None = refuses("is not supported: prompts are not stored here. Send instructions and input.")
    context_management: None = refuses("is not supported: conversations are never truncated.", [])
    moderation: None = refuses("is not supported: nothing is moderated.")
    prompt_cache_options: None = refuses("is not supported: the server decides what it caches.")
    image: None = refuses("is not supported: the served model is run on text alone.")
    access_programs: None = refuses("is not supported.")

    @property
    def wants_logprobs(self) -> bool:
        return OUTPUT_LOGPROBS in self.include or bool(self.top_logprobs)

    @property
    def summary(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.summary or self.reasoning.generate_summary

    @property
    def output(self) -> OutputGrammar | None:
        format = None if self.text is None else self.text.format
        return None if format is None or isinstance(format, TextResponseFormat) else format.output

    @property
    def thinking(self) -> ThinkingOptions:
        effort = None if self.reasoning is None else self.reasoning.effort
        return thinking_options(
            enabled={"enable_thinking": self.enable_thinking},
            budget={"thinking_budget": self.thinking_budget},
            effort={"reasoning": effort},
        )


RESPONSES_BODY = ObjectOf(
    ResponsesBody,
    (
        Never((Not(IsSet("input")), Not(IsSet("previous_response_id"))), "input is required.", param="input"),
        Never(
            (Is("background", True), Is("store", False)),
            "A background response is stored until it is retrieved: store must not be false.",
            param="store",
        ),
    ),
    foreign.RESPONSES,
)


INCLUDE_QUERY = ListOf(OneOf(INCLUDABLE_FIELDS), most=len(INCLUDABLE_FIELDS))
ABOUT_INCLUDE_QUERY: Final = "Has no effect: a stored response is returned as it was."
LIST_QUERIES: Final = frozenset({"include"})


@dataclass(frozen=True, slots=True)
class ResponseQuery:
    include: tuple[str, ...] = accepts(INCLUDE_QUERY, ABOUT_INCLUDE_QUERY, default=())
    stream: bool = accepts(Bool(), "Send the events of a background response, past and future ones.", default=False)
    starting_after: int | None = accepts(
        Int((0, 10**9 - 1)), "Leave out the events up to this one's sequence_number; needs stream."
    )
    include_obfuscation: None = refuses("is not supported: events are never padded.", False)


@dataclass(frozen=True, slots=True)
class ItemsQuery:
    limit: int = accepts(Int(bounds.PAGE), "Most items to list.", default=20)
    order: str = accepts(OneOf(("asc", "desc")), "Oldest or newest first.", default="desc")
    after: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "The last item of the page before.")
    include: tuple[str, ...] = accepts(INCLUDE_QUERY, ABOUT_INCLUDE_QUERY, default=())


RESPONSE_QUERY = ObjectOf(
    ResponseQuery,
    (
        Never(
            (IsSet("starting_after"), Not(Is("stream", True))),
            "starting_after leaves out events, and needs stream to be true.",
            param="starting_after",
        ),
    ),
)
ITEMS_QUERY = ObjectOf(ItemsQuery)


def read_query(pairs: Iterable[tuple[str, str]], record: ObjectOf, reading: BodyReading) -> Any:
    """Parses the parameters of a query."""
    value: dict[str, Any] = {}
    for name, text in pairs:
        name = name.removesuffix("[]")
        if name in LIST_QUERIES:
            value.setdefault(name, []).append(text)
        else:
            value[name] = plain_query_value(text)
    return record.parse(value, "", reading)


def plain_query_value(text: str) -> str | int | bool:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text


def list_input_items(items: list[dict[str, Any]], query: ItemsQuery) -> InputItemList:
    """A page of the items."""
    ordered = items if query.order == "asc" else items[::-1]
    begin = next((at + 1 for at, item in enumerate(ordered) if item["id"] == query.after), 0)
    page = ordered[begin : begin + query.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return InputItemList(page, first, last, begin + query.limit < len(ordered))


RESPONSE_FIELD_NAMES: Final = ChatFieldNames(messages="input", output="text.format", thinking="reasoning")
ITEMS_WITH_STATUS: Final = frozenset(
    {"message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"}
)
ECHOED_FIELDS: Final = (
    *("background", "instructions", "max_output_tokens", "max_tool_calls", "parallel_tool_calls"),
    *("previous_response_id", "prompt_cache_key", "safety_identifier", "user"),
)
UNMADE_RESPONSE_ID: Final = "resp_" + "0" * 24  # of a response that is not made
ITEM_ID_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "mcp_list_tools": "mcpl",
    "mcp_approval_response": "mcpa",
}


class PreviousResponseNotFound(BadRequest):
    code = "previous_response_not_found"


class PastResponses(Protocol):
    """The stored responses of one tenant."""

    def find(self, response_id: str) -> StoredResponse | None: ...

    def check(self) -> None:
        """Raises Unavailable where nothing can be stored."""


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """What a body is parsed with besides the served model: the tenant's responses and the server's MCP tools."""

    past: PastResponses | None  # None: responses are not stored here
    remote: RemoteMcpTools


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """A parsed body. `first` is the first task; where the server makes calls, `next_task` is the one after them."""

    body: ResponsesBody
    served: ServedModel
    builder: ResponseBuilder
    first: GenerationTask
    items: list[dict[str, Any]]  # the input, which is stored with the response
    store: bool
    approved: tuple[ApprovedCall, ...] = ()  # calls to make before the model goes on

    def next_task(self) -> GenerationTask | None:
        """After the calls were made; None where no more may be generated. Not for an event loop."""
        total, limit = self.builder.total, self.body.max_output_tokens
        generated = 0 if total is None else total.usage.completion_tokens
        if limit is not None and generated >= limit:
            return None
        output = msgspec.to_builtins(self.builder.snapshot().output)
        shown, choice = self.builder.toolbox.chosen(self.body.tool_choice)
        # A forced call has been made: forcing it again would never lead to an answer.
        tools: tuple[tuple[ToolDefinition, ...], ToolChoice] = shown, "none" if choice == "none" else "auto"
        prepared = prepare_response(self.body, self.served, tools, [*self.items, *output])
        request = replace(
            self.first.request,
            prompts=(prepared.prompt,),
            reading=prepared.reading,
            grammar=prepared.grammar,
            marks=prepared.marks,
            media=prepared.media,
            specprefill=self.body.specprefill_request(self.served, prepared.sources),
            max_tokens=None if limit is None else limit - generated,
        )
        self.builder.head = replace(self.builder.head, source=PromptSource.of(self.served, prepared.sources))
        return replace(self.first, request=request, head=self.builder.head, turn=prepared.turn)


def read_response(value: Any, served: ServedModel, request_id: str, context: ResponseContext) -> ResponsePlan:
    """The plan of a decoded body. Renders and reads the store: not for an event loop."""
    reading = served.reading()
    body: ResponsesBody = RESPONSES_BODY.parse(value, "", reading)
    store = is_stored(body, context)
    toolbox = Toolbox(body.tools, context.remote)
    if toolbox.left_out and reading.terms.strict:
        raise Unsupported(f"{toolbox.left_out[0]} has no effect here, and this server is strict.", param="tools")
    reading.ignored.extend(dict.fromkeys(toolbox.left_out))
    items = read_input_items(value, context, request_id)
    prepared = prepare_response(body, served, toolbox.chosen(body.tool_choice), items)
    reading.ignored.extend(prepared.ignored)
    request = body.request(
        request_id,
        served,
        [prepared],
        model=body.model,
        adapter=body.adapter,
        max_tokens=body.max_output_tokens,
        sampling=body.sampling(served, logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None),
        stop=body.stopping(served, body.stop),
    )
    head = AnswerHead.of(request_id, int(time.time()), served, reading, prepared.sources, request)
    options = ResponseBuildOptions(
        summary=body.summary is not None,
        seal=served.seal if ENCRYPTED_REASONING in body.include else None,
        logprobs=body.wants_logprobs,
        cached=request.cache,
    )
    builder = ResponseBuilder(head, echo_response(value, body, head, request.sampling, store=store), toolbox, options)
    first = GenerationTask(request, builder, "input", head, prepared.turn)
    return ResponsePlan(body, served, builder, first, items, store, approved_calls(items, toolbox))


def approved_calls(items: list[dict[str, Any]], toolbox: Toolbox) -> tuple[ApprovedCall, ...]:
    """The calls that the client approved and that no item says were made. Raises BadRequest where a tool is gone."""
    made = {item.get("approval_request_id") for item in items if item["type"] == "mcp_call"}
    approved = {
        item["approval_request_id"]
        for item in items
        if item["type"] == "mcp_approval_response" and item["approve"] is True
    }
    calls = []
    for at, item in enumerate(items):
        if item["type"] != "mcp_approval_request" or item["id"] not in approved - made:
            continue
        offer = toolbox.of(namespaced_tool_name(item["server_label"], item["name"]))
        if offer is None or offer.kind != "mcp":
            where = f"input.{at}.name"
            raise BadRequest(f"{where}: '{item['name'][:100]}' was approved, but is not among the tools.", param=where)
        arguments = item.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        calls.append(ApprovedCall(item["id"], offer, text))
    return tuple(calls)


def count_response_tokens(value: Any, served: ServedModel, context: ResponseContext) -> ResponseTokens:
    """The exact length of the prompt."""
    plan = read_response(value, served, UNMADE_RESPONSE_ID, context)
    ignored = plan.builder.head.ignored
    return ResponseTokens(len(plan.first.request.prompts[0]), ingot=IgnoredNote(ignored) if ignored else UNSET)


def is_stored(body: ResponsesBody, context: ResponseContext) -> bool:
    """Whether the response is to be stored."""
    if context.past is not None:
        if body.store is not False:
            context.past.check()
        return body.store is not False
    for name, value in (("store", body.store), ("background", body.background)):
        if value:
            raise Unsupported(f"{name} is not supported: this server was started without a response store.", param=name)
    return False


def read_input_items(value: Mapping[str, Any], context: ResponseContext, request_id: str) -> list[dict[str, Any]]:
    """All items of the conversation, the stored ones first, each with a type and an id."""
    raw = value.get("input")
    own = [{"role": "user", "content": raw}] if isinstance(raw, str) else raw or []
    past = [] if value.get("previous_response_id") is None else previous_items(value["previous_response_id"], context)
    return past + [
        resolve_reference(item, context, at) or complete_item(item, request_id, at) for at, item in enumerate(own)
    ]


def previous_items(response_id: str, context: ResponseContext) -> list[dict[str, Any]]:
    stored = None if context.past is None else context.past.find(response_id)
    if stored is None:
        raise PreviousResponseNotFound(
            f"There is no stored response '{response_id[:100]}'.", param="previous_response_id"
        )
    if stored.response["status"] in ("queued", "in_progress"):
        raise BadRequest(f"The response '{response_id}' has not ended yet.", param="previous_response_id")
    return stored.conversation


def resolve_reference(item: dict[str, Any], context: ResponseContext, at: int) -> dict[str, Any] | None:
    """The stored item that `item` refers to, or None where it is not a reference."""
    if item.get("type") not in (None, "item_reference") or "role" in item:
        return None
    response_id = response_id_of_item(item["id"])
    stored = context.past.find(response_id) if context.past is not None and response_id is not None else None
    for each in () if stored is None else stored.conversation:
        if each.get("id") == item["id"]:
            return each
    param = f"input.{at}.id"
    raise BadRequest(f"{param}: there is no stored item '{item['id'][:100]}'.", param=param)


def complete_item(item: dict[str, Any], request_id: str, at: int) -> dict[str, Any]:
    """`item` with the fields that lists of items have."""
    made = {"id": None, **item, "type": item.get("type") or "message"}
    if made["id"] is None:
        made["id"] = make_item_id(ITEM_ID_PREFIXES.get(made["type"], "item"), request_id, f"in{at}")
    if made["type"] in ITEMS_WITH_STATUS and made.get("status") is None:
        made["status"] = "completed"
    if made["type"] == "message" and isinstance(made["content"], str):
        kind = {"type": "output_text", "annotations": []} if made["role"] == "assistant" else {"type": "input_text"}
        made["content"] = [kind | {"text": made["content"]}]
    return made


def prepare_response(
    body: ResponsesBody,
    served: ServedModel,
    tools: tuple[tuple[ToolDefinition, ...], ToolChoice],
    items: list[dict[str, Any]],
) -> PreparedChat:
    conversation = InputConversation(served.seal)
    # The client's own items were checked already; here nothing is refused or noted.
    for at, item in enumerate(INPUT_ITEMS.parse(items, "input", BodyReading(replace(served.terms, strict=False)))):
        conversation.add(item, f"input.{at}")
    messages = conversation.finish()
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    if not messages:
        raise BadRequest("input is empty: there is nothing to answer.", param="input")
    shown, choice = tools
    ask = ChatInput(
        messages=messages,
        tools=shown,
        choice=choice,
        parallel=body.parallel_tool_calls,
        hold_calls=body.hold_calls,
        thinking=body.thinking,
        output=body.output,
        variables=body.chat_template_kwargs,
    )
    prepared = prepare_chat(served, body.remembering(ask), names=RESPONSE_FIELD_NAMES)
    return replace(prepared, ignored=(*prepared.ignored, *dict.fromkeys(conversation.left_out)))


def echo_response(
    value: Mapping[str, Any], body: ResponsesBody, head: AnswerHead, sampling: Sampling, *, store: bool
) -> ResponseBody:
    """The response without output: the request's parameters."""
    text = value.get("text") or {}
    return ResponseBody(
        id=head.id,
        created_at=head.created,
        status="queued" if body.background else "in_progress",
        model=head.model,
        output=[],
        reasoning=ResponseReasoningEcho(None if body.reasoning is None else body.reasoning.effort, body.summary),
        store=store,
        temperature=sampling.temperature,
        text=ResponseTextEcho(text.get("format") or {"type": "text"}),
        tool_choice=value.get("tool_choice") or "auto",
        tools=[dict(tool) for tool in value.get("tools") or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        metadata=body.metadata or {},
        **{name: getattr(body, name) for name in ECHOED_FIELDS},
    )
