"""`POST /api/chat` and `/api/generate`: the bodies as Ollama describes them, and the jobs they become."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import Struct

from ingot.engine.request import Ended, Timing, Usage
from ingot.errors import BadRequest
from ingot.media.medium import PictureMedium
from ingot.protocol.adapters import WHICH_ADAPTER, AdapterName
from ingot.protocol.chat.answers import AnswerHead, GenerationTask, Receipt
from ingot.protocol.chat.ask import (
    Ask,
    FieldNames,
    JsonObject,
    JsonSchema,
    OutputFormat,
    ThinkingOptions,
    Tool,
)
from ingot.protocol.chat.generation_fields import HOLD_CALLS
from ingot.protocol.chat.media import Images, MessageList, Unseen, content_of
from ingot.protocol.chat.preparation import Prepared, prepare_ask
from ingot.protocol.chat.prompts import infill_prompt, infill_tokens, text_prompt
from ingot.protocol.model_names import DEFAULT_NAME
from ingot.protocol.ollama.answers import ChatShape, CompletionShape, LineContent, OllamaStreamed, OllamaWhole, Shape
from ingot.protocol.ollama.options import Options, note_unheeded
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import (
    Anything,
    BodyReading,
    Bool,
    Delegate,
    Either,
    Int,
    Kind,
    ListOf,
    Number,
    OneOf,
    Schema,
    Text,
)
from ingot.protocol.schema.model_name import ModelName
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires
from ingot.protocol.schema.rules import Given, Is, Never, Not
from ingot.protocol.served import Served
from ingot.protocol.terms import Terms
from ingot.text.parse.call_arguments import as_text

NAMES = FieldNames(choice="tools", output="format", thinking="think")
ABOUT_IMAGES = "Pictures in base64. A model that reads text alone refuses them, and past ones are left out."
LATEST = ":latest"
KEEP_ALIVE = "How long the model stays loaded after the request; one that is alone always stays."
DURATION = re.compile(r"-?(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+|-?\d+")


@dataclass(frozen=True, slots=True)
class OllamaName(Delegate):
    """A name of the served model, with or without the tag that Ollama adds to names."""

    names: Kind = ModelName()

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        return self.names.parse(value.removesuffix(LATEST) if isinstance(value, str) else value, path, reading)

    def kind(self, terms: Terms) -> Kind:
        return self.names


@dataclass(frozen=True, slots=True)
class Duration(Kind):
    """Seconds, or a text such as `5m`. Who keeps the models has read it by then; where there is one, it stays."""

    types, words = (str, int, float), "seconds, or a duration such as 5m"

    def parse(self, value: object, path: str, reading: BodyReading) -> None:
        if isinstance(value, str) and not DURATION.fullmatch(value):
            raise self.refuse(value, path, reading)
        if not isinstance(value, str):
            Number((-1e12, 1e12)).parse(value, path, reading)
        if reading.terms.unloads:
            return
        if value == 0 or (isinstance(value, str) and not re.search("[1-9]", value)):
            reading.ignore(path)

    def schema(self, terms: Terms) -> Schema:
        text = {"type": "string", "pattern": f"^(?:{DURATION.pattern})$"}
        return {"anyOf": [Number((-1e12, 1e12)).schema(terms), text]}


@dataclass(frozen=True, slots=True)
class CalledFunction:
    name: str = requires(Text(bounds.NAME_CHARS, least=1), "The function's name.")
    arguments: Any = accepts(Anything(), "Its arguments; what is no JSON object is shown as it is.")
    index: int | None = accepts(Int((0, bounds.TOOL_CALLS)), "Its place among the calls.")


@dataclass(frozen=True, slots=True)
class PastCallBody:
    function: CalledFunction = requires(ObjectOf(CalledFunction), "What was called.")
    id: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "The call's id.")
    type: str | None = accepts(OneOf(("function",)), "Functions are the only tools.")


@dataclass(frozen=True, slots=True)
class Message:
    role: str = requires(OneOf(("system", "user", "assistant", "tool")), "Who speaks.")
    content: str = accepts(Text(), "What is said.", default="")
    thinking: str | None = accepts(Text(), "What the assistant thought.")
    tool_calls: tuple[PastCallBody, ...] = accepts(
        ListOf(ObjectOf(PastCallBody), bounds.TOOL_CALLS), "The calls it made.", default=()
    )
    tool_name: str | None = accepts(Text(bounds.NAME_CHARS), "The function that a tool's message answers.")
    name: str | None = accepts(Text(bounds.NAME_CHARS), "The older name of tool_name.")
    tool_call_id: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "The call that a tool's message answers.")
    images: tuple[Unseen | PictureMedium, ...] = accepts(Images(), ABOUT_IMAGES, default=())

    @property
    def said(self) -> str | list[dict[str, Any]]:
        """Pictures stand before the text, as Ollama has it; what stands for unseen ones behind it."""
        return told_with(self.content, self.images)


@dataclass(frozen=True, slots=True)
class Function:
    name: str = requires(Text(bounds.TOOL_NAME_CHARS, least=1), "The function's name.")
    description: str | None = accepts(Text(bounds.TOOL_DESCRIPTION_CHARS), "What it does.")
    parameters: dict[str, Any] | None = accepts(Anything(dict), "The JSON schema of its arguments.")


@dataclass(frozen=True, slots=True)
class OllamaTool:
    function: Function = requires(ObjectOf(Function), "The function.")
    type: str | None = accepts(OneOf(("function",)), "Functions are the only tools.")

    @property
    def tool(self) -> Tool:
        return Tool(self.function.name, self.function.description, self.function.parameters or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaBody:
    """What chats and completions share."""

    model: str = accepts(OllamaName(), "A name of the served model.", default=DEFAULT_NAME)
    adapter: str | None = accepts(AdapterName(), WHICH_ADAPTER)
    stream: bool = accepts(Bool(), "Send the answer line by line while it is made.", default=True)
    options: Options | None = accepts(ObjectOf(Options), "How tokens are chosen.")
    format: str | dict[str, Any] | None = accepts(
        Either((OneOf(("json", "")), Anything(dict))), "`json`, or the JSON schema that the answer is held to."
    )
    think: bool | str | None = accepts(
        Either((Bool(), OneOf(("low", "medium", "high", "max")))), "Whether to think, or how much."
    )
    keep_alive: None = accepts(Duration(), KEEP_ALIVE)
    logprobs: bool = accepts(Bool(), "Give the log-probability of each token.", default=False)
    top_logprobs: int | None = accepts(
        Int(bounds.TOP_LOGPROBS), "Give this many likeliest tokens too; needs `logprobs`."
    )
    truncate: None = refuses("is not supported: no prompt is ever cut. Send false.", False)
    shift: None = refuses("is not supported: an answer ends where the context does. Send false.", False)

    @property
    def chosen(self) -> Options:
        return self.options or Options()

    @property
    def thinking(self) -> ThinkingOptions:
        return ThinkingOptions(effort=self.think) if isinstance(self.think, str) else ThinkingOptions(self.think)

    @property
    def output(self) -> OutputFormat | None:
        if isinstance(self.format, dict):
            return JsonSchema(self.format)
        return JsonObject() if self.format == "json" else None

    @property
    def told_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaChatBody(OllamaBody):
    messages: tuple[Message, ...] = accepts(
        MessageList(ListOf(ObjectOf(Message), bounds.MESSAGES)),
        "The conversation so far; none only loads the model.",
        default=(),
    )
    tools: tuple[OllamaTool, ...] = accepts(
        ListOf(ObjectOf(OllamaTool), bounds.TOOLS), "Functions that the model may call.", default=()
    )
    hold_calls: bool | None = accepts(Bool(), HOLD_CALLS)

    def ask(self) -> Ask:
        last = self.messages[-1]
        continued = last.role == "assistant" and bool(last.content) and not last.tool_calls
        return Ask(
            messages=as_chat(self.messages),
            tools=tuple(tool.tool for tool in self.tools),
            hold_calls=self.hold_calls,
            thinking=self.thinking,
            output=self.output,
            ending="continued" if continued else "opened",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBody(OllamaBody):
    prompt: str = accepts(Text(), "What to answer; nothing, and no pictures, only loads the model.", default="")
    system: str | None = accepts(Text(), "Instructions.")
    raw: bool = accepts(Bool(), "Go on from the prompt as it stands, without the chat template.", default=False)
    suffix: str = accepts(
        Text(), "The text after the gap that is to be filled in after the prompt; for models that can.", default=""
    )
    images: tuple[Unseen | PictureMedium, ...] = accepts(Images(), ABOUT_IMAGES, default=())
    template: None = refuses("is not supported: a request cannot bring its own template.", "")
    context: None = refuses("is not supported: send the conversation to /api/chat.", [])
    width: None = refuses("is not supported: no images are made.", 0)
    height: None = refuses("is not supported: no images are made.", 0)
    steps: None = refuses("is not supported: no images are made.", 0)

    def ask(self) -> Ask:
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*messages, {"role": "user", "content": told_with(self.prompt, self.images)}]
        return Ask(messages=messages, thinking=self.thinking, output=self.output)


FILLS = (Given("suffix"), Not(Is("suffix", "")))
NO_TEMPLATE = "goes through the chat template, which filling in before a suffix leaves out."
NEEDS_LOGPROBS = Never(
    (Given("top_logprobs"), Not(Is("logprobs", True))), "top_logprobs needs logprobs to be true.", param="top_logprobs"
)
CHAT_BODY = ObjectOf(OllamaChatBody, (NEEDS_LOGPROBS,))
GENERATE_BODY = ObjectOf(
    GenerateBody,
    (
        NEEDS_LOGPROBS,
        *(
            Never((Is("raw", True), Given(name)), f"{name} goes through the chat template, which raw leaves out.", name)
            for name in ("system", "format", "think", "images")
        ),
        *(
            Never((*FILLS, Given(name), Not(Is(name, nothing))), f"{name} {NO_TEMPLATE}", name)
            for name, nothing in (("system", ""), ("format", ""), ("think", False), ("images", ""))
        ),
    ),
)


def told_with(text: str, images: tuple[Unseen | PictureMedium, ...]) -> str | list[dict[str, Any]]:
    if seen := [image for image in images if isinstance(image, PictureMedium)]:
        return content_of([*seen, text] if text else seen)
    return "\n".join(part for part in (text, *(image.text for image in images if isinstance(image, Unseen))) if part)


@dataclass(slots=True)
class Calls:
    """Gives ids to calls that came without, and finds the call that a tool's message answers."""

    waiting: deque[tuple[str, str]] = field(default_factory=deque)  # ids and names
    count: int = 0

    def made(self, call: PastCallBody) -> dict[str, Any]:
        id = call.id or f"call_{self.count}"
        self.count += 1
        self.waiting.append((id, call.function.name))
        arguments = as_text(call.function.arguments)
        return {"id": id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}

    def answered(self, message: Message, at: int) -> dict[str, Any]:
        name = message.tool_name or message.name
        for one in self.waiting:
            if message.tool_call_id == one[0] or (message.tool_call_id is None and name in (None, one[1])):
                self.waiting.remove(one)
                return {"role": "tool", "tool_call_id": one[0], "name": one[1], "content": message.said}
        where = f"messages.{at}"
        raise BadRequest(f"{where}: no call before it is left that this could answer.", param=where)


