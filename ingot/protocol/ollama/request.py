"""`POST /api/chat` and `/api/generate`: Ollama's bodies and `options`, and the tasks that they become.

Options that take effect when a model is loaded are named in the receipt and do nothing else.
"""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import Struct

from ingot.engine.request import Ended, Sampling, Timing, Usage
from ingot.errors import BadRequest
from ingot.media.items import RequestImage
from ingot.protocol.chat.answers import AnswerHead, GenerationTask, Receipt
from ingot.protocol.chat.ask import (
    ABOUT_ARGUMENTS,
    ABOUT_ROLE,
    ChatFieldNames,
    ChatInput,
    OutputGrammar,
    ThinkingOptions,
    ToolDefinition,
    json_output,
    tool_call_dict,
)
from ingot.protocol.chat.generation_fields import (
    ABOUT_HOLD_CALLS,
    ABOUT_LOGPROBS,
    ABOUT_TOP_LOGPROBS,
    FREQUENCY_PENALTY,
    LOGIT_BIAS,
    MIN_P,
    NEEDS_LOGPROBS,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    SAMPLING_FIELDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    RequestFields,
    StopFields,
)
from ingot.protocol.chat.media import ImageListKind, MessageListKind, OmittedMedia, template_content
from ingot.protocol.chat.preparation import PreparedChat, prepare_chat
from ingot.protocol.chat.prompts import ABOUT_SUFFIX, encode_infill_prompt, encode_text_prompt, find_infill_tokens
from ingot.protocol.chat.sampling_defaults import with_sampling_defaults
from ingot.protocol.lora_adapters import ABOUT_ADAPTER, AdapterField
from ingot.protocol.ollama.answers import (
    OllamaAnswerShape,
    OllamaChatShape,
    OllamaCompletionShape,
    OllamaLineContent,
    StreamedOllamaAnswer,
    WholeOllamaAnswer,
)
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import (
    Anything,
    BodyReading,
    Bool,
    DelegateKind,
    Either,
    FieldKind,
    Int,
    ListOf,
    Number,
    OneOf,
    Schema,
    Text,
)
from ingot.protocol.schema.model_fields import STOP_FIELD, ModelNameField
from ingot.protocol.schema.objects import Is, IsSet, Never, Not, ObjectOf, accepts, refuses, requires
from ingot.protocol.served import ServedModel
from ingot.protocol.terms import DEFAULT_NAME, Terms
from ingot.quantities import counted

INT32_FIELD = Int((-(2**31), 2**31 - 1))
ABOUT_LOAD_OPTION = "Set when the model was loaded; without effect."
SAMPLER_REFUSED = "is not supported: tokens are sampled by temperature, top_k, top_p, min_p and penalties."
LOAD_OPTIONS = (
    *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap"),
    *("use_mlock", "embedding_only", "num_thread", "num_keep"),
)


class OllamaPromptTooLong(BadRequest):
    code = "context_length_exceeded"


