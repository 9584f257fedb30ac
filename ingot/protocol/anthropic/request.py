"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's bodies and tools, and the tasks that they become."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ingot.errors import Unsupported
from ingot.protocol.anthropic.answers import (
    AppliedEdit,
    AppliedEdits,
    MessageAnswerOptions,
    StreamedMessage,
    WholeMessage,
)
from ingot.protocol.anthropic.messages import (
    ANTHROPIC_CONVERSATION,
    SYSTEM_PROMPT,
    AnthropicMessage,
    CacheControl,
    TextBlock,
    cache_control_field,
    clear_thinking,
    loaded_tool_names,
    messages_to_chat,
)
from ingot.protocol.chat.answers import AnswerHead, GenerationTask, IgnoredNote
from ingot.protocol.chat.ask import (
    ABOUT_STRICT,
    ChatFieldNames,
    ChatInput,
    ForcedToolChoice,
    ThinkingOptions,
    ToolChoice,
    ToolDefinition,
    json_output,
)
from ingot.protocol.chat.generation_fields import (
    ABOUT_HOLD_CALLS,
    ABOUT_STREAM,
    RequestFields,
    SamplingFields,
    StopFields,
)
from ingot.protocol.chat.preparation import PreparedChat, prepare_chat
from ingot.protocol.lora_adapters import ABOUT_ADAPTER, AdapterField
from ingot.protocol.schema import bounds, foreign
from ingot.protocol.schema.fields import (
    Anything,
    BodyReading,
    Bool,
    DelegateKind,
    Either,
    FieldKind,
    HintField,
    Int,
    ListOf,
    OneOf,
    Text,
)
from ingot.protocol.schema.model_fields import ABOUT_TTL, STOP_STRINGS_FIELD, ModelNameField, TimeToLiveField
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires, tagged
from ingot.protocol.served import ServedModel
from ingot.protocol.terms import DEFAULT_NAME, Terms

CUSTOM_TOOL_TYPE = "custom"


@dataclass(frozen=True, slots=True)
class AnthropicTool:
    name: str = requires(Text(bounds.TOOL_NAME_CHARS, least=1), "The tool's name.")
    input_schema: dict[str, Any] = requires(Anything(dict), "The JSON schema of its arguments.")
    type: str | None = accepts(OneOf((CUSTOM_TOOL_TYPE,)), "A tool that the client runs.")
    description: str | None = accepts(Text(bounds.TOOL_DESCRIPTION_CHARS), "What it does.")
    input_examples: tuple[dict[str, Any], ...] = accepts(
        ListOf(Anything(dict), bounds.PARTS), "Example arguments; added to the description.", default=()
    )
    strict: bool = accepts(Bool(), ABOUT_STRICT, default=False)
    defer_loading: bool = accepts(
        Bool(), "Leave the tool out until a `tool_reference` in a tool result names it.", default=False
    )
    eager_input_streaming: bool | None = accepts(Bool(), "Arguments are always streamed as they are generated.")
    allowed_callers: tuple[str, ...] | None = accepts(
        ListOf(OneOf(("direct",)), most=8, least=1), "Only the model itself calls tools."
    )
    cache_control: CacheControl | None = cache_control_field()

    @property
    def tool(self) -> ToolDefinition:
        description = self.description
        if self.input_examples:
            examples = [json.dumps(example, ensure_ascii=False) for example in self.input_examples]
            description = "\n".join([description or "", "Examples of its arguments:", *examples]).lstrip("\n")
        return ToolDefinition(self.name, description, self.input_schema, self.strict)


@dataclass(frozen=True, slots=True)
class AnthropicToolKind(DelegateKind):
    """A tool of the client's. Those that Anthropic defines have dated names, of which there are always more."""

    custom: ObjectOf = ObjectOf(AnthropicTool)

    def parse(self, value: object, path: str, reading: BodyReading) -> AnthropicTool:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != CUSTOM_TOOL_TYPE:
            raise Unsupported(
                f"{path}.type: '{kind[:100]}' is a tool that Anthropic defines, for its own servers or models; here "
                "tools are 'custom' ones, with a name and an input_schema.",
                param=f"{path}.type",
            )
        tool: AnthropicTool = self.custom.parse(value, path, reading)
        return tool

    def kind(self, terms: Terms) -> FieldKind:
        return self.custom


ANTHROPIC_TOOLS = ListOf(AnthropicToolKind(), most=bounds.TOOLS)


@dataclass(frozen=True, slots=True)
class AnyToolChoice:
    type: str = requires(OneOf(("auto", "any", "none")), "The model decides, always, or never.")
    disable_parallel_tool_use: bool = accepts(Bool(), "At most one call.", default=False)

    @property
    def choice(self) -> ToolChoice:
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"


@dataclass(frozen=True, slots=True)
class OneToolChoice:
    type: str = requires(OneOf(("tool",)), "This tool is to be called.")
    name: str = requires(Text(bounds.TOOL_NAME_CHARS, least=1), "Which one.")
    disable_parallel_tool_use: bool = accepts(Bool(), "At most one call.", default=False)

    @property
    def choice(self) -> ToolChoice:
        return ForcedToolChoice(self.name)


AnthropicToolChoice = AnyToolChoice | OneToolChoice
ANTHROPIC_TOOL_CHOICE = tagged("type", AnyToolChoice, OneToolChoice)


ANTHROPIC_FIELD_NAMES = ChatFieldNames(output="output_config.format", thinking="thinking")
THINKING_DISPLAY = OneOf(("summarized", "omitted"))
ABOUT_DISPLAY = "`omitted` shows only the signature, which contains the thinking."


@dataclass(frozen=True, slots=True)
class ThinkingEnabled:
    type: str = requires(OneOf(("enabled",)), "Think.")
    budget_tokens: int = requires(Int(bounds.THINKING_BUDGET), "Most tokens of thinking.")
    display: str | None = accepts(THINKING_DISPLAY, ABOUT_DISPLAY)


@dataclass(frozen=True, slots=True)
class ThinkingAdaptive:
    type: str = requires(OneOf(("adaptive",)), "As the model, the settings and the effort decide.")
    display: str | None = accepts(THINKING_DISPLAY, ABOUT_DISPLAY)


@dataclass(frozen=True, slots=True)
class ThinkingDisabled:
    type: str = requires(OneOf(("disabled",)), "Do not think.")


THINKING = tagged(
    *("type", ThinkingEnabled, ThinkingAdaptive, ThinkingDisabled),
    refused={"between_tools": "is not supported: thinking is on, off or adaptive for a whole answer."},
)


@dataclass(frozen=True, slots=True)
class AnthropicJsonFormat:
    type: str = requires(OneOf(("json_schema",)), "JSON by a schema.")
    schema: dict[str, Any] = requires(Anything(dict), "The schema.")


JSON_FORMAT = tagged("type", AnthropicJsonFormat)


@dataclass(frozen=True, slots=True)
class OutputConfig:
    effort: str | None = accepts(OneOf(("low", "medium", "high", "xhigh", "max")), "How much to think.")
    format: AnthropicJsonFormat | None = accepts(JSON_FORMAT, "The format of the answer.")
    task_budget: None = accepts(HintField(kind=Anything(dict)), "Not shown to the model. Named in the receipt.")


@dataclass(frozen=True, slots=True)
class ThinkingTurns:
    type: str = requires(OneOf(("thinking_turns",)), "Keep the thinking of some turns.")
    value: int = requires(Int((1, bounds.MESSAGES)), "Of how many, the newest first.")


@dataclass(frozen=True, slots=True)
class AllThinkingTurns:
    type: str = requires(OneOf(("all",)), "Keep all thinking.")


@dataclass(frozen=True, slots=True)
class ClearThinking:
    type: str = requires(OneOf(("clear_thinking_20251015",)), "Remove old thinking.")
    keep: str | ThinkingTurns | AllThinkingTurns | None = accepts(
        Either((OneOf(("all",)), tagged("type", ThinkingTurns, AllThinkingTurns))), "How much of it stays."
    )


NO_SUMMARY = "is not supported: this server does not summarise conversations."


@dataclass(frozen=True, slots=True)
class ClearToolUses:
    """Never applied, and named in the receipt: a conversation that is too long is refused."""

    type: str = requires(OneOf(("clear_tool_uses_20250919",)), "Remove old tool results; has no effect.")
    trigger: dict[str, Any] | None = accepts(Anything(dict), "When.")
    keep: dict[str, Any] | None = accepts(Anything(dict), "How many stay.")
    clear_at_least: dict[str, Any] | None = accepts(Anything(dict), "How much must be removed.")
    exclude_tools: tuple[str, ...] | None = accepts(ListOf(Text(bounds.NAME_CHARS), bounds.TOOLS), "What stays.")
    clear_tool_inputs: bool | tuple[str, ...] | None = accepts(
        Either((Bool(), ListOf(Text(bounds.NAME_CHARS), bounds.TOOLS))), "Whether arguments are removed too."
    )


