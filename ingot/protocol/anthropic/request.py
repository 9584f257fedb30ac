"""`POST /v1/messages` and `/v1/messages/count_tokens`: the bodies as Anthropic describes them, and what they become."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ingot.errors import Unsupported
from ingot.protocol.adapters import WHICH_ADAPTER, AdapterName
from ingot.protocol.anthropic.answers import AnswerOptions, AppliedEdit, Edits, MessageStreamed, MessageWhole
from ingot.protocol.anthropic.history import as_chat, forget_thinking, loaded_tools, note
from ingot.protocol.anthropic.messages import CONVERSATION, SYSTEM, CacheControl, Message, TextBlock, marks
from ingot.protocol.anthropic.tools import TOOL_CHOICE, TOOLS, Chosen, CustomTool, offered
from ingot.protocol.chat.answers import AnswerHead, GenerationTask, Note
from ingot.protocol.chat.ask import Ask, FieldNames, JsonSchema, ThinkingOptions
from ingot.protocol.chat.generation_fields import HOLD_CALLS, RequestFields, SamplingFields, StopFields
from ingot.protocol.chat.preparation import Prepared, prepare_ask
from ingot.protocol.model_names import DEFAULT_NAME
from ingot.protocol.schema import bounds, foreign
from ingot.protocol.schema.fields import Anything, BodyReading, Bool, Either, Int, ListOf, OneOf, Text
from ingot.protocol.schema.keeping import HOW_LONG, TimeToLive
from ingot.protocol.schema.model_name import ModelName
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires, tagged
from ingot.protocol.schema.stopping import STOP_STRINGS
from ingot.protocol.schema.unheeded import Unheeded
from ingot.protocol.served import Served

NAMES = FieldNames(output="output_config.format", thinking="thinking")
DISPLAY = OneOf(("summarized", "omitted"))


@dataclass(frozen=True, slots=True)
class ThinkingOn:
    type: str = requires(OneOf(("enabled",)), "Think.")
    budget_tokens: int = requires(Int(bounds.THINKING_BUDGET), "Most tokens of thinking.")
    display: str | None = accepts(DISPLAY, "`omitted` shows only the signature, which carries the thinking.")


@dataclass(frozen=True, slots=True)
class ThinkingAdaptive:
    type: str = requires(OneOf(("adaptive",)), "As the model, the settings and the effort have it.")
    display: str | None = accepts(DISPLAY, "`omitted` shows only the signature, which carries the thinking.")


@dataclass(frozen=True, slots=True)
class ThinkingOff:
    type: str = requires(OneOf(("disabled",)), "Do not think.")


THINKING = tagged(
    *("type", ThinkingOn, ThinkingAdaptive, ThinkingOff),
    refused={"between_tools": "is not supported: thinking is on, off or adaptive for a whole answer."},
)


@dataclass(frozen=True, slots=True)
class JsonFormat:
    type: str = requires(OneOf(("json_schema",)), "JSON by a schema.")
    schema: dict[str, Any] = requires(Anything(dict), "The schema.")


JSON_FORMAT = tagged("type", JsonFormat)


@dataclass(frozen=True, slots=True)
class OutputConfig:
    effort: str | None = accepts(OneOf(("low", "medium", "high", "xhigh", "max")), "How much to think.")
    format: JsonFormat | None = accepts(JSON_FORMAT, "The form that the answer is held to.")
    task_budget: None = accepts(Unheeded(), "A hint for the model, which is not told. Named in the receipt.")


@dataclass(frozen=True, slots=True)
class ThinkingTurns:
    type: str = requires(OneOf(("thinking_turns",)), "Keep the thinking of some turns.")
    value: int = requires(Int((1, bounds.MESSAGES)), "Of how many, the newest first.")


@dataclass(frozen=True, slots=True)
class AllTurns:
    type: str = requires(OneOf(("all",)), "Keep all thinking.")


@dataclass(frozen=True, slots=True)
class ClearThinking:
    type: str = requires(OneOf(("clear_thinking_20251015",)), "Forget old thinking.")
    keep: str | ThinkingTurns | AllTurns | None = accepts(
        Either((OneOf(("all",)), tagged("type", ThinkingTurns, AllTurns))), "How much of it stays."
    )


NO_SUMMARY = "is not supported: this server does not summarise conversations."


@dataclass(frozen=True, slots=True)
class ClearToolUses:
    """Not done, as `applied_edits` tells, and named in the receipt: a conversation that grows too long is refused."""

    type: str = requires(OneOf(("clear_tool_uses_20250919",)), "Forget old results of tools; has no effect.")
    trigger: dict[str, Any] | None = accepts(Anything(dict), "When.")
    keep: dict[str, Any] | None = accepts(Anything(dict), "How many stay.")
    clear_at_least: dict[str, Any] | None = accepts(Anything(dict), "How much must go.")
    exclude_tools: tuple[str, ...] | None = accepts(ListOf(Text(bounds.NAME_CHARS), bounds.TOOLS), "What stays.")
    clear_tool_inputs: bool | tuple[str, ...] | None = accepts(
        Either((Bool(), ListOf(Text(bounds.NAME_CHARS), bounds.TOOLS))), "Whether arguments go too."
    )


@dataclass(frozen=True, slots=True)
class ContextManagement:
    edits: tuple[ClearThinking | ClearToolUses, ...] = accepts(
        ListOf(tagged("type", ClearThinking, ClearToolUses, refused={"compact_20260112": NO_SUMMARY}), most=16),
        "What to take out of the conversation.",
        default=(),
    )


@dataclass(frozen=True, slots=True)
class Metadata:
    user_id: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "Who asks; kept by nobody.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBody:
    """What the prompt depends on."""

    model: str = accepts(ModelName(), "A name of the served model.", default=DEFAULT_NAME)
    messages: tuple[Message, ...] = requires(CONVERSATION, "The conversation so far.")
    system: str | tuple[TextBlock, ...] | None = accepts(SYSTEM, "Instructions.")
    tools: tuple[CustomTool, ...] = accepts(TOOLS, "Tools that the model may call.", default=())
    tool_choice: Chosen | None = accepts(TOOL_CHOICE, "Whether, and which, tools are called.")
    hold_calls: bool | None = accepts(Bool(), HOLD_CALLS)
    thinking: ThinkingOn | ThinkingAdaptive | ThinkingOff | None = accepts(THINKING, "Whether to think.")
    output_config: OutputConfig | None = accepts(ObjectOf(OutputConfig), "Effort, and the form of the answer.")
    output_format: JsonFormat | None = accepts(JSON_FORMAT, "The older name of output_config.format.")
    context_management: ContextManagement | None = accepts(ObjectOf(ContextManagement), "What to forget.")
    cache_control: CacheControl | None = marks()
    speed: str | None = accepts(
        OneOf(("standard",), {"fast": "is not offered: every request is served alike."}), "There is one speed."
    )
    mcp_servers: None = refuses("is not supported here: this server connects to none for a request.", [])

    @property
    def effort(self) -> str | None:
        return None if self.output_config is None else self.output_config.effort

    @property
    def format(self) -> JsonFormat | None:
        return (self.output_config.format if self.output_config is not None else None) or self.output_format

    @property
    def thinks(self) -> ThinkingOptions:
        match self.thinking:
            case ThinkingOn():
                return ThinkingOptions(True, self.thinking.budget_tokens, self.effort)
            case ThinkingOff():
                return ThinkingOptions(False)
        return ThinkingOptions(effort=self.effort)

    @property
    def hides_thinking(self) -> bool:
        return isinstance(self.thinking, ThinkingOn | ThinkingAdaptive) and self.thinking.display == "omitted"

    @property
    def marked(self) -> bool:
        """Whether anything in it asks for caching."""
        blocks = [block for message in self.messages for block in message.blocks]
        system = () if self.system is None or isinstance(self.system, str) else self.system
        return any(each.cache_control is not None for each in (self, *self.tools, *system, *blocks))

    def ask(self, served: Served, reading: BodyReading) -> tuple[Ask, Edits | None]:
        messages = as_chat(self.system, self.messages, served.seal, reading)
        edits = None if self.context_management is None else Edits(self._edited(messages, served, reading))
        chosen = self.tool_choice
        ask = Ask(
            messages=messages,
            tools=offered(self.tools, loaded_tools(self.messages)),
            choice="auto" if chosen is None else chosen.choice,
            parallel=chosen is None or not chosen.disable_parallel_tool_use,
            hold_calls=self.hold_calls,
            thinking=self.thinks,
            output=None if self.format is None else JsonSchema(self.format.schema),
            ending="continued" if self.messages[-1].role == "assistant" else "opened",
        )
        return ask, edits

    def _edited(self, messages: list[dict[str, Any]], served: Served, reading: BodyReading) -> list[AppliedEdit]:
        assert self.context_management is not None
        applied = []
        for edit in self.context_management.edits:
            if isinstance(edit, ClearToolUses):
                note(reading, f"context_management.edits.{edit.type}")
                continue
            if isinstance(edit.keep, str | AllTurns):
                continue
            forgotten = forget_thinking(messages, 1 if edit.keep is None else edit.keep.value)
            tokens = sum(len(served.tokenizer.encode(text, add_special=False)) for text in forgotten)
            if forgotten:
                applied.append(AppliedEdit(len(forgotten), tokens))
        return applied


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesBody(PromptBody, SamplingFields, StopFields, RequestFields):
    max_tokens: int = requires(
        Int(bounds.LEGACY_MAX_TOKENS), "Most tokens to generate; 0 only computes the prompt, for later requests."
    )
    stream: bool = accepts(Bool(), "Send the answer as server-sent events while it is made.", default=False)
    stop_sequences: tuple[str, ...] = accepts(STOP_STRINGS, "Text that ends the answer.", default=())
    metadata: Metadata | None = accepts(ObjectOf(Metadata), "About the request.")
    service_tier: str | None = accepts(OneOf(("auto", "standard_only")), "Every request is served alike.")
    adapter: str | None = accepts(AdapterName(), WHICH_ADAPTER)
    ttl: None = accepts(TimeToLive(), HOW_LONG)

    container: None = refuses("is not supported: this server runs no tools of its own.")
    compaction: None = refuses(NO_SUMMARY)
    diagnostics: None = accepts(Unheeded(), "Every answer tells of the cache under `ingot`. Named in the receipt.")
    fallbacks: None = refuses("is not supported: one model is served.", [])
    fallback_credit_token: None = refuses("is not supported: nothing is billed.")
    inference_geo: None = refuses("is not offered: the answer is computed where this server runs.")
    thread: None = refuses("is not supported: conversations are not kept. Send all messages.")


COUNT_BODY = ObjectOf(PromptBody)
MESSAGES_BODY = ObjectOf(MessagesBody, foreign=foreign.MESSAGES)


class CountedEdits(Struct):
    original_input_tokens: int


class TokenCount(Struct):
    input_tokens: int
    context_management: CountedEdits | UnsetType = UNSET
    ingot: Note | UnsetType = UNSET


def read_messages(value: Any, served: Served, request_id: str) -> GenerationTask:
    """The job that a decoded body asks for. Renders and tokenizes, so it may take a while: not for an event loop."""
    reading = served.reading()
    body: MessagesBody = MESSAGES_BODY.parse(value, "", reading)
    wanted, edits = prepare(body, served, reading)
    request = body.request(
        request_id,
        served,
        [wanted],
        model=body.model,
        adapter=body.adapter,
        max_tokens=body.max_tokens,
        sampling=body.sampling(served),
        stop=body.stopping(body.stop_sequences),
    )
    head = AnswerHead.of(request_id, int(time.time()), served, reading, wanted.sources, request)
    # Agents drop the thinking of an answer that does not carry the name they asked for.
    head = replace(head, model=body.model)
    telling = AnswerOptions(
        head,
        served.seal,
        len(wanted.prompt),
        body.max_tokens,
        marked=body.marked and body.cache != "off" and served.keeps_prefixes,
        hides_thinking=body.hides_thinking,
        may_think=wanted.may_think,
        edits=edits,
    )
    view = MessageStreamed(telling) if body.stream else MessageWhole(telling)
    return GenerationTask(request, view, "messages", head, wanted.turn)


def count_tokens(value: Any, served: Served) -> TokenCount:
    """What the prompt of the same body would take, by making it."""
    reading = served.reading()
    body: PromptBody = COUNT_BODY.parse(value, "", reading)
    wanted, edits = prepare(body, served, reading)
    count = len(wanted.prompt)
    cleared = 0 if edits is None else sum(edit.cleared_input_tokens for edit in edits.applied_edits)
    told = UNSET if edits is None else CountedEdits(count + cleared)
    return TokenCount(count, told, Note.of(reading))


def prepare(body: PromptBody, served: Served, reading: BodyReading) -> tuple[Prepared, Edits | None]:
    if body.output_format is not None and body.output_config is not None and body.output_config.format is not None:
        raise Unsupported("output_format is the older name of output_config.format: send one.", param="output_format")
    ask, edits = body.ask(served, reading)
    if isinstance(body, MessagesBody):
        ask = body.remembering(ask)
    wanted = prepare_ask(served, ask, names=NAMES)
    reading.ignored.extend(name for name in wanted.ignored if name not in reading.ignored)
    return wanted, edits