def load_time_field(kind: Any) -> Any:
    return accepts(kind, ABOUT_LOAD_OPTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaOptions(StopFields, RequestFields):
    num_predict: int | None = accepts(
        Int((-2, bounds.MAX_TOKENS[1])), "Most tokens to generate; below 1, as many as the context holds."
    )
    temperature: float | None = accepts(*TEMPERATURE)
    top_k: int | None = accepts(*TOP_K)
    top_p: float | None = accepts(*TOP_P)
    min_p: float | None = accepts(*MIN_P)
    repeat_penalty: float | None = accepts(*REPETITION_PENALTY)
    repeat_last_n: int | None = accepts(
        Int((-1, bounds.MAX_TOKENS[1])), "0 switches repeat_penalty off; otherwise it counts all tokens."
    )
    presence_penalty: float = accepts(*PRESENCE_PENALTY, default=0.0)
    frequency_penalty: float = accepts(*FREQUENCY_PENALTY, default=0.0)
    seed: int | None = accepts(Int(bounds.SEED), "The same seed gives the same text; -1 is none.")
    stop: str | tuple[str, ...] = accepts(STOP_FIELD, "Text that ends the answer.", default=())
    num_ctx: int | None = accepts(
        Int((0, bounds.PROMPT_TOKENS)),
        "Most tokens of prompt and answer together; without effect above the model's context, 0 is that.",
    )
    logit_bias: tuple[tuple[int, float], ...] = accepts(*LOGIT_BIAS, default=())

    mirostat: None = refuses(SAMPLER_REFUSED, 0)
    mirostat_tau: float | None = accepts(Number((0.0, 1e6)), "Has no effect without mirostat.")
    mirostat_eta: float | None = accepts(Number((0.0, 1e6)), "Has no effect without mirostat.")
    typical_p: None = refuses(SAMPLER_REFUSED, 1.0, 1)
    tfs_z: None = refuses(SAMPLER_REFUSED, 1.0, 1)
    penalize_newline: None = refuses("is not supported: penalties count every token alike. Send true.", True)

    numa: bool | None = load_time_field(Bool())
    num_batch: int | None = load_time_field(INT32_FIELD)
    num_gpu: int | None = load_time_field(INT32_FIELD)
    main_gpu: int | None = load_time_field(INT32_FIELD)
    low_vram: bool | None = load_time_field(Bool())
    f16_kv: bool | None = load_time_field(Bool())
    logits_all: bool | None = load_time_field(Bool())
    vocab_only: bool | None = load_time_field(Bool())
    use_mmap: bool | None = load_time_field(Bool())
    use_mlock: bool | None = load_time_field(Bool())
    embedding_only: bool | None = load_time_field(Bool())
    num_thread: int | None = load_time_field(INT32_FIELD)
    num_keep: int | None = accepts(INT32_FIELD, "Prompts are never truncated; without effect.")

    def limit(self, prompt: int) -> int | None:
        """Most tokens to generate after a prompt of this many. Raises OllamaPromptTooLong where num_ctx has no room."""
        limit = self.num_predict if self.num_predict is not None and self.num_predict > 0 else None
        if not self.num_ctx:
            return limit
        if prompt >= self.num_ctx:
            raise OllamaPromptTooLong(
                f"The prompt has {counted(prompt, 'token')}, and options.num_ctx leaves {self.num_ctx} for it and the "
                "answer. Raise num_ctx, or shorten the prompt: prompts are never truncated.",
                param="options.num_ctx",
            )
        return min(self.num_ctx - prompt, limit or self.num_ctx)

    def sampling(self, defaults: Sampling, *, logprobs: int | None) -> Sampling:
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS if name != "repetition_penalty"} | {
            "repetition_penalty": 1.0 if self.repeat_last_n == 0 else self.repeat_penalty,
            "seed": None if self.seed == -1 else self.seed,
            "logprobs": logprobs,
        }
        return with_sampling_defaults(defaults, values)


def note_ignored_options(raw: Any, options: OllamaOptions, context: int, reading: BodyReading) -> None:
    """Names in the receipt the options without effect; `raw` are the options as they were sent."""
    ignored = [name for name in LOAD_OPTIONS if raw.get(name) is not None]
    if options.num_ctx is not None and options.num_ctx > context:
        ignored.append("num_ctx")
    if options.repeat_last_n not in (None, 0, -1) and options.repeat_penalty not in (None, 1.0):
        ignored.append("repeat_last_n")
    for name in ignored:
        reading.ignore(f"options.{name}")


OLLAMA_FIELD_NAMES = ChatFieldNames(choice="tools", output="format", thinking="think")
ABOUT_IMAGES = "Images in base64. A text-only model refuses them, and leaves out past ones."
LATEST_TAG = ":latest"
KEEP_ALIVE = "How long the model stays loaded after the request; the only model of a server always stays."
OLLAMA_DURATION = re.compile(r"-?(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+|-?\d+")


@dataclass(frozen=True, slots=True)
class OllamaModelNameField(DelegateKind):
    """A name of the served model, with or without Ollama's `:latest`."""

    names: FieldKind = ModelNameField()

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        return self.names.parse(value.removesuffix(LATEST_TAG) if isinstance(value, str) else value, path, reading)

    def kind(self, terms: Terms) -> FieldKind:
        return self.names


