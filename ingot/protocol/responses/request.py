"""`POST /v1/responses` and the queries of `/v1/responses/{id}`: every field as OpenAI describes it, honoured or refused
by name, and the generation task that a body becomes in the light of the responses before it."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)

from __future__ import annotations

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
    AskedOutput,
    AskFieldNames,
    ChatAsk,
    JsonObjectResponseFormat,
    JsonSchemaOutput,
    TextResponseFormat,
    ThinkingOptions,
    ToolChoice,
    ToolDefinition,
    thinking_options,
)
from ingot.protocol.chat.generation_fields import ABOUT_HOLD_CALLS, GenerationBody
from ingot.protocol.chat.preparation import PreparedChat, prepare_ask
from ingot.protocol.openai.chat import SERVICE_TIER_REFUSED
from ingot.protocol.responses.answers import (
    InputItemList,
    ResponseBody,
    ResponseReasoningEcho,
    ResponseTextEcho,
    ResponseTokens,
)
from ingot.protocol.responses.input_items import INPUT_ITEMS, AnyInputItem, InputConversation
from ingot.protocol.responses.output import ResponseBuilder, ResponseBuildOptions, make_item_id, response_id_of_item
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
    HintWordField,
    Int,
    ListOf,
    MapOf,
    OneOf,
    Text,
)
from ingot.protocol.schema.model_fields import TemplateVariablesField, TokenLimitField
from ingot.protocol.schema.objects import Is, IsGiven, Never, Not, ObjectOf, accepts, refuses, requires, tagged
from ingot.protocol.served import ServedModel

ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"
OUTPUT_LOGPROBS: Final = "message.output_text.logprobs"
# The rest asks for parts of items that no response here has.
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
    description: str | None = accepts(Text(), "What it is for; the model is not told.")
    strict: bool | None = accepts(Bool(), "The answer is always held to the schema.")

    @property
    def output(self) -> AskedOutput:
        return JsonSchemaOutput(self.schema)


@dataclass(frozen=True, slots=True)
class ResponseTextOptions:
    format: TextResponseFormat | JsonObjectResponseFormat | ResponseSchemaFormat | None = accepts(
        tagged("type", TextResponseFormat, JsonObjectResponseFormat, ResponseSchemaFormat),
        "The form that the answer is held to.",
    )
    verbosity: None = accepts(
        HintWordField(("low", "medium", "high"), harmless=("medium",)),
        "A hint for the model, which is not told. Named in the receipt.",
    )


REASONING_SUMMARY = OneOf(
    ("auto", "detailed"),
    {"concise": "is not supported: nothing here sums up. 'auto' and 'detailed' give the thinking whole."},
)


@dataclass(frozen=True, slots=True)
class ResponseReasoningOptions:
    effort: str | None = accepts(
        OneOf(REASONING_EFFORTS), "How much to think; `none` answers at once. A model that cannot think ignores it."
    )
    summary: str | None = accepts(REASONING_SUMMARY, "Tell the thinking as a summary, which holds all of it.")
    generate_summary: str | None = accepts(REASONING_SUMMARY, "The older name of `summary`.")
    context: None = refuses("is not supported: the chat template decides which past thinking is shown.", "auto")
    mode: None = refuses("is not supported.", "standard")

    @property
    def told(self) -> str | None:
        return self.summary or self.generate_summary


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesBody(GenerationBody):
    input: str | tuple[AnyInputItem, ...] | None = accepts(
        Either((Text(), INPUT_ITEMS)), "What to answer: a text, or the items of a conversation."
    )
    instructions: str | None = accepts(Text(), "A system message before everything else, for this response alone.")
    previous_response_id: str | None = accepts(
        Text(bounds.IDENTIFIER_CHARS), "A stored response to go on from; its conversation comes before the input."
    )
    store: bool | None = accepts(Bool(), "Keep the response, to go on from it or to retrieve it (default: true).")
    background: bool = accepts(Bool(), "Answer at once, and go on without a client.", default=False)
    include: tuple[str, ...] = accepts(
        ListOf(OneOf(INCLUDABLE_FIELDS), most=len(INCLUDABLE_FIELDS)), "What else items are to hold.", default=()
    )
    max_output_tokens: int | None = accepts(
        TokenLimitField(bounds.MAX_TOKENS), "Most tokens to generate; by default, as many as the context holds."
    )
    max_tool_calls: int | None = accepts(Int(bounds.SERVER_CALLS), "Most calls of MCP tools that the server makes.")
    top_logprobs: int | None = accepts(Int(bounds.TOP_LOGPROBS), "Give the likeliest tokens for each of the text.")

    tools: tuple[ResponseTool, ...] = accepts(RESPONSE_TOOLS, "Tools that the model may call.", default=())
    tool_choice: ResponseToolChoice | None = accepts(
        RESPONSE_TOOL_CHOICE, "Whether a tool is called: never, as the model likes (auto), always, or which one."
    )
    parallel_tool_calls: bool = accepts(Bool(), "Whether an answer may hold several calls.", default=True)
    hold_calls: bool | None = accepts(Bool(), ABOUT_HOLD_CALLS)
    reasoning: ResponseReasoningOptions | None = accepts(
        ObjectOf(ResponseReasoningOptions), "How to think, and how to tell of it."
    )
    text: ResponseTextOptions | None = accepts(ObjectOf(ResponseTextOptions), "The form of the answer.")
    enable_thinking: bool | None = accepts(Bool(), "Switches thinking on or off.")
    thinking_budget: int | None = accepts(
        TokenLimitField(bounds.THINKING_BUDGET), "Most tokens of thinking; it is then closed, and the answer goes on."
    )
    chat_template_kwargs: dict[str, Any] | None = accepts(
        TemplateVariablesField(), "Values for variables that the model's chat template reads."
    )

    truncation: str | None = accepts(
        OneOf(("disabled",), {"auto": "is not supported: nothing is left out of a conversation unasked."}),
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
        "Given back with the response.",
    )
    client_metadata: dict[str, Any] | None = accepts(Anything(dict), "What a client says of itself; kept by nobody.")
    safety_identifier: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "Who asks; given back.")
    prompt_cache_key: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "A hint; prompts are matched by content.")
    prompt_cache_retention: str | None = accepts(
        OneOf(("in_memory", "24h")), "The longest a cached prompt may be kept; none outlives the server."
    )
    stream_options: ResponseStreamOptions | None = accepts(  # type: ignore[assignment]
        ObjectOf(ResponseStreamOptions), "How to stream. The last event always tells the usage."
    )

    n: None = refuses("is not supported: a response is one answer.", 1)  # type: ignore[assignment]
    conversation: None = refuses("is not supported: go on from a response with previous_response_id.")
    prompt: None = refuses("is not supported: prompts are not stored here. Send instructions and input.")
    context_management: None = refuses("is not supported: a conversation is never shortened here.", [])
    moderation: None = refuses("is not supported: nothing is moderated.")
    prompt_cache_options: None = refuses("is not supported: the server decides what it keeps.")
    image: None = refuses("is not supported: the served model is run on text alone.")
    access_programs: None = refuses("is not supported.")

    @property
    def wants_logprobs(self) -> bool:
        return OUTPUT_LOGPROBS in self.include or bool(self.top_logprobs)

    @property
    def summary(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.told

    @property
    def output(self) -> AskedOutput | None:
        held = None if self.text is None else self.text.format
        return held.output if isinstance(held, JsonObjectResponseFormat | ResponseSchemaFormat) else None

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
        Never((Not(IsGiven("input")), Not(IsGiven("previous_response_id"))), "input is required.", param="input"),
        Never(
            (Is("background", True), Is("store", False)),
            "A background response is kept until it is retrieved: store must not be false.",
            param="store",
        ),
    ),
    foreign.RESPONSES,
)


INCLUDE_QUERY = ListOf(OneOf(INCLUDABLE_FIELDS), most=len(INCLUDABLE_FIELDS))
ABOUT_INCLUDE_QUERY: Final = "Has no effect: a stored response is given as it was answered."
LIST_QUERIES: Final = frozenset({"include"})


@dataclass(frozen=True, slots=True)
class ResponseQuery:
    include: tuple[str, ...] = accepts(INCLUDE_QUERY, ABOUT_INCLUDE_QUERY, default=())
    stream: bool = accepts(
        Bool(), "Send the events of a response in the background, those to come as they come.", default=False
    )
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
            (IsGiven("starting_after"), Not(Is("stream", True))),
            "starting_after leaves out events, and needs stream to be true.",
            param="starting_after",
        ),
    ),
)
ITEMS_QUERY = ObjectOf(ItemsQuery)


def read_query(pairs: Iterable[tuple[str, str]], record: ObjectOf, reading: BodyReading) -> Any:
    """The query that `pairs` spell, as the record describes it."""
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
    places = [at for at, item in enumerate(ordered) if item["id"] == query.after]
    begin = places[0] + 1 if places else 0
    page = ordered[begin : begin + query.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return InputItemList(page, first, last, begin + query.limit < len(ordered))


RESPONSE_FIELD_NAMES: Final = AskFieldNames(messages="input", output="text.format", thinking="reasoning")
ITEMS_WITH_STATUS: Final = frozenset(
    {"message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"}
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
    """What a body is read in the light of, besides the served model: the asking tenant's, and the server's."""

    past: PastResponses | None  # None: responses are not kept here
    remote: RemoteMcpTools


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """A body, read. `first` is what the engine is to do; where the server makes calls, `go_on` says what next."""

    body: ResponsesBody
    served: ServedModel
    composer: ResponseBuilder
    first: GenerationTask
    items: list[dict[str, Any]]  # what the response answers, to be kept with it
    store: bool

    def go_on(self) -> GenerationTask | None:
        """After the calls were made; None where no more may be generated. Not for an event loop."""
        spent = self.composer.spent.usage.completion_tokens
        limit = self.body.max_output_tokens
        if limit is not None and spent >= limit:
            return None
        output = msgspec.to_builtins(self.composer.snapshot().output)
        shown, choice = self.composer.toolbox.chosen(self.body.tool_choice)
        # A call that was forced has been made: forcing it again would never come to an answer.
        further: tuple[tuple[ToolDefinition, ...], ToolChoice] = shown, "none" if choice == "none" else "auto"
        wanted = prepare_response_ask(self.body, self.served, further, [*self.items, *output])
        request = replace(
            self.first.request,
            prompts=(wanted.prompt,),
            reading=wanted.reading,
            guide=wanted.guide,
            marks=wanted.marks,
            media=wanted.media,
            sparse=self.body.sparse(wanted.sources),
            max_tokens=None if limit is None else limit - spent,
        )
        self.composer.head = replace(self.composer.head, source=PromptSource.of(self.served, wanted.sources))
        return replace(self.first, request=request, head=self.composer.head, turn=wanted.turn)


def read_response(value: Any, served: ServedModel, request_id: str, around: ResponseContext) -> ResponsePlan:
    """The plan that a decoded body asks for. Renders and looks things up: not for an event loop."""
    reading = served.reading()
    body: ResponsesBody = RESPONSES_BODY.parse(value, "", reading)
    store = is_stored(body, around)
    toolbox = Toolbox(body.tools, around.remote)
    note_omitted_tools(toolbox, reading)
    items = read_input_items(value, around, request_id)
    wanted = prepare_response_ask(body, served, toolbox.chosen(body.tool_choice), items)
    reading.ignored.extend(wanted.ignored)
    request = body.request(
        request_id,
        served,
        [wanted],
        model=body.model,
        adapter=body.adapter,
        max_tokens=body.max_output_tokens,
        sampling=body.sampling(served, logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None),
        stop=body.stopping(body.stop),
    )
    head = AnswerHead.of(request_id, int(time.time()), served, reading, wanted.sources, request)
    telling = ResponseBuildOptions(
        summary=body.summary is not None,
        seal=served.seal if ENCRYPTED_REASONING in body.include else None,
        logprobs=body.wants_logprobs,
        kept=request.cache,
    )
    composer = ResponseBuilder(head, echo_response(value, body, head, request.sampling, store=store), toolbox, telling)
    return ResponsePlan(
        body, served, composer, GenerationTask(request, composer, "input", head, wanted.turn), items, store
    )


def count_response_tokens(value: Any, served: ServedModel, around: ResponseContext) -> ResponseTokens:
    """How long the prompt would be, exactly."""
    plan = read_response(value, served, UNMADE_RESPONSE_ID, around)
    ignored = plan.composer.head.ignored
    return ResponseTokens(len(plan.first.request.prompts[0]), ingot=IgnoredNote(ignored) if ignored else UNSET)


def is_stored(body: ResponsesBody, around: ResponseContext) -> bool:
    """Whether the response is to be stored."""
    if around.past is not None:
        if body.store is not False:
            around.past.check()
        return body.store is not False
    for name, asks in (("store", body.store), ("background", body.background)):
        if asks:
            raise Unsupported(
                f"{name} is not supported: this server was started without a store of responses.", param=name
            )
    return False


def note_omitted_tools(toolbox: Toolbox, reading: BodyReading) -> None:
    if toolbox.left_out and reading.terms.strict:
        raise Unsupported(f"{toolbox.left_out[0]} has no effect here, and this server is strict.", param="tools")
    reading.ignored.extend(dict.fromkeys(toolbox.left_out))


def read_input_items(value: Mapping[str, Any], around: ResponseContext, request_id: str) -> list[dict[str, Any]]:
    """All items that the response answers, the stored ones first, each with a type and an id."""
    given = value.get("input")
    own = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    past = [] if value.get("previous_response_id") is None else previous_items(value["previous_response_id"], around)
    return past + [
        resolve_reference(item, around, at) or complete_item(item, request_id, at) for at, item in enumerate(own)
    ]


def previous_items(response_id: str, around: ResponseContext) -> list[dict[str, Any]]:
    kept = None if around.past is None else around.past.find(response_id)
    if kept is None:
        raise PreviousResponseNotFound(
            f"There is no stored response '{response_id[:100]}'.", param="previous_response_id"
        )
    if kept.response["status"] in ("queued", "in_progress"):
        raise BadRequest(f"The response '{response_id}' has not ended yet.", param="previous_response_id")
    return kept.conversation


def resolve_reference(item: dict[str, Any], around: ResponseContext, at: int) -> dict[str, Any] | None:
    """The stored item that `item` refers to, or None where it is no reference."""
    if item.get("type") not in (None, "item_reference") or "role" in item:
        return None
    response_id = response_id_of_item(item["id"])
    kept = around.past.find(response_id) if around.past is not None and response_id is not None else None
    found = [] if kept is None else [each for each in kept.conversation if each.get("id") == item["id"]]
    if not found:
        param = f"input.{at}.id"
        raise BadRequest(f"{param}: there is no stored item '{item['id'][:100]}'.", param=param)
    return found[0]


def complete_item(item: dict[str, Any], request_id: str, at: int) -> dict[str, Any]:
    """`item` as lists of items show it."""
    made = {"id": None, **item, "type": item.get("type") or "message"}
    if made["id"] is None:
        made["id"] = make_item_id(ITEM_ID_PREFIXES.get(made["type"], "item"), request_id, f"in{at}")
    if made["type"] in ITEMS_WITH_STATUS and made.get("status") is None:
        made["status"] = "completed"
    if made["type"] == "message" and isinstance(made["content"], str):
        kind = {"type": "output_text", "annotations": []} if made["role"] == "assistant" else {"type": "input_text"}
        made["content"] = [kind | {"text": made["content"]}]
    return made


def prepare_response_ask(
    body: ResponsesBody,
    served: ServedModel,
    tools: tuple[tuple[ToolDefinition, ...], ToolChoice],
    items: list[dict[str, Any]],
) -> PreparedChat:
    conversation = InputConversation(served.seal)
    # The client's own items were read already; these are read quietly, for what they say.
    for at, item in enumerate(INPUT_ITEMS.parse(items, "input", BodyReading(replace(served.terms, strict=False)))):
        conversation.add(item, f"input.{at}")
    said = conversation.finish()
    if body.instructions is not None:
        said = [{"role": "system", "content": body.instructions}, *said]
    if not said:
        raise BadRequest("input is empty: there is nothing to answer.", param="input")
    shown, choice = tools
    ask = ChatAsk(
        messages=said,
        tools=shown,
        choice=choice,
        parallel=body.parallel_tool_calls,
        hold_calls=body.hold_calls,
        thinking=body.thinking,
        output=body.output,
        variables=body.chat_template_kwargs,
    )
    wanted = prepare_ask(served, body.remembering(ask), names=RESPONSE_FIELD_NAMES)
    return replace(wanted, ignored=(*wanted.ignored, *dict.fromkeys(conversation.left_out)))


def echo_response(
    value: Mapping[str, Any], body: ResponsesBody, head: AnswerHead, sampling: Sampling, *, store: bool
) -> ResponseBody:
    """The response before anything is in it: what was asked, given back."""
    text = value.get("text") or {}
    return ResponseBody(
        id=head.id,
        created_at=head.created,
        status="queued" if body.background else "in_progress",
        background=body.background,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=head.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ResponseReasoningEcho(None if body.reasoning is None else body.reasoning.effort, body.summary),
        safety_identifier=body.safety_identifier,
        store=store,
        temperature=sampling.temperature,
        text=ResponseTextEcho(text.get("format") or {"type": "text"}),
        tool_choice=value.get("tool_choice") or "auto",
        tools=[dict(tool) for tool in value.get("tools") or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )
