"""`POST /v1/chat/completions`: OpenAI's body, and the task that it becomes."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, get_args

from ingot.errors import BadRequest
from ingot.protocol.chat.answers import AnswerHead, GenerationTask
from ingot.protocol.chat.ask import (
    ABOUT_STRICT,
    REASONING_EFFORTS,
    REASONING_FIELD,
    RESPONSE_FORMATS_REFUSED,
    THINKING_FIELD,
    ChatInput,
    CustomInputGrammar,
    CustomTextInput,
    ForcedToolChoice,
    JsonObjectResponseFormat,
    JsonSchemaResponseFormat,
    OutputGrammar,
    ReasoningBody,
    StructuralTagResponseFormat,
    StructuredOutputs,
    TextResponseFormat,
    ThinkingFieldBody,
    ThinkingOptions,
    ToolChoice,
    ToolDefinition,
    custom_tool_as_function,
    thinking_options,
    unknown_tool_error,
)
from ingot.protocol.chat.generation_fields import (
    ABOUT_HOLD_CALLS,
    ABOUT_LOGPROBS,
    ABOUT_TOP_LOGPROBS,
    NEEDS_LOGPROBS,
    GenerationBody,
)
from ingot.protocol.chat.media import MediaOnlyKind
from ingot.protocol.chat.preparation import prepare_chat
from ingot.protocol.chat.prompts import PromptEnding
from ingot.protocol.openai.chat_answers import ChatAnswerOptions, StreamedChat, WholeChat
from ingot.protocol.openai.messages import (
    CHAT_CONVERSATION,
    FRAME_COUNT,
    VIDEO_FRAME_RATE,
    ChatMessage,
    MediaReadingOptions,
    ProcessorOptions,
    messages_as_dicts,
    read_media_options,
)
from ingot.protocol.schema import bounds, foreign
from ingot.protocol.schema.fields import Anything, Bool, Either, Int, ListOf, MapOf, OneOf, Text
from ingot.protocol.schema.model_fields import TemplateVariablesField, TokenLimitField
from ingot.protocol.schema.objects import Is, Never, ObjectOf, accepts, refuses, requires, tagged
from ingot.protocol.served import ServedModel
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.tool_formats.registry import FORMAT_NAMES, THINKING_NAMES

SERVICE_TIER_REFUSED = "is not offered: every request is served alike."
FUNCTION_NAME = Text(bounds.TOOL_NAME_CHARS, least=1)


@dataclass(frozen=True, slots=True)
class ChatFunctionDefinition:
    name: str = requires(FUNCTION_NAME, "The function's name.")
    description: str | None = accepts(Text(bounds.TOOL_DESCRIPTION_CHARS), "What it does.")
    parameters: dict[str, Any] | None = accepts(Anything(dict), "The JSON schema of its arguments.")
    strict: bool | None = accepts(Bool(), ABOUT_STRICT)


@dataclass(frozen=True, slots=True)
class ChatFunctionTool:
    type: str = requires(OneOf(("function",)), "Functions are the only tools.")
    function: ChatFunctionDefinition = requires(ObjectOf(ChatFunctionDefinition), "The function.")

    @property
    def tool(self) -> ToolDefinition:
        function = self.function
        return ToolDefinition(function.name, function.description, function.parameters or {}, bool(function.strict))


@dataclass(frozen=True, slots=True)
class ChatGrammarInput:
    type: str = requires(OneOf(("grammar",)), "Text that follows a grammar.")
    grammar: CustomInputGrammar = requires(ObjectOf(CustomInputGrammar), "The grammar.")


@dataclass(frozen=True, slots=True)
class ChatCustomDefinition:
    name: str = requires(FUNCTION_NAME, "The tool's name.")
    description: str | None = accepts(Text(bounds.TOOL_DESCRIPTION_CHARS), "What it does.")
    format: CustomTextInput | ChatGrammarInput | None = accepts(
        tagged("type", CustomTextInput, ChatGrammarInput), "The format of the text."
    )


@dataclass(frozen=True, slots=True)
class ChatCustomTool:
    type: str = requires(OneOf(("custom",)), "A tool that takes text.")
    custom: ChatCustomDefinition = requires(ObjectOf(ChatCustomDefinition), "The tool.")

    @property
    def grammar(self) -> CustomInputGrammar | None:
        return self.custom.format.grammar if isinstance(self.custom.format, ChatGrammarInput) else None

    @property
    def tool(self) -> ToolDefinition:
        return custom_tool_as_function(self.custom.name, self.custom.description, self.grammar)


@dataclass(frozen=True, slots=True)
class ChosenToolName:
    name: str = requires(FUNCTION_NAME, "The tool to call.")


@dataclass(frozen=True, slots=True)
class ChosenFunction:
    type: str = requires(OneOf(("function",)), "A function is to be called.")
    function: ChosenToolName = requires(ObjectOf(ChosenToolName), "Which one.")


@dataclass(frozen=True, slots=True)
class ChosenCustom:
    type: str = requires(OneOf(("custom",)), "A custom tool is to be called.")
    custom: ChosenToolName = requires(ObjectOf(ChosenToolName), "Which one.")


@dataclass(frozen=True, slots=True)
class AllowedFunctionList:
    mode: str = requires(OneOf(("auto", "required")), "Whether the model decides to call one of them, or always does.")
    tools: tuple[ChosenFunction | ChosenCustom, ...] = requires(
        ListOf(tagged("type", ChosenFunction, ChosenCustom), bounds.TOOLS, least=1), "The tools that may be called."
    )


@dataclass(frozen=True, slots=True)
class ChatAllowedTools:
    type: str = requires(OneOf(("allowed_tools",)), "Some of the tools.")
    allowed_tools: AllowedFunctionList = requires(ObjectOf(AllowedFunctionList), "Which of them.")


CHAT_TOOLS = ListOf(tagged("type", ChatFunctionTool, ChatCustomTool), most=bounds.TOOLS)
CHAT_TOOL_CHOICE = Either(
    (OneOf(("none", "auto", "required")), tagged("type", ChosenFunction, ChosenCustom, ChatAllowedTools))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatBody(GenerationBody):
    messages: tuple[ChatMessage, ...] = requires(CHAT_CONVERSATION, "The conversation so far.")
    max_completion_tokens: int | None = accepts(
        TokenLimitField(bounds.MAX_TOKENS), "Most tokens to generate; by default, as many as the context holds."
    )
    max_tokens: int | None = accepts(TokenLimitField(bounds.MAX_TOKENS), "The older name of max_completion_tokens.")
    logprobs: bool = accepts(Bool(), ABOUT_LOGPROBS, default=False)
    top_logprobs: int | None = accepts(Int(bounds.TOP_LOGPROBS), ABOUT_TOP_LOGPROBS)
    add_generation_prompt: bool | None = accepts(
        Bool(), "End the prompt where an answer begins; the default unless the last message is continued."
    )
    continue_final_message: bool = accepts(
        Bool(), "Continue the last message, an assistant's, instead of beginning a new one.", default=False
    )
    chat_template_kwargs: dict[str, Any] | None = accepts(
        TemplateVariablesField(), "Values for variables that the model's chat template reads."
    )

    tools: tuple[ChatFunctionTool | ChatCustomTool, ...] = accepts(
        CHAT_TOOLS, "Tools that the model may call.", default=()
    )
    tool_choice: str | ChosenFunction | ChosenCustom | ChatAllowedTools | None = accepts(
        CHAT_TOOL_CHOICE, "Whether a function is called: never, as the model decides (auto), always, or which one."
    )
    parallel_tool_calls: bool = accepts(Bool(), "Whether an answer may hold several calls.", default=True)
    hold_calls: bool | None = accepts(Bool(), ABOUT_HOLD_CALLS)
    tool_format: str | None = accepts(
        OneOf(FORMAT_NAMES), "How the model writes calls, where its template does not show it."
    )

    reasoning_effort: str | None = accepts(
        OneOf(REASONING_EFFORTS), "How much to think; `none` answers at once. A model that cannot think ignores it."
    )
    enable_thinking: bool | None = accepts(Bool(), "Switches thinking on or off.")
    reasoning: ReasoningBody | None = accepts(REASONING_FIELD, "The same, in OpenRouter's format.")
    thinking: ThinkingFieldBody | None = accepts(THINKING_FIELD, "The same, in DeepSeek's and Z.ai's format.")
    include_reasoning: bool | None = accepts(Bool(), "`false` leaves the thinking out of the answer.")
    thinking_budget: int | None = accepts(
        TokenLimitField(bounds.THINKING_BUDGET), "Most tokens of thinking; it is then closed, and the answer continues."
    )
    template_history: TemplateHistory | None = accepts(
        OneOf(get_args(TemplateHistory)),
        "`stable` renders past turns as they were computed; `official` exactly as the model's template does.",
    )
    thinking_format: str | None = accepts(
        OneOf(THINKING_NAMES), "How the model marks its thinking, where its template does not show it."
    )

    video_fps: float | None = accepts(MediaOnlyKind(VIDEO_FRAME_RATE), "Frames per second of a video.")
    video_max_frames: int | None = accepts(MediaOnlyKind(FRAME_COUNT), "Most frames of a video.")
    mm_processor_kwargs: ProcessorOptions | None = accepts(
        MediaOnlyKind(ObjectOf(ProcessorOptions)), "How images and videos are processed, in vLLM's format."
    )
    media_io_kwargs: MediaReadingOptions | None = accepts(
        MediaOnlyKind(ObjectOf(MediaReadingOptions)), "How videos are read, in vLLM's format."
    )

    response_format: (
        TextResponseFormat | JsonObjectResponseFormat | JsonSchemaResponseFormat | StructuralTagResponseFormat | None
    ) = accepts(
        tagged(
            "type",
            TextResponseFormat,
            JsonObjectResponseFormat,
            JsonSchemaResponseFormat,
            StructuralTagResponseFormat,
            refused=RESPONSE_FORMATS_REFUSED,
        ),
        "The format of the answer.",
    )
    structured_outputs: StructuredOutputs | None = accepts(
        ObjectOf(StructuredOutputs), "Another way to set the format of the answer: exactly one of its fields."
    )
    modalities: tuple[str, ...] | None = accepts(
        ListOf(OneOf(("text",), {"audio": "is not supported: the answer is text."}), most=2, least=1),
        "The types of the answer.",
    )
    service_tier: str | None = accepts(
        OneOf(("auto", "default"), dict.fromkeys(("flex", "scale", "priority", "fast"), SERVICE_TIER_REFUSED)),
        "Every request is served alike.",
    )
    metadata: dict[str, str] | None = accepts(
        MapOf(Text(bounds.METADATA_VALUE_CHARS), bounds.METADATA_ENTRIES, bounds.METADATA_KEY_CHARS),
        "Returned with the answer.",
    )
    safety_identifier: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "The end user; not stored.")
    prompt_cache_key: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "A hint; prompts are matched by content.")
    prompt_cache_retention: str | None = accepts(
        OneOf(("in_memory", "24h")), "The longest time a prompt may be cached; none outlives the server."
    )

    functions: None = refuses("is not supported; send `tools`, which replaced it.", [])
    function_call: None = refuses("is not supported; send `tool_choice`, which replaced it.", "none", "auto")
    store: None = refuses("is not supported: answers are not stored. Send false.", False)
    audio: None = refuses("is not supported: the answer is text.")
    prediction: None = refuses("is not supported: predicted output is not used.")
    verbosity: None = refuses("is not supported: no served model takes it. Ask for it in the prompt.")
    web_search_options: None = refuses("is not supported: this server never searches the web.")
    moderation: None = refuses("is not supported: nothing is moderated.")
    prompt_cache_options: None = refuses("is not supported: the server decides what it caches.")
    chat_template: None = refuses("is not supported: a request cannot have its own template.")

    @property
    def limit(self) -> int | None:
        """The lower of both names' values."""
        return min((n for n in (self.max_completion_tokens, self.max_tokens) if n is not None), default=None)

    @property
    def ending(self) -> PromptEnding:
        if self.continue_final_message:
            return "continued"
        return "closed" if self.add_generation_prompt is False else "opened"

    @property
    def choice(self) -> ToolChoice:
        match self.tool_choice:
            case ChosenFunction() | ChosenCustom():
                return ForcedToolChoice(_tool_name(self.tool_choice))
            case ChatAllowedTools():
                return "required" if self.tool_choice.allowed_tools.mode == "required" else "auto"
            case "none" | "auto" | "required":
                return self.tool_choice
        return "auto"

    @property
    def custom(self) -> frozenset[str]:
        """The names of the custom tools."""
        return frozenset(tool.custom.name for tool in self.tools if isinstance(tool, ChatCustomTool))

    @property
    def described_only(self) -> list[str]:
        """Custom tools whose grammar is described to the model but not enforced."""
        custom = [tool for tool in self.tools if isinstance(tool, ChatCustomTool)]
        return [tool.custom.name for tool in custom if tool.grammar is not None and tool.grammar.syntax == "lark"]

    @property
    def offered(self) -> tuple[ToolDefinition, ...]:
        """The tools that the model may call."""
        tools = tuple(tool.tool for tool in self.tools)
        if not isinstance(self.tool_choice, ChatAllowedTools):
            return tools
        allowed = [_tool_name(chosen) for chosen in self.tool_choice.allowed_tools.tools]
        known = [tool.name for tool in tools]
        for name in allowed:
            if name not in known:
                raise unknown_tool_error("tool_choice", name, known)
        return tuple(tool for tool in tools if tool.name in allowed)

    @property
    def output(self) -> OutputGrammar | None:
        outputs = [] if self.structured_outputs is None else self.structured_outputs.outputs
        if self.response_format is not None and not isinstance(self.response_format, TextResponseFormat):
            outputs.append(self.response_format.output)
        if len(outputs) > 1 or (self.structured_outputs is not None and not outputs):
            raise BadRequest(
                "Set the format of the answer exactly once, in response_format or in one field of structured_outputs.",
                param="structured_outputs",
            )
        return outputs[0] if outputs else None

    @property
    def thinks(self) -> ThinkingOptions:
        reasoning, thinking = self.reasoning or ReasoningBody(), self.thinking or ThinkingFieldBody("auto")
        return thinking_options(
            enabled={
                "enable_thinking": self.enable_thinking,
                "reasoning.enabled": reasoning.enabled,
                "thinking": thinking.enabled,
            },
            budget={
                "thinking_budget": self.thinking_budget,
                "reasoning.max_tokens": reasoning.max_tokens,
                "thinking.budget_tokens": thinking.budget_tokens,
            },
            effort={"reasoning_effort": self.reasoning_effort, "reasoning.effort": reasoning.effort},
        )

    @property
    def hides_thinking(self) -> bool:
        return self.include_reasoning is False or (self.reasoning is not None and self.reasoning.exclude)

    def ask(self) -> ChatInput:
        media_options = read_media_options(
            self.mm_processor_kwargs, self.media_io_kwargs, self.video_fps, self.video_max_frames
        )
        return ChatInput(
            messages=messages_as_dicts(self.messages, media_options),
            tools=self.offered,
            choice=self.choice,
            parallel=self.parallel_tool_calls,
            hold_calls=self.hold_calls,
            thinking=self.thinks,
            output=self.output,
            variables=self.chat_template_kwargs,
            ending=self.ending,
            tool_format=self.tool_format,
            thinking_format=self.thinking_format,
            history=self.template_history,
        )