@dataclass(frozen=True, slots=True)
class OllamaDurationField(FieldKind):
    """Seconds, or a text such as `5m`. The model registry has read it before; the only model of a server stays."""

    types, words = (str, int, float), "seconds, or a duration such as 5m"

    def parse(self, value: object, path: str, reading: BodyReading) -> None:
        if isinstance(value, str) and not OLLAMA_DURATION.fullmatch(value):
            raise self.refuse(value, path, reading)
        if not isinstance(value, str):
            Number((-1e12, 1e12)).parse(value, path, reading)
        if reading.terms.unloads:
            return
        if value == 0 or (isinstance(value, str) and not re.search("[1-9]", value)):
            reading.ignore(path)

    def schema(self, terms: Terms) -> Schema:
        text = {"type": "string", "pattern": f"^(?:{OLLAMA_DURATION.pattern})$"}
        return {"anyOf": [Number((-1e12, 1e12)).schema(terms), text]}


@dataclass(frozen=True, slots=True)
class OllamaCalledFunction:
    name: str = requires(Text(bounds.NAME_CHARS, least=1), "The function's name.")
    arguments: Any = accepts(Anything(), ABOUT_ARGUMENTS)
    index: int | None = accepts(Int((0, bounds.TOOL_CALLS)), "Its index among the calls.")


@dataclass(frozen=True, slots=True)
class OllamaPastCall:
    function: OllamaCalledFunction = requires(ObjectOf(OllamaCalledFunction), "What was called.")
    id: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "The call's id.")
    type: str | None = accepts(OneOf(("function",)), "Functions are the only tools.")


@dataclass(frozen=True, slots=True)
class OllamaChatMessage:
    role: str = requires(OneOf(("system", "user", "assistant", "tool")), ABOUT_ROLE)
    content: str = accepts(Text(), "The message.", default="")
    thinking: str | None = accepts(Text(), "The assistant's thinking.")
    tool_calls: tuple[OllamaPastCall, ...] = accepts(
        ListOf(ObjectOf(OllamaPastCall), bounds.TOOL_CALLS), "The calls it made.", default=()
    )
    tool_name: str | None = accepts(Text(bounds.NAME_CHARS), "The function that a tool's message answers.")
    name: str | None = accepts(Text(bounds.NAME_CHARS), "The older name of tool_name.")
    tool_call_id: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "The call that a tool's message answers.")
    images: tuple[OmittedMedia | RequestImage, ...] = accepts(ImageListKind(), ABOUT_IMAGES, default=())

    @property
    def template_content(self) -> str | list[dict[str, Any]]:
        return content_with_images(self.content, self.images)


@dataclass(frozen=True, slots=True)
class OllamaFunctionDefinition:
    name: str = requires(Text(bounds.TOOL_NAME_CHARS, least=1), "The function's name.")
    description: str | None = accepts(Text(bounds.TOOL_DESCRIPTION_CHARS), "What it does.")
    parameters: dict[str, Any] | None = accepts(Anything(dict), "The JSON schema of its arguments.")


