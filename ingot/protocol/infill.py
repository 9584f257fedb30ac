"""`POST /infill`: what stands between two texts, as llama.cpp's server has it and editors ask for it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import Ended, Event, Request, SequenceEnded, TextDelta, TokenInfo, TokenLogprob
from ingot.protocol.chat.answers import AnswerHead, GenerationTask, Receipt, StreamedAnswer, WholeAnswer, finite_logprob
from ingot.protocol.chat.generation_fields import RequestFields, SamplingFields, StopFields
from ingot.protocol.chat.preparation import PreparedChat
from ingot.protocol.chat.prompts import encode_infill_prompt, find_infill_tokens
from ingot.protocol.lora_adapters import ABOUT_ADAPTER, AdapterField
from ingot.protocol.schema import bounds, foreign
from ingot.protocol.schema.fields import Bool, Int, ListOf, Text
from ingot.protocol.schema.model_fields import ABOUT_TTL, STOP_FIELD, ModelNameField, TimeToLiveField, TokenLimitField
from ingot.protocol.schema.objects import ObjectOf, accepts, requires
from ingot.protocol.served import ServedModel
from ingot.protocol.terms import DEFAULT_NAME

INFILL_FILE_NAME: Final = Text(bounds.IDENTIFIER_CHARS)
InfillStopType = Literal["none", "eos", "limit", "word"]


@dataclass(frozen=True, slots=True)
class InfillExtraFile:
    text: str = requires(Text(), "What the file, or a part of it, says.")
    filename: str = accepts(INFILL_FILE_NAME, "What it is called.", default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillBody(SamplingFields, StopFields, RequestFields):
    model: str = accepts(ModelNameField(), "The served model's name, or `default`.", default=DEFAULT_NAME)
    adapter: str | None = accepts(AdapterField(), ABOUT_ADAPTER)
    input_prefix: str = accepts(Text(), "The text before the gap.", default="")
    input_suffix: str = accepts(Text(), "The text after it.", default="")
    input_extra: tuple[InfillExtraFile, ...] = accepts(
        ListOf(ObjectOf(InfillExtraFile), bounds.PARTS), "Other files, which stand before these.", default=()
    )
    prompt: str = accepts(Text(), "The line that is being written: what follows input_prefix.", default="")
    n_predict: int | None = accepts(
        TokenLimitField(bounds.LEGACY_MAX_TOKENS),
        "Most tokens to generate; -1 is as many as the context holds, 0 only computes the prompt, for later requests.",
    )
    n_probs: int = accepts(
        Int(bounds.TOP_LOGPROBS), "Give each token's log-probability, and this many likeliest ones.", default=0
    )
    stream: bool = accepts(Bool(), "Send the answer as server-sent events while it is made.", default=False)
    stop: str | tuple[str, ...] = accepts(STOP_FIELD, "Text that ends the answer.", default=())
    response_fields: tuple[str, ...] = accepts(
        ListOf(INFILL_FILE_NAME, bounds.UNKNOWN_FIELDS),
        "The fields to answer with, such as `timings/prompt_n`, which then stands under that name; none: all.",
        default=(),
    )
    ttl: None = accepts(TimeToLiveField(), ABOUT_TTL)


INFILL_BODY = ObjectOf(InfillBody, (), foreign.INFILL)


class InfillTopToken(Struct):
    id: int
    token: str
    bytes: list[int]
    logprob: float

    @classmethod
    def of(cls, one: TokenLogprob) -> InfillTopToken:
        return cls(one.token, one.text, list(one.raw), finite_logprob(one.logprob))


class InfillTokenProbability(InfillTopToken):
    top_logprobs: list[InfillTopToken] = []

    @classmethod
    def told(cls, info: TokenInfo) -> InfillTokenProbability:
        one = InfillTopToken.of(info.chosen)
        return cls(one.id, one.token, one.bytes, one.logprob, [InfillTopToken.of(each) for each in info.top])


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
        prompt = pace_figures(usage.prompt_tokens - usage.cached_tokens, timing.prefill)
        return cls(usage.cached_tokens, *prompt, *pace_figures(predicted, timing.decode))


def pace_figures(tokens: int, seconds: float) -> tuple[int, float, float, float]:
    """Tokens, milliseconds, milliseconds a token, tokens a second."""
    took = seconds * 1000
    return tokens, took, took / max(1, tokens), tokens / seconds if seconds > 0 else 0.0


class InfillAnswer(Struct, kw_only=True):
    """A whole answer, or a chunk of one; all of it is told with the last."""

    content: str | UnsetType = UNSET
    stop: bool | UnsetType = UNSET
    index: int | UnsetType = UNSET
    completion_probabilities: list[InfillTokenProbability] | UnsetType = UNSET
    id: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    stop_type: InfillStopType | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: InfillTimings | UnsetType = UNSET
    ingot: Receipt | UnsetType = UNSET


class InfillAnswerBuilder:
    """What both views know: how an answer is told, and why it ended. A `mute` one tells of the prompt alone: a prompt
    is computed with the token that follows it, which nobody asked for then."""

    def __init__(self, head: AnswerHead, *, probabilities: bool, mute: bool) -> None:
        self.head, self.probabilities, self.mute = head, probabilities, mute
        self.stop_type: InfillStopType = "none"
        self.word = ""

    def said(self, text: str, tokens: list[TokenInfo]) -> InfillAnswer:
        if self.mute:
            text, tokens = "", []
        told = [InfillTokenProbability.told(info) for info in tokens] if self.probabilities else UNSET
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


class WholeInfill(WholeAnswer):
    def __init__(self, teller: InfillAnswerBuilder, fields: tuple[str, ...]) -> None:
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
        return pick_response_fields(msgspec.to_builtins(made), self.fields) if self.fields else made


class StreamedInfill(StreamedAnswer):
    def __init__(self, teller: InfillAnswerBuilder) -> None:
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


def pick_response_fields(answer: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """The fields of these paths, each under its path; one that is not there is left out."""
    found: dict[str, Any] = {}
    for field in fields:
        value: Any = answer
        for name in field.split("/"):
            value = value.get(name, UNSET) if isinstance(value, dict) else UNSET
        if value is not UNSET:
            found[field] = value
    return found


def read_infill(value: Any, served: ServedModel, request_id: str) -> GenerationTask:
    """The job that a decoded body asks for. Tokenizes, so it may take a while: not for an event loop."""
    reading = served.reading()
    body: InfillBody = INFILL_BODY.parse(value, "", reading)
    tokens = encode_infill_prompt(
        served,
        body.input_prefix + body.prompt,
        body.input_suffix,
        paths=("input_prefix", "input_suffix"),
        files=[(file.filename, file.text) for file in body.input_extra],
    )
    request = make_infill_request(body, served, tokens, request_id)
    head = AnswerHead.of(request_id, int(time.time()), served, reading, [tokens], request)
    teller = InfillAnswerBuilder(head, probabilities=body.n_probs > 0, mute=body.n_predict == 0)
    view = StreamedInfill(teller) if body.stream else WholeInfill(teller, body.response_fields)
    return GenerationTask(request, view, "input_prefix", head)


def make_infill_request(body: InfillBody, served: ServedModel, tokens: tuple[int, ...], request_id: str) -> Request:
    ends = find_infill_tokens(served, path="input_suffix").ends
    return body.request(
        request_id,
        served,
        [PreparedChat(tokens, None, None)],
        model=body.model,
        adapter=body.adapter,
        max_tokens=1 if body.n_predict == 0 else body.n_predict,
        sampling=body.sampling(served, logprobs=body.n_probs or None),
        stop=body.stopping(body.stop, ends),
    )