def _tool_name(choice: ChosenFunction | ChosenCustom) -> str:
    return choice.custom.name if isinstance(choice, ChosenCustom) else choice.function.name


CHAT_BODY = ObjectOf(
    ChatBody,
    (
        NEEDS_LOGPROBS,
        Never(
            (Is("add_generation_prompt", True), Is("continue_final_message", True)),
            "add_generation_prompt begins a new message and continue_final_message continues the last: choose one.",
            param="continue_final_message",
        ),
    ),
    foreign.CHAT,
)


def read_chat(value: Any, served: ServedModel, request_id: str) -> GenerationTask:
    """The task of a decoded body. Renders and tokenizes: not for an event loop."""
    reading = served.reading()
    body: ChatBody = CHAT_BODY.parse(value, "", reading)
    prepared = prepare_chat(served, body.remembering(body.ask()))
    request = body.request(
        request_id,
        served,
        [prepared],
        model=body.model,
        adapter=body.adapter,
        max_tokens=body.limit,
        n=body.n,
        sampling=body.sampling(served, logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        stop=body.stopping(served, body.stop),
    )
    reading.ignored.extend(prepared.ignored)
    reading.ignored.extend(f"tools.{name}.format" for name in body.described_only)
    head = AnswerHead.of(request_id, int(time.time()), served, reading, prepared.sources, request)
    options = ChatAnswerOptions(
        logprobs=body.logprobs,
        tiered=body.service_tier is not None,
        include_usage=body.include_usage,
        metadata=body.metadata,
        hides_thinking=body.hides_thinking,
        custom=body.custom,
    )
    view = StreamedChat(head, body.n, options) if body.stream else WholeChat(head, body.n, options)
    return GenerationTask(request, view, "messages", head, prepared.turn)