def as_chat(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    calls, told = Calls(), []
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


def read_ollama_chat(value: Any, served: Served, request_id: str) -> GenerationTask | Struct:
    """The job that a decoded body asks for, or at once the answer to one that asks for nothing but to be loaded."""
    reading = served.reading()
    body: OllamaChatBody = CHAT_BODY.parse(value, "", reading)
    if not body.messages:
        return loaded(ChatShape(AnswerHead.of(request_id, int(time.time()), served, reading)))
    wanted = prepare_ask(served, body.chosen.remembering(body.ask()), names=NAMES)
    return job(body, value, wanted, served, request_id, reading, "messages")


def read_ollama_generate(value: Any, served: Served, request_id: str) -> GenerationTask | Struct:
    reading = served.reading()
    body: GenerateBody = GENERATE_BODY.parse(value, "", reading)
    if not body.prompt and not body.images and not body.suffix:
        return loaded(CompletionShape(AnswerHead.of(request_id, int(time.time()), served, reading)))
    ends: frozenset[int] = frozenset()
    if body.suffix:
        wanted = Prepared(infill_prompt(served, body.prompt, body.suffix, paths=("prompt", "suffix")), None, None)
        ends = infill_tokens(served, path="suffix").ends
    elif body.raw:
        wanted = Prepared(text_prompt(served, body.prompt, path="prompt"), None, None)
    else:
        wanted = prepare_ask(served, body.chosen.remembering(body.ask()), names=NAMES)
    return job(body, value, wanted, served, request_id, reading, "prompt", ends)


def job(
    body: OllamaBody,
    value: Any,
    wanted: Prepared,
    served: Served,
    request_id: str,
    reading: BodyReading,
    prompt_field: str,
    ends: frozenset[int] = frozenset(),
) -> GenerationTask:
    options = body.chosen
    note_unheeded(value.get("options") or {}, options, served.card.context, reading)
    request = options.request(
        request_id,
        served,
        [wanted],
        model=body.model,
        adapter=body.adapter,
        max_tokens=options.limit(len(wanted.prompt)),
        sampling=options.sampling(served.sampling, logprobs=body.told_logprobs),
        stop=options.stopping(options.stop, ends),
        path="options.",
    )
    reading.ignored.extend(wanted.ignored)
    head = AnswerHead.of(request_id, int(time.time()), served, reading, wanted.sources, request)
    head = replace(head, model=body.model)
    made = ChatShape if isinstance(body, OllamaChatBody) else CompletionShape
    shape = made(head, logprobs=body.logprobs)
    return GenerationTask(
        request, OllamaStreamed(shape) if body.stream else OllamaWhole(shape), prompt_field, head, wanted.turn
    )


def loaded(shape: Shape) -> Struct:
    """What a client is told that wants the model loaded, which it is."""
    made = shape.line(LineContent(), done=True)
    made.done_reason = "load"
    made.ingot = Receipt.of(shape.head, Ended(Usage(), Timing()))
    return made
