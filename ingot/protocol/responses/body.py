"""The body of `POST /v1/responses`, as OpenAI describes it: every field honoured, or refused by name."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ingot.protocol.chat.ask import EFFORTS, JsonSchema, OutputFormat, ThinkingOptions
from ingot.protocol.chat.generation_fields import HOLD_CALLS, GenerationBody
from ingot.protocol.chat.response_format import JsonObjectFormat, TextFormat
from ingot.protocol.chat.thinking_fields import thinking_options
from ingot.protocol.openai.chat import OTHER_TIER
from ingot.protocol.responses.input_items import ITEMS, Item
from ingot.protocol.responses.tools import TOOL_CHOICE, TOOLS, WireChoice, WireTool
from ingot.protocol.schema import bounds, foreign
from ingot.protocol.schema.fields import Anything, Bool, Either, Int, ListOf, MapOf, OneOf, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires, tagged
from ingot.protocol.schema.rules import Given, Is, Never, Not
from ingot.protocol.schema.stopping import Limit
from ingot.protocol.schema.template_variables import TemplateVariables
from ingot.protocol.schema.unheeded import UnheededWord

SEALED: Final = "reasoning.encrypted_content"
LOGPROBS: Final = "message.output_text.logprobs"
# The rest asks for parts of items that no response here has.
INCLUDABLE: Final = (
    SEALED,
    LOGPROBS,
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
class SchemaFormat:
    type: str = requires(OneOf(("json_schema",)), "JSON by a schema.")
    name: str = requires(Text(bounds.NAME_CHARS, least=1), "What the schema is called.")
    schema: dict[str, Any] = requires(Anything(dict), "The JSON schema.")
    description: str | None = accepts(Text(), "What it is for; the model is not told.")
    strict: bool | None = accepts(Bool(), "The answer is always held to the schema.")

    @property
    def output(self) -> OutputFormat:
        return JsonSchema(self.schema)


@dataclass(frozen=True, slots=True)
class TextOptions:
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = accepts(
        tagged("type", TextFormat, JsonObjectFormat, SchemaFormat), "The form that the answer is held to."
    )
    verbosity: None = accepts(
        UnheededWord(("low", "medium", "high"), harmless=("medium",)),
        "A hint for the model, which is not told. Named in the receipt.",
    )


SUMMARY = OneOf(
    ("auto", "detailed"),
    {"concise": "is not supported: nothing here sums up. 'auto' and 'detailed' give the thinking whole."},
)


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    effort: str | None = accepts(
        OneOf(EFFORTS), "How much to think; `none` answers at once. A model that cannot think ignores it."
    )
    summary: str | None = accepts(SUMMARY, "Tell the thinking as a summary, which holds all of it.")
    generate_summary: str | None = accepts(SUMMARY, "The older name of `summary`.")
    context: None = refuses("is not supported: the chat template decides which past thinking is shown.", "auto")
    mode: None = refuses("is not supported.", "standard")

    @property
    def told(self) -> str | None:
        return self.summary or self.generate_summary


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesBody(GenerationBody):
    input: str | tuple[Item, ...] | None = accepts(
        Either((Text(), ITEMS)), "What to answer: a text, or the items of a conversation."
    )
    instructions: str | None = accepts(Text(), "A system message before everything else, for this response alone.")
    previous_response_id: str | None = accepts(
        Text(bounds.IDENTIFIER_CHARS), "A stored response to go on from; its conversation comes before the input."
    )
    store: bool | None = accepts(Bool(), "Keep the response, to go on from it or to retrieve it (default: true).")
    background: bool = accepts(Bool(), "Answer at once, and go on without a client.", default=False)
    include: tuple[str, ...] = accepts(
        ListOf(OneOf(INCLUDABLE), most=len(INCLUDABLE)), "What else items are to hold.", default=()
    )
    max_output_tokens: int | None = accepts(
        Limit(bounds.MAX_TOKENS), "Most tokens to generate; by default, as many as the context holds."
    )
    max_tool_calls: int | None = accepts(Int(bounds.SERVER_CALLS), "Most calls of MCP tools that the server makes.")
    top_logprobs: int | None = accepts(Int(bounds.TOP_LOGPROBS), "Give the likeliest tokens for each of the text.")

    tools: tuple[WireTool, ...] = accepts(TOOLS, "Tools that the model may call.", default=())
    tool_choice: WireChoice | None = accepts(
        TOOL_CHOICE, "Whether a tool is called: never, as the model likes (auto), always, or which one."
    )
    parallel_tool_calls: bool = accepts(Bool(), "Whether an answer may hold several calls.", default=True)
    hold_calls: bool | None = accepts(Bool(), HOLD_CALLS)
    reasoning: ReasoningOptions | None = accepts(ObjectOf(ReasoningOptions), "How to think, and how to tell of it.")
    text: TextOptions | None = accepts(ObjectOf(TextOptions), "The form of the answer.")
    enable_thinking: bool | None = accepts(Bool(), "Switches thinking on or off.")
    thinking_budget: int | None = accepts(
        Limit(bounds.THINKING_BUDGET), "Most tokens of thinking; it is then closed, and the answer goes on."
    )
    chat_template_kwargs: dict[str, Any] | None = accepts(
        TemplateVariables(), "Values for variables that the model's chat template reads."
    )

    truncation: str | None = accepts(
        OneOf(("disabled",), {"auto": "is not supported: nothing is left out of a conversation unasked."}),
        "A conversation that is too long is refused.",
    )
    service_tier: str | None = accepts(
        OneOf(("auto", "default"), dict.fromkeys(("flex", "scale", "priority", "fast", "ultrafast"), OTHER_TIER)),
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
        return LOGPROBS in self.include or bool(self.top_logprobs)

    @property
    def summary(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.told

    @property
    def output(self) -> OutputFormat | None:
        held = None if self.text is None else self.text.format
        return held.output if isinstance(held, JsonObjectFormat | SchemaFormat) else None

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
        Never((Not(Given("input")), Not(Given("previous_response_id"))), "input is required.", param="input"),
        Never(
            (Is("background", True), Is("store", False)),
            "A background response is kept until it is retrieved: store must not be false.",
            param="store",
        ),
    ),
    foreign.RESPONSES,
)
