"""`POST /api/chat` and `/api/generate`: the bodies and `options` as Ollama describes them, and the generation tasks
that they become.

Options that are settled when a model is loaded have no effect, and the receipt names them.
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
    AskedOutput,
    AskFieldNames,
    ChatAsk,
    JsonObjectOutput,
    JsonSchemaOutput,
    ThinkingOptions,
    ToolDefinition,
)
from ingot.protocol.chat.generation_fields import (
    ABOUT_HOLD_CALLS,
    ABOUT_LOGIT_BIAS,
    LOGIT_BIASES,
    RequestFields,
    StopFields,
)
from ingot.protocol.chat.media import ImageListKind, MessageListKind, OmittedMedia, template_content
from ingot.protocol.chat.preparation import PreparedChat, prepare_ask
from ingot.protocol.chat.prompts import encode_infill_prompt, encode_text_prompt, find_infill_tokens
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
from ingot.protocol.schema.objects import Is, IsGiven, Never, Not, ObjectOf, accepts, refuses, requires
from ingot.protocol.served import ServedModel
from ingot.protocol.terms import DEFAULT_NAME, Terms
from ingot.text.parser.arguments import arguments_as_text

INT32_FIELD = Int((-(2**31), 2**31 - 1))
SETTLED_AT_LOAD = "Settled when the model was loaded; without effect."
SAMPLER_REFUSED = "is not supported: tokens are chosen by temperature, top_k, top_p, min_p and penalties."
LOAD_OPTIONS = (
    *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap"),
    *("use_mlock", "embedding_only", "num_thread", "num_keep"),
)


class OllamaPromptTooLong(BadRequest):
    code = "context_length_exceeded"


def load_time_field(kind: Any) -> Any:
    return accepts(kind, SETTLED_AT_LOAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaOptions(StopFields, RequestFields):
    num_predict: int | None = accepts(
        Int((-2, bounds.MAX_TOKENS[1])), "Most tokens to generate; below 1, as many as the context holds."
    )
    # What these leave out is as the model's makers recommend.
    temperature: float | None = accepts(Number(bounds.TEMPERATURE), "0 takes the likeliest token.")
    top_k: int | None = accepts(Int(bounds.TOP_K), "Sample from this many tokens; 0 or -1 is all.")
    top_p: float | None = accepts(Number(bounds.TOP_P), "Sample from this share of the probability.")
    min_p: float | None = accepts(
        Number(bounds.MIN_P), "Leave out tokens less likely than this share of the likeliest one's."
    )
    repeat_penalty: float | None = accepts(
        Number(bounds.REPETITION_PENALTY), "Divides the likelihood of tokens that already occur."
    )
    repeat_last_n: int | None = accepts(
        Int((-1, bounds.MAX_TOKENS[1])), "0 switches repeat_penalty off; else it counts all tokens."
    )
    presence_penalty: float = accepts(
        Number(bounds.PENALTY), "Taken off the logit of tokens that were generated.", default=0.0
    )
    frequency_penalty: float = accepts(
        Number(bounds.PENALTY), "Taken off the logit for each time a token was generated.", default=0.0
    )
    seed: int | None = accepts(Int(bounds.SEED), "The same seed gives the same text; -1 is none.")
    stop: str | tuple[str, ...] = accepts(STOP_FIELD, "Text that ends the answer.", default=())
    num_ctx: int | None = accepts(
        Int((0, bounds.PROMPT_TOKENS)),
        "Most tokens of prompt and answer together; without effect above the model's context, 0 is that.",
    )
    logit_bias: tuple[tuple[int, float], ...] = accepts(LOGIT_BIASES, ABOUT_LOGIT_BIAS, default=())

    mirostat: None = refuses(SAMPLER_REFUSED, 0)
    mirostat_tau: float | None = accepts(Number((0.0, 1e6)), "Means nothing without mirostat.")
    mirostat_eta: float | None = accepts(Number((0.0, 1e6)), "Means nothing without mirostat.")
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
    num_keep: int | None = accepts(INT32_FIELD, "No prompt is ever cut; without effect.")

    def limit(self, prompt: int) -> int | None:
        """Most tokens to generate after a prompt of this many. Raises PromptTooLong where num_ctx leaves room for none:
        prompts are never cut here."""
        asked = self.num_predict if self.num_predict is not None and self.num_predict > 0 else None
        if not self.num_ctx:
            return asked
        if prompt >= self.num_ctx:
            raise OllamaPromptTooLong(
                f"The prompt has {prompt} tokens, and options.num_ctx leaves {self.num_ctx} for it and the answer. "
                "Raise num_ctx, or shorten the prompt: it is never cut here.",
                param="options.num_ctx",
            )
        room = self.num_ctx - prompt
        return room if asked is None else min(asked, room)

    def sampling(self, defaults: Sampling, *, logprobs: int | None) -> Sampling:
        said = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": 1.0 if self.repeat_last_n == 0 else self.repeat_penalty,
            "logit_bias": self.logit_bias,
            "seed": None if self.seed == -1 else self.seed,
            "logprobs": logprobs,
        }
        return with_sampling_defaults(defaults, said)


def note_unheeded_options(given: Any, options: OllamaOptions, context: int, reading: BodyReading) -> None:
    """Names in the receipt what in `given`, the options as they were sent, had no effect."""
    unheeded = [name for name in LOAD_OPTIONS if given.get(name) is not None]
    if options.num_ctx is not None and options.num_ctx > context:
        unheeded.append("num_ctx")
    if options.repeat_last_n not in (None, 0, -1) and options.repeat_penalty not in (None, 1.0):
        unheeded.append("repeat_last_n")
    for name in unheeded:
        reading.ignore(f"options.{name}")


OLLAMA_FIELD_NAMES = AskFieldNames(choice="tools", output="format", thinking="think")
ABOUT_IMAGES = "Pictures in base64. A model that reads text alone refuses them, and past ones are left out."
LATEST_TAG = ":latest"
KEEP_ALIVE = "How long the model stays loaded after the request; one that is alone always stays."
OLLAMA_DURATION = re.compile(r"-?(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+|-?\d+")


@dataclass(frozen=True, slots=True)
class OllamaModelName(DelegateKind):
    """A name of the served model, with or without the tag that Ollama adds to names."""

    names: FieldKind = ModelNameField()

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        return self.names.parse(value.removesuffix(LATEST_TAG) if isinstance(value, str) else value, path, reading)

    def kind(self, terms: Terms) -> FieldKind:
        return self.names


@dataclass(frozen=True, slots=True)
class OllamaDuration(FieldKind):
    """Seconds, or a text such as `5m`. Who keeps the models has read it by then; where there is one, it stays."""

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
    arguments: Any = accepts(Anything(), "Its arguments; what is no JSON object is shown as it is.")
    index: int | None = accepts(Int((0, bounds.TOOL_CALLS)), "Its place among the calls.")


@dataclass(frozen=True, slots=True)
class OllamaPastCall:
    function: OllamaCalledFunction = requires(ObjectOf(OllamaCalledFunction), "What was called.")
    id: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "The call's id.")
    type: str | None = accepts(OneOf(("function",)), "Functions are the only tools.")


@dataclass(frozen=True, slots=True)
class OllamaChatMessage:
    role: str = requires(OneOf(("system", "user", "assistant", "tool")), "Who speaks.")
    content: str = accepts(Text(), "What is said.", default="")
    thinking: str | None = accepts(Text(), "What the assistant thought.")
    tool_calls: tuple[OllamaPastCall, ...] = accepts(
        ListOf(ObjectOf(OllamaPastCall), bounds.TOOL_CALLS), "The calls it made.", default=()
    )
    tool_name: str | None = accepts(Text(bounds.NAME_CHARS), "The function that a tool's message answers.")
    name: str | None = accepts(Text(bounds.NAME_CHARS), "The older name of tool_name.")
    tool_call_id: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "The call that a tool's message answers.")
    images: tuple[OmittedMedia | RequestImage, ...] = accepts(ImageListKind(), ABOUT_IMAGES, default=())

    @property
    def said(self) -> str | list[dict[str, Any]]:
        """Pictures stand before the text, as Ollama has it; what stands for unseen ones behind it."""
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
    """What chats and completions share."""

    model: str = accepts(OllamaModelName(), "A name of the served model.", default=DEFAULT_NAME)
    adapter: str | None = accepts(AdapterField(), ABOUT_ADAPTER)
    stream: bool = accepts(Bool(), "Send the answer line by line while it is made.", default=True)
    options: OllamaOptions | None = accepts(ObjectOf(OllamaOptions), "How tokens are chosen.")
    format: str | dict[str, Any] | None = accepts(
        Either((OneOf(("json", "")), Anything(dict))), "`json`, or the JSON schema that the answer is held to."
    )
    think: bool | str | None = accepts(
        Either((Bool(), OneOf(("low", "medium", "high", "max")))), "Whether to think, or how much."
    )
    keep_alive: None = accepts(OllamaDuration(), KEEP_ALIVE)
    logprobs: bool = accepts(Bool(), "Give the log-probability of each token.", default=False)
    top_logprobs: int | None = accepts(
        Int(bounds.TOP_LOGPROBS), "Give this many likeliest tokens too; needs `logprobs`."
    )
    truncate: None = refuses("is not supported: no prompt is ever cut. Send false.", False)
    shift: None = refuses("is not supported: an answer ends where the context does. Send false.", False)

    @property
    def chosen(self) -> OllamaOptions:
        return self.options or OllamaOptions()

    @property
    def thinking(self) -> ThinkingOptions:
        return ThinkingOptions(effort=self.think) if isinstance(self.think, str) else ThinkingOptions(self.think)

    @property
    def output(self) -> AskedOutput | None:
        if isinstance(self.format, dict):
            return JsonSchemaOutput(self.format)
        return JsonObjectOutput() if self.format == "json" else None

    @property
    def logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


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

    def ask(self) -> ChatAsk:
        last = self.messages[-1]
        continued = last.role == "assistant" and bool(last.content) and not last.tool_calls
        return ChatAsk(
            messages=ollama_messages_to_chat(self.messages),
            tools=tuple(tool.tool for tool in self.tools),
            hold_calls=self.hold_calls,
            thinking=self.thinking,
            output=self.output,
            ending="continued" if continued else "opened",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaGenerateBody(OllamaBody):
    prompt: str = accepts(Text(), "What to answer; nothing, and no pictures, only loads the model.", default="")
    system: str | None = accepts(Text(), "Instructions.")
    raw: bool = accepts(Bool(), "Go on from the prompt as it stands, without the chat template.", default=False)
    suffix: str = accepts(
        Text(), "The text after the gap that is to be filled in after the prompt; for models that can.", default=""
    )
    images: tuple[OmittedMedia | RequestImage, ...] = accepts(ImageListKind(), ABOUT_IMAGES, default=())
    template: None = refuses("is not supported: a request cannot bring its own template.", "")
    context: None = refuses("is not supported: send the conversation to /api/chat.", [])
    width: None = refuses("is not supported: no images are made.", 0)
    height: None = refuses("is not supported: no images are made.", 0)
    steps: None = refuses("is not supported: no images are made.", 0)

    def ask(self) -> ChatAsk:
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*messages, {"role": "user", "content": content_with_images(self.prompt, self.images)}]
        return ChatAsk(messages=messages, thinking=self.thinking, output=self.output)


FILLS_THE_MIDDLE = (IsGiven("suffix"), Not(Is("suffix", "")))
NO_TEMPLATE = "goes through the chat template, which filling in before a suffix leaves out."
NEEDS_LOGPROBS = Never(
    (IsGiven("top_logprobs"), Not(Is("logprobs", True))),
    "top_logprobs needs logprobs to be true.",
    param="top_logprobs",
)
OLLAMA_CHAT_BODY = ObjectOf(OllamaChatBody, (NEEDS_LOGPROBS,))
OLLAMA_GENERATE_BODY = ObjectOf(
    OllamaGenerateBody,
    (
        NEEDS_LOGPROBS,
        *(
            Never(
                (Is("raw", True), IsGiven(name)), f"{name} goes through the chat template, which raw leaves out.", name
            )
            for name in ("system", "format", "think", "images")
        ),
        *(
            Never((*FILLS_THE_MIDDLE, IsGiven(name), Not(Is(name, nothing))), f"{name} {NO_TEMPLATE}", name)
            for name, nothing in (("system", ""), ("format", ""), ("think", False), ("images", ""))
        ),
    ),
)


def content_with_images(text: str, images: tuple[OmittedMedia | RequestImage, ...]) -> str | list[dict[str, Any]]:
    if seen := [image for image in images if isinstance(image, RequestImage)]:
        return template_content([*seen, text] if text else seen)
    return "\n".join(
        part for part in (text, *(image.text for image in images if isinstance(image, OmittedMedia))) if part
    )


@dataclass(slots=True)
class PastToolCalls:
    """Gives ids to calls that came without, and finds the call that a tool's message answers."""

    waiting: deque[tuple[str, str]] = field(default_factory=deque)  # ids and names
    count: int = 0

    def made(self, call: OllamaPastCall) -> dict[str, Any]:
        id = call.id or f"call_{self.count}"
        self.count += 1
        self.waiting.append((id, call.function.name))
        arguments = arguments_as_text(call.function.arguments)
        return {"id": id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}

    def answered(self, message: OllamaChatMessage, at: int) -> dict[str, Any]:
        name = message.tool_name or message.name
        for one in self.waiting:
            if message.tool_call_id == one[0] or (message.tool_call_id is None and name in (None, one[1])):
                self.waiting.remove(one)
                return {"role": "tool", "tool_call_id": one[0], "name": one[1], "content": message.said}
        where = f"messages.{at}"
        raise BadRequest(f"{where}: no call before it is left that this could answer.", param=where)


