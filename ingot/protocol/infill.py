"""`POST /infill`: what stands between two texts, as llama.cpp's server has it and editors ask for it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import Ended, Event, Request, SequenceEnded, TextDelta, TokenInfo, TokenLogprob
from ingot.protocol.adapters import WHICH_ADAPTER, AdapterName
from ingot.protocol.chat.answers import AnswerHead, GenerationTask, Receipt, Streamed, Whole, sayable
from ingot.protocol.chat.generation_fields import RequestFields, SamplingFields, StopFields
from ingot.protocol.chat.preparation import Prepared
from ingot.protocol.chat.prompts import infill_prompt, infill_tokens
from ingot.protocol.model_names import DEFAULT_NAME
from ingot.protocol.schema import bounds, foreign
from ingot.protocol.schema.fields import Bool, Int, ListOf, Text
from ingot.protocol.schema.keeping import HOW_LONG, TimeToLive
from ingot.protocol.schema.model_name import ModelName
from ingot.protocol.schema.objects import ObjectOf, accepts, requires
from ingot.protocol.schema.stopping import STOP, Limit
from ingot.protocol.served import Served

FILE_NAME: Final = Text(bounds.IDENTIFIER_CHARS)
StopType = Literal["none", "eos", "limit", "word"]


@dataclass(frozen=True, slots=True)
class ExtraFile:
    text: str = requires(Text(), "What the file, or a part of it, says.")
    filename: str = accepts(FILE_NAME, "What it is called.", default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillBody(SamplingFields, StopFields, RequestFields):
    model: str = accepts(ModelName(), "The served model's name, or `default`.", default=DEFAULT_NAME)
    adapter: str | None = accepts(AdapterName(), WHICH_ADAPTER)
    input_prefix: str = accepts(Text(), "The text before the gap.", default="")
    input_suffix: str = accepts(Text(), "The text after it.", default="")
    input_extra: tuple[ExtraFile, ...] = accepts(
        ListOf(ObjectOf(ExtraFile), bounds.PARTS), "Other files, which stand before these.", default=()
    )
    prompt: str = accepts(Text(), "The line that is being written: what follows input_prefix.", default="")
    n_predict: int | None = accepts(
        Limit(bounds.LEGACY_MAX_TOKENS),
        "Most tokens to generate; -1 is as many as the context holds, 0 only computes the prompt, for later requests.",
    )
    n_probs: int = accepts(
        Int(bounds.TOP_LOGPROBS), "Give each token's log-probability, and this many likeliest ones.", default=0
    )
    stream: bool = accepts(Bool(), "Send the answer as server-sent events while it is made.", default=False)
    stop: str | tuple[str, ...] = accepts(STOP, "Text that ends the answer.", default=())
    response_fields: tuple[str, ...] = accepts(
        ListOf(FILE_NAME, bounds.UNKNOWN_FIELDS),
        "The fields to answer with, such as `timings/prompt_n`, which then stands under that name; none: all.",
        default=(),
    )
    ttl: None = accepts(TimeToLive(), HOW_LONG)


INFILL_BODY = ObjectOf(InfillBody, (), foreign.INFILL)


class TopToken(Struct):
    id: int
    token: str
    bytes: list[int]
    logprob: float

    @classmethod
    def of(cls, one: TokenLogprob) -> TopToken:
        return cls(one.token, one.text, list(one.raw), sayable(one.logprob))


class TokenProbability(TopToken):
    top_logprobs: list[TopToken] = []

    @classmethod
    def told(cls, info: TokenInfo) -> TokenProbability:
        one = TopToken.of(info.chosen)
        return cls(one.id, one.token, one.bytes, one.logprob, [TopToken.of(each) for each in info.top])


class InfillTimings(Struct):
    """Tokens that were taken over, computed and generated, and how long that took."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float

    @classmethod
    def of(cls, ended: Ended, predicted: int) -> InfillTimings:
        usage, timing = ended.usage, ended.timing
        prompt = pace(usage.prompt_tokens - usage.cached_tokens, timing.prefill)
        return cls(usage.cached_tokens, *prompt, *pace(predicted, timing.decode))


def pace(tokens: int, seconds: float) -> tuple[int, float, float, float]:
    """Tokens, milliseconds, milliseconds a token, tokens a second."""
    took = seconds * 1000
    return tokens, took, took / max(1, tokens), tokens / seconds if seconds > 0 else 0.0


class InfillAnswer(Struct, kw_only=True):
    """A whole answer, or a chunk of one; all of it is told with the last."""

    content: str | UnsetType = UNSET
    stop: bool | UnsetType = UNSET
    index: int | UnsetType = UNSET
    completion_probabilities: list[TokenProbability] | UnsetType = UNSET
    id: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    stop_type: StopType | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: InfillTimings | UnsetType = UNSET
    ingot: Receipt | UnsetType = UNSET