@dataclass(frozen=True, slots=True)
class ContextManagement:
    edits: tuple[ClearThinking | ClearToolUses, ...] = accepts(
        ListOf(tagged("type", ClearThinking, ClearToolUses, refused={"compact_20260112": NO_SUMMARY}), most=16),
        "What to remove from the conversation.",
        default=(),
    )


@dataclass(frozen=True, slots=True)
class MessagesMetadata:
    user_id: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "The end user; not stored.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesPromptBody:
    """The fields that the prompt depends on."""

    model: str = accepts(ModelNameField(), "A name of the served model.", default=DEFAULT_NAME)
    messages: tuple[AnthropicMessage, ...] = requires(ANTHROPIC_CONVERSATION, "The conversation so far.")
    system: str | tuple[TextBlock, ...] | None = accepts(SYSTEM_PROMPT, "Instructions.")
    tools: tuple[AnthropicTool, ...] = accepts(ANTHROPIC_TOOLS, "Tools that the model may call.", default=())
    tool_choice: AnthropicToolChoice | None = accepts(ANTHROPIC_TOOL_CHOICE, "Whether, and which, tools are called.")
    hold_calls: bool | None = accepts(Bool(), ABOUT_HOLD_CALLS)
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = accepts(THINKING, "Whether to think.")
    output_config: OutputConfig | None = accepts(ObjectOf(OutputConfig), "Effort, and the format of the answer.")
    output_format: AnthropicJsonFormat | None = accepts(JSON_FORMAT, "The older name of output_config.format.")
    context_management: ContextManagement | None = accepts(ObjectOf(ContextManagement), "What to remove.")
    cache_control: CacheControl | None = cache_control_field()
    speed: str | None = accepts(
        OneOf(("standard",), {"fast": "is not offered: every request is served alike."}), "There is one speed."
    )
    billing_policy: None = accepts(HintField(kind=Anything(dict)), "Nothing is billed. Named in the receipt.")
    mcp_servers: None = refuses("is not supported here: this server connects to none for a request.", [])

    @property
    def effort(self) -> str | None:
        return None if self.output_config is None else self.output_config.effort

    @property
    def format(self) -> AnthropicJsonFormat | None:
        return (self.output_config.format if self.output_config is not None else None) or self.output_format

    @property
    def thinks(self) -> ThinkingOptions:
        match self.thinking:
            case ThinkingEnabled():
                return ThinkingOptions(True, self.thinking.budget_tokens, self.effort)
            case ThinkingDisabled():
                return ThinkingOptions(False)
        return ThinkingOptions(effort=self.effort)

    @property
    def hides_thinking(self) -> bool:
        return isinstance(self.thinking, ThinkingEnabled | ThinkingAdaptive) and self.thinking.display == "omitted"

    @property
    def marked(self) -> bool:
        """Whether anything in it asks for caching."""
        blocks = [block for message in self.messages for block in message.blocks]
        system = () if self.system is None or isinstance(self.system, str) else self.system
        return any(each.cache_control is not None for each in (self, *self.tools, *system, *blocks))

    def ask(self, served: ServedModel, reading: BodyReading) -> tuple[ChatInput, AppliedEdits | None]:
        messages = messages_to_chat(self.system, self.messages, served.seal, reading)
        edits = None if self.context_management is None else AppliedEdits(self._edit(messages, served, reading))
        choice, loaded = self.tool_choice, loaded_tool_names(self.messages)
        ask = ChatInput(
            messages=messages,
            tools=tuple(tool.tool for tool in self.tools if not tool.defer_loading or tool.name in loaded),
            choice="auto" if choice is None else choice.choice,
            parallel=choice is None or not choice.disable_parallel_tool_use,
            hold_calls=self.hold_calls,
            thinking=self.thinks,
            output=None if self.format is None else json_output(self.format.schema),
            ending="continued" if self.messages[-1].role == "assistant" else "opened",
        )
        return ask, edits

    def _edit(self, messages: list[dict[str, Any]], served: ServedModel, reading: BodyReading) -> list[AppliedEdit]:
        assert self.context_management is not None
        applied = []
        for edit in self.context_management.edits:
            if isinstance(edit, ClearToolUses):
                reading.ignore(f"context_management.edits.{edit.type}")
                continue
            if isinstance(edit.keep, str | AllThinkingTurns):
                continue
            cleared = clear_thinking(messages, 1 if edit.keep is None else edit.keep.value)
            tokens = sum(len(served.tokenizer.encode(text, add_special=False)) for text in cleared)
            if cleared:
                applied.append(AppliedEdit(len(cleared), tokens))
        return applied


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesBody(MessagesPromptBody, SamplingFields, StopFields, RequestFields):
    max_tokens: int = requires(
        Int(bounds.LEGACY_MAX_TOKENS), "Most tokens to generate; 0 only computes the prompt, for later requests."
    )
    stream: bool = accepts(Bool(), ABOUT_STREAM, default=False)
    stop_sequences: tuple[str, ...] = accepts(STOP_STRINGS_FIELD, "Text that ends the answer.", default=())
    metadata: MessagesMetadata | None = accepts(ObjectOf(MessagesMetadata), "About the request.")
    service_tier: str | None = accepts(OneOf(("auto", "standard_only")), "Every request is served alike.")
    adapter: str | None = accepts(AdapterField(), ABOUT_ADAPTER)
    ttl: None = accepts(TimeToLiveField(), ABOUT_TTL)

    container: None = refuses("is not supported: this server runs no tools of its own.")
    compaction: None = refuses(NO_SUMMARY)
    diagnostics: None = accepts(
        HintField(kind=Anything(dict)), "Every answer reports on the cache under `ingot`. Named in the receipt."
    )
    fallbacks: None = refuses("is not supported: one model is served.", [])
    fallback_credit_token: None = refuses("is not supported: nothing is billed.")
    inference_geo: None = refuses("is not offered: the answer is computed where this server runs.")
    thread: None = refuses("is not supported: conversations are not stored. Send all messages.")