def ollama_messages_to_chat(messages: tuple[OllamaChatMessage, ...]) -> list[dict[str, Any]]:
    calls, told = PastToolCalls(), []
    for at, message in enumerate(messages):
        if message.role == "tool":
            told.append(calls.answered(message, at))
            continue
        made: dict[str, Any] = {"role": message.role, "content": message.said}
        if message.role == "assistant":
            if message.tool_calls:
                made |= {"content": message.said or None, "tool_calls": [calls.made(c) for c in message.tool_calls]}
            if message.thinking:
                made["reasoning_content"] = message.thinking
        told.append(made)
    return told


def read_ollama_chat(value: Any, served: ServedModel, request_id: str) -> GenerationTask | Struct:
    """The job that a decoded body asks for, or at once the answer to one that asks for nothing but to be loaded."""
    reading = served.reading()
    body: OllamaChatBody = OLLAMA_CHAT_BODY.parse(value, "", reading)
    if not body.messages:
        return load_only_answer(OllamaChatShape(AnswerHead.of(request_id, int(time.time()), served, reading)))
    wanted = prepare_ask(served, body.chosen.remembering(body.ask()), names=OLLAMA_FIELD_NAMES)
    return make_ollama_task(body, value, wanted, served, request_id, reading, "messages")


def read_ollama_generate(value: Any, served: ServedModel, request_id: str) -> GenerationTask | Struct:
    reading = served.reading()
    body: OllamaGenerateBody = OLLAMA_GENERATE_BODY.parse(value, "", reading)
    if not body.prompt and not body.images and not body.suffix:
        return load_only_answer(OllamaCompletionShape(AnswerHead.of(request_id, int(time.time()), served, reading)))
    ends: frozenset[int] = frozenset()
    if body.suffix:
        wanted = PreparedChat(
            encode_infill_prompt(served, body.prompt, body.suffix, paths=("prompt", "suffix")), None, None
        )
        ends = find_infill_tokens(served, path="suffix").ends
    elif body.raw:
        wanted = PreparedChat(encode_text_prompt(served, body.prompt, path="prompt"), None, None)
    else:
        wanted = prepare_ask(served, body.chosen.remembering(body.ask()), names=OLLAMA_FIELD_NAMES)
    return make_ollama_task(body, value, wanted, served, request_id, reading, "prompt", ends)