class InfillTeller:
    """What both views know: how an answer is told, and why it ended. A `mute` one tells of the prompt alone: a prompt
    is computed with the token that follows it, which nobody asked for then."""

    def __init__(self, head: AnswerHead, *, probabilities: bool, mute: bool) -> None:
        self.head, self.probabilities, self.mute = head, probabilities, mute
        self.stop_type: StopType = "none"
        self.word = ""

    def said(self, text: str, tokens: list[TokenInfo]) -> InfillAnswer:
        if self.mute:
            text, tokens = "", []
        told = [TokenProbability.told(info) for info in tokens] if self.probabilities else UNSET
        return InfillAnswer(content=text, stop=False, index=0, completion_probabilities=told)

    def end(self, event: SequenceEnded) -> None:
        self.word = event.stopped_by if isinstance(event.stopped_by, str) else ""
        self.stop_type = "limit" if self.mute or event.reason == "length" else "word" if self.word else "eos"

    def last(self, text: str, tokens: list[TokenInfo], ended: Ended) -> InfillAnswer:
        made, usage = self.said(text, tokens), ended.usage
        made.stop, made.id, made.model = True, self.head.id, self.head.model
        made.stop_type, made.stopping_word, made.truncated = self.stop_type, self.word, False
        made.tokens_predicted = 0 if self.mute else usage.completion_tokens
        made.tokens_evaluated, made.tokens_cached = usage.prompt_tokens, usage.cached_tokens
        made.timings = InfillTimings.of(ended, made.tokens_predicted)
        made.ingot = Receipt.of(self.head, ended)
        return made


class InfillWhole(Whole):
    def __init__(self, teller: InfillTeller, fields: tuple[str, ...]) -> None:
        self.teller, self.fields = teller, fields
        self.texts: list[str] = []
        self.tokens: list[TokenInfo] = []
        self.ended: Ended | None = None

    def take(self, event: Event) -> None:
        match event:
            case TextDelta():
                self.texts.append(event.text)
                self.tokens += event.tokens
            case SequenceEnded():
                self.teller.end(event)
            case Ended():
                self.ended = event

    def body(self) -> Struct | dict[str, Any]:
        assert self.ended is not None
        made = self.teller.last("".join(self.texts), self.tokens, self.ended)
        return picked(msgspec.to_builtins(made), self.fields) if self.fields else made


class InfillStreamed(Streamed):
    def __init__(self, teller: InfillTeller) -> None:
        self.teller = teller

    def opening(self) -> list[Struct]:
        return []

    def chunks(self, event: Event) -> list[Struct]:
        match event:
            case TextDelta():
                return [self.teller.said(event.text, list(event.tokens))]
            case SequenceEnded():
                self.teller.end(event)
            case Ended():
                return [self.teller.last("", [], event)]
        return []

    def empty(self) -> list[Struct]:
        return [self.teller.said("", [])]


def picked(answer: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """The fields of these paths, each under its path; one that is not there is left out."""
    found: dict[str, Any] = {}
    for field in fields:
        value: Any = answer
        for name in field.split("/"):
            value = value.get(name, UNSET) if isinstance(value, dict) else UNSET
        if value is not UNSET:
            found[field] = value
    return found


def read_infill(value: Any, served: Served, request_id: str) -> GenerationTask:
    """The job that a decoded body asks for. Tokenizes, so it may take a while: not for an event loop."""
    reading = served.reading()
    body: InfillBody = INFILL_BODY.parse(value, "", reading)
    tokens = infill_prompt(
        served,
        body.input_prefix + body.prompt,
        body.input_suffix,
        paths=("input_prefix", "input_suffix"),
        files=[(file.filename, file.text) for file in body.input_extra],
    )
    request = infill_request(body, served, tokens, request_id)
    head = AnswerHead.of(request_id, int(time.time()), served, reading, [tokens], request)
    teller = InfillTeller(head, probabilities=body.n_probs > 0, mute=body.n_predict == 0)
    view = InfillStreamed(teller) if body.stream else InfillWhole(teller, body.response_fields)
    return GenerationTask(request, view, "input_prefix", head)


def infill_request(body: InfillBody, served: Served, tokens: tuple[int, ...], request_id: str) -> Request:
    ends = infill_tokens(served, path="input_suffix").ends
    return body.request(
        request_id,
        served,
        [Prepared(tokens, None, None)],
        model=body.model,
        adapter=body.adapter,
        max_tokens=1 if body.n_predict == 0 else body.n_predict,
        sampling=body.sampling(served, logprobs=body.n_probs or None),
        stop=body.stopping(body.stop, ends),
    )