COUNT_TOKENS_BODY = ObjectOf(MessagesPromptBody)
MESSAGES_BODY = ObjectOf(MessagesBody, foreign=foreign.MESSAGES)


class CountTokensEdits(Struct):
    original_input_tokens: int


class MessageTokenCount(Struct):
    input_tokens: int
    context_management: CountTokensEdits | UnsetType = UNSET
    ingot: IgnoredNote | UnsetType = UNSET


def read_messages(value: Any, served: ServedModel, request_id: str) -> GenerationTask:
    """The task of a decoded body. Renders and tokenizes: not for an event loop."""
    reading = served.reading()
    body: MessagesBody = MESSAGES_BODY.parse(value, "", reading)
    prepared, edits = prepare_messages(body, served, reading)
    request = body.request(
        request_id,
        served,
        [prepared],
        model=body.model,
        adapter=body.adapter,
        max_tokens=body.max_tokens,
        sampling=body.sampling(served),
        stop=body.stopping(served, body.stop_sequences),
    )
    head = AnswerHead.of(request_id, int(time.time()), served, reading, prepared.sources, request)
    # Agents drop the thinking of an answer whose model is not the one that they requested.
    head = replace(head, model=body.model)
    options = MessageAnswerOptions(
        head,
        served.seal,
        len(prepared.prompt),
        body.max_tokens,
        marked=body.marked and body.cache != "off" and served.prefix_cache_on,
        hides_thinking=body.hides_thinking,
        may_think=prepared.may_think,
        edits=edits,
    )
    view = StreamedMessage(options) if body.stream else WholeMessage(options)
    return GenerationTask(request, view, "messages", head, prepared.turn)


def count_message_tokens(value: Any, served: ServedModel) -> MessageTokenCount:
    """The number of tokens of the prompt, by rendering it."""
    reading = served.reading()
    body: MessagesPromptBody = COUNT_TOKENS_BODY.parse(value, "", reading)
    prepared, edits = prepare_messages(body, served, reading)
    count = len(prepared.prompt)
    cleared = 0 if edits is None else sum(edit.cleared_input_tokens for edit in edits.applied_edits)
    original = UNSET if edits is None else CountTokensEdits(count + cleared)
    return MessageTokenCount(count, original, IgnoredNote.of(reading))


def prepare_messages(
    body: MessagesPromptBody, served: ServedModel, reading: BodyReading
) -> tuple[PreparedChat, AppliedEdits | None]:
    if body.output_format is not None and body.output_config is not None and body.output_config.format is not None:
        raise Unsupported("output_format is the older name of output_config.format: send one.", param="output_format")
    ask, edits = body.ask(served, reading)
    if isinstance(body, MessagesBody):
        ask = body.remembering(ask)
    prepared = prepare_chat(served, ask, names=ANTHROPIC_FIELD_NAMES)
    reading.ignored.extend(name for name in prepared.ignored if name not in reading.ignored)
    return prepared, edits