def make_ollama_task(
    body: OllamaBody,
    value: Any,
    wanted: PreparedChat,
    served: ServedModel,
    request_id: str,
    reading: BodyReading,
    prompt_field: str,
    ends: frozenset[int] = frozenset(),
) -> GenerationTask:
    options = body.chosen
    note_unheeded_options(value.get("options") or {}, options, served.card.context, reading)
    request = options.request(
        request_id,
        served,
        [wanted],
        model=body.model,
        adapter=body.adapter,
        max_tokens=options.limit(len(wanted.prompt)),
        sampling=options.sampling(served.sampling, logprobs=body.logprobs_wanted),
        stop=options.stopping(options.stop, ends),
        path="options.",
    )
    reading.ignored.extend(wanted.ignored)
    head = AnswerHead.of(request_id, int(time.time()), served, reading, wanted.sources, request)
    head = replace(head, model=body.model)
    made = OllamaChatShape if isinstance(body, OllamaChatBody) else OllamaCompletionShape
    shape = made(head, logprobs=body.logprobs)
    return GenerationTask(
        request,
        StreamedOllamaAnswer(shape) if body.stream else WholeOllamaAnswer(shape),
        prompt_field,
        head,
        wanted.turn,
    )


def load_only_answer(shape: OllamaAnswerShape) -> Struct:
    """What a client is told that wants the model loaded, which it is."""
    made = shape.line(OllamaLineContent(), done=True)
    made.done_reason = "load"
    made.ingot = Receipt.of(shape.head, Ended(Usage(), Timing()))
    return made