@dataclass(frozen=True, slots=True)
class OllamaTool:
    function: OllamaFunctionDefinition = requires(ObjectOf(OllamaFunctionDefinition), "The function.")
    type: str | None = accepts(OneOf(("function",)), "Functions are the only tools.")

    @property
    def tool(self) -> ToolDefinition:
        return ToolDefinition(self.function.name, self.function.description, self.function.parameters or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaBody:
    """The fields that chats and completions share."""

    model: str = accepts(OllamaModelNameField(), "A name of the served model.", default=DEFAULT_NAME)
    adapter: str | None = accepts(AdapterField(), ABOUT_ADAPTER)
    stream: bool = accepts(Bool(), "Send the answer line by line while it is generated.", default=True)
    options: OllamaOptions | None = accepts(ObjectOf(OllamaOptions), "How tokens are sampled.")
    format: str | dict[str, Any] | None = accepts(
        Either((OneOf(("json", "")), Anything(dict))), "`json`, or the JSON schema that the answer must match."
    )
    think: bool | str | None = accepts(
        Either((Bool(), OneOf(("low", "medium", "high", "max")))), "Whether to think, or how much."
    )
    keep_alive: None = accepts(OllamaDurationField(), KEEP_ALIVE)
    logprobs: bool = accepts(Bool(), ABOUT_LOGPROBS, default=False)
    top_logprobs: int | None = accepts(Int(bounds.TOP_LOGPROBS), ABOUT_TOP_LOGPROBS)
    truncate: None = refuses("is not supported: prompts are never truncated. Send false.", False)
    shift: None = refuses("is not supported: an answer ends where the context does. Send false.", False)

    @property
    def thinking(self) -> ThinkingOptions:
        return ThinkingOptions(effort=self.think) if isinstance(self.think, str) else ThinkingOptions(self.think)

    @property
    def output(self) -> OutputGrammar | None:
        if self.format in (None, ""):
            return None
        return json_output(self.format if isinstance(self.format, dict) else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaChatBody(OllamaBody):
    messages: tuple[OllamaChatMessage, ...] = accepts(
        MessageListKind(ListOf(ObjectOf(OllamaChatMessage), bounds.MESSAGES)),
        "The conversation so far; none only loads the model.",
        default=(),
    )
    tools: tuple[OllamaTool, ...] = accepts(
        ListOf(ObjectOf(OllamaTool), bounds.TOOLS), "Functions that the model may call.", default=()
    )
    hold_calls: bool | None = accepts(Bool(), ABOUT_HOLD_CALLS)

    def ask(self) -> ChatInput:
        last = self.messages[-1]
        continued = last.role == "assistant" and bool(last.content) and not last.tool_calls
        return ChatInput(
            messages=ollama_messages_to_chat(self.messages),
            tools=tuple(tool.tool for tool in self.tools),
            hold_calls=self.hold_calls,
            thinking=self.thinking,
            output=self.output,
            ending="continued" if continued else "opened",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaGenerateBody(OllamaBody):
    prompt: str = accepts(Text(), "What to answer; without it and without images, only load the model.", default="")
    system: str | None = accepts(Text(), "Instructions.")
    raw: bool = accepts(Bool(), "Continue the prompt as it is, without the chat template.", default=False)
    suffix: str = accepts(Text(), ABOUT_SUFFIX, default="")
    images: tuple[OmittedMedia | RequestImage, ...] = accepts(ImageListKind(), ABOUT_IMAGES, default=())
    template: None = refuses("is not supported: a request cannot have its own template.", "")
    context: None = refuses("is not supported: send the conversation to /api/chat.", [])
    width: None = refuses("is not supported: no images are generated.", 0)
    height: None = refuses("is not supported: no images are generated.", 0)
    steps: None = refuses("is not supported: no images are generated.", 0)

    def ask(self) -> ChatInput:
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": content_with_images(self.prompt, self.images)})
        return ChatInput(messages=messages, thinking=self.thinking, output=self.output)


HAS_SUFFIX = (IsSet("suffix"), Not(Is("suffix", "")))
OLLAMA_CHAT_BODY = ObjectOf(OllamaChatBody, (NEEDS_LOGPROBS,))
OLLAMA_GENERATE_BODY = ObjectOf(
    OllamaGenerateBody,
    (
        NEEDS_LOGPROBS,
        *(
            Never((Is("raw", True), IsSet(name)), f"{name} needs the chat template, which raw does without.", name)
            for name in ("system", "format", "think", "images")
        ),
        *(
            Never(
                (*HAS_SUFFIX, IsSet(name), Not(Is(name, nothing))),
                f"{name} needs the chat template, which is not used with a suffix.",
                name,
            )
            for name, nothing in (("system", ""), ("format", ""), ("think", False), ("images", ""))
        ),
    ),
)


def content_with_images(text: str, images: tuple[OmittedMedia | RequestImage, ...]) -> str | list[dict[str, Any]]:
    """Images come before the text, as in Ollama; the texts that replace omitted ones come after it."""
    if supported := [image for image in images if isinstance(image, RequestImage)]:
        return template_content([*supported, text] if text else supported)
    omitted = [image.text for image in images if isinstance(image, OmittedMedia)]
    return "\n".join(part for part in (text, *omitted) if part)


@dataclass(slots=True)
class PastToolCalls:
    """Gives ids to calls that have none, and finds the call that a tool's message answers."""

    unanswered: deque[tuple[str, str]] = field(default_factory=deque)  # ids and names
    count: int = 0

    def add(self, call: OllamaPastCall) -> dict[str, Any]:
        id = call.id or f"call_{self.count}"
        self.count += 1
        self.unanswered.append((id, call.function.name))
        return tool_call_dict(id, call.function.name, call.function.arguments)

    def answer(self, message: OllamaChatMessage, at: int) -> dict[str, Any]:
        name = message.tool_name or message.name
        for call in self.unanswered:
            id, called = call
            if message.tool_call_id == id or (message.tool_call_id is None and name in (None, called)):
                self.unanswered.remove(call)
                return {"role": "tool", "tool_call_id": id, "name": called, "content": message.template_content}
        where = f"messages.{at}"
        raise BadRequest(f"{where}: there is no unanswered call before it that this could answer.", param=where)


def ollama_messages_to_chat(messages: tuple[OllamaChatMessage, ...]) -> list[dict[str, Any]]:
    calls, chat = PastToolCalls(), []
    for at, message in enumerate(messages):
        if message.role == "tool":
            chat.append(calls.answer(message, at))
            continue
        content = message.template_content
        made: dict[str, Any] = {"role": message.role, "content": content}
        if message.role == "assistant":
            if message.tool_calls:
                made |= {"content": content or None, "tool_calls": [calls.add(call) for call in message.tool_calls]}
            if message.thinking:
                made["reasoning_content"] = message.thinking
        chat.append(made)
    return chat


def read_ollama_chat(value: Any, served: ServedModel, request_id: str) -> GenerationTask | Struct:
    """The task of a decoded body, or the answer to one that only loads the model."""
    reading = served.reading()
    body: OllamaChatBody = OLLAMA_CHAT_BODY.parse(value, "", reading)
    if not body.messages:
        return load_only_answer(OllamaChatShape(AnswerHead.of(request_id, int(time.time()), served, reading)))
    return make_ollama_task(body, value, prepare_ollama(served, body), served, request_id, reading, "messages")


def read_ollama_generate(value: Any, served: ServedModel, request_id: str) -> GenerationTask | Struct:
    reading = served.reading()
    body: OllamaGenerateBody = OLLAMA_GENERATE_BODY.parse(value, "", reading)
    if not body.prompt and not body.images and not body.suffix:
        return load_only_answer(OllamaCompletionShape(AnswerHead.of(request_id, int(time.time()), served, reading)))
    ends: frozenset[int] = frozenset()
    if body.suffix:
        prepared = PreparedChat(encode_infill_prompt(served, body.prompt, body.suffix, paths=("prompt", "suffix")))
        ends = find_infill_tokens(served, path="suffix").ends
    elif body.raw:
        prepared = PreparedChat(encode_text_prompt(served, body.prompt))
    else:
        prepared = prepare_ollama(served, body)
    return make_ollama_task(body, value, prepared, served, request_id, reading, "prompt", ends)


def prepare_ollama(served: ServedModel, body: OllamaChatBody | OllamaGenerateBody) -> PreparedChat:
    ask = (body.options or OllamaOptions()).remembering(body.ask())
    return prepare_chat(served, ask, names=OLLAMA_FIELD_NAMES)


def make_ollama_task(
    body: OllamaBody,
    value: Any,
    prepared: PreparedChat,
    served: ServedModel,
    request_id: str,
    reading: BodyReading,
    prompt_field: str,
    ends: frozenset[int] = frozenset(),
) -> GenerationTask:
    options = body.options or OllamaOptions()
    note_ignored_options(value.get("options") or {}, options, served.card.context, reading)
    request = options.request(
        request_id,
        served,
        [prepared],
        model=body.model,
        adapter=body.adapter,
        max_tokens=options.limit(len(prepared.prompt)),
        sampling=options.sampling(served.sampling, logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        stop=options.stopping(served, options.stop, ends),
        path="options.",
    )
    reading.ignored.extend(prepared.ignored)
    head = AnswerHead.of(request_id, int(time.time()), served, reading, prepared.sources, request)
    head = replace(head, model=body.model)
    shape_class = OllamaChatShape if isinstance(body, OllamaChatBody) else OllamaCompletionShape
    shape = shape_class(head, logprobs=body.logprobs)
    view = StreamedOllamaAnswer(shape) if body.stream else WholeOllamaAnswer(shape)
    return GenerationTask(request, view, prompt_field, head, prepared.turn)


def load_only_answer(shape: OllamaAnswerShape) -> Struct:
    """The answer to a body that only loads the model, which is loaded by now."""
    line = shape.line(OllamaLineContent(), done=True)
    line.done_reason = "load"
    line.ingot = Receipt.of(shape.head, Ended(Usage(), Timing()))
    return line
