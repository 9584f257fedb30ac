"""`POST /infill`: llama.cpp's endpoint for filling in between two texts, which editors use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import Ended, Event, SequenceEnded, TextDelta, TokenInfo, TokenLogprob
from ingot.protocol.chat.answers import AnswerHead, GenerationTask, Receipt, StreamedAnswer, WholeAnswer, finite_logprob
from ingot.protocol.chat.generation_fields import ABOUT_STREAM, RequestFields, SamplingFields, StopFields
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
    text: str = requires(Text(), "The file's text, or a part of it.")
    filename: str = accepts(INFILL_FILE_NAME, "Its name.", default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillBody(SamplingFields, StopFields, RequestFields):
    model: str = accepts(ModelNameField(), "The served model's name, or `default`.", default=DEFAULT_NAME)
    adapter: str | None = accepts(AdapterField(), ABOUT_ADAPTER)
    input_prefix: str = accepts(Text(), "The text before the gap.", default="")
    input_suffix: str = accepts(Text(), "The text after it.", default="")
    input_extra: tuple[InfillExtraFile, ...] = accepts(
        ListOf(ObjectOf(InfillExtraFile), bounds.PARTS), "Other files, which come before these.", default=()
    )
    prompt: str = accepts(Text(), "The line that is being written, after input_prefix.", default="")
    n_predict: int | None = accepts(
        TokenLimitField(bounds.LEGACY_MAX_TOKENS),
        "Most tokens to generate; -1 is as many as the context holds, 0 only computes the prompt, for later requests.",
    )
    n_probs: int = accepts(
        Int(bounds.TOP_LOGPROBS),
        "Return each token's log-probability, and those of this many likeliest tokens.",
        default=0,
    )
    stream: bool = accepts(Bool(), ABOUT_STREAM, default=False)
    stop: str | tuple[str, ...] = accepts(STOP_FIELD, "Text that ends the answer.", default=())
    response_fields: tuple[str, ...] = accepts(
        ListOf(INFILL_FILE_NAME, bounds.UNKNOWN_FIELDS),
        "The fields of the answer, such as `timings/prompt_n`, which is then the field's name; none: all.",
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
    def of_token(cls, info: TokenInfo) -> InfillTokenProbability:
        one = InfillTopToken.of(info.chosen)
        return cls(one.id, one.token, one.bytes, one.logprob, [InfillTopToken.of(each) for each in info.top])


class InfillTimings(Struct):
    """Tokens that were reused, computed and generated, and how long that took."""

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
    milliseconds = seconds * 1000
    return tokens, milliseconds, milliseconds / max(1, tokens), tokens / seconds if seconds > 0 else 0.0


class InfillAnswer(Struct, kw_only=True):
    """A whole answer, or a chunk of one; the last chunk has all fields."""

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


class InfillChunks:
    """Makes chunks, of which the last has all fields. They have no text where only the prompt is computed (`mute`), as
    that takes one token which was not requested."""

    def __init__(self, head: AnswerHead, *, probabilities: bool, mute: bool) -> None:
        self.head, self.probabilities, self.mute = head, probabilities, mute

    def chunk(self, text: str = "", tokens: Sequence[TokenInfo] = ()) -> InfillAnswer:
        if self.mute:
            text, tokens = "", ()
        probabilities = list(map(InfillTokenProbability.of_token, tokens)) if self.probabilities else UNSET
        return InfillAnswer(content=text, stop=False, index=0, completion_probabilities=probabilities)

    def last(self, chunk: InfillAnswer, end: SequenceEnded | None, ended: Ended) -> InfillAnswer:
        usage, word = ended.usage, end.stopped_by if end is not None and isinstance(end.stopped_by, str) else ""
        chunk.stop, chunk.id, chunk.model = True, self.head.id, self.head.model
        is_limit = self.mute or (end is not None and end.reason == "length")
        chunk.stop_type = "none" if end is None else "limit" if is_limit else "word" if word else "eos"
        chunk.stopping_word, chunk.truncated = word, False
        chunk.tokens_predicted = 0 if self.mute else usage.completion_tokens
        chunk.tokens_evaluated, chunk.tokens_cached = usage.prompt_tokens, usage.cached_tokens
        chunk.timings = InfillTimings.of(ended, chunk.tokens_predicted)
        chunk.ingot = Receipt.of(self.head, ended)
        return chunk


class WholeInfill(WholeAnswer):
    def __init__(self, chunks: InfillChunks, fields: tuple[str, ...]) -> None:
        super().__init__(chunks.head)
        self._chunks, self.fields = chunks, fields

    def body(self) -> Struct | dict[str, Any]:
        answer = self.answers[0]
        body = self._chunks.last(self._chunks.chunk(answer.text, answer.tokens), answer.end, self.ended)
        return pick_response_fields(msgspec.to_builtins(body), self.fields) if self.fields else body


class StreamedInfill(StreamedAnswer):
    def __init__(self, chunks: InfillChunks) -> None:
        self._chunks = chunks
        self._end: SequenceEnded | None = None

    def chunks(self, event: Event) -> list[Struct]:
        match event:
            case TextDelta():
                return [self._chunks.chunk(event.text, event.tokens)]
            case SequenceEnded():
                self._end = event
            case Ended():
                return [self._chunks.last(self._chunks.chunk(), self._end, event)]
        return []

    def empty(self) -> list[Struct]:
        return [self._chunks.chunk()]


def pick_response_fields(answer: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """The values at these paths, by path; missing ones are left out."""
    found: dict[str, Any] = {}
    for field in fields:
        value: Any = answer
        for name in field.split("/"):
            value = value.get(name, UNSET) if isinstance(value, dict) else UNSET
        if value is not UNSET:
            found[field] = value
    return found


def read_infill(value: Any, served: ServedModel, request_id: str) -> GenerationTask:
    """The task of a decoded body. Tokenizes, so it may take a while: not for an event loop."""
    reading = served.reading()
    body: InfillBody = INFILL_BODY.parse(value, "", reading)
    tokens = encode_infill_prompt(
        served,
        body.input_prefix + body.prompt,
        body.input_suffix,
        paths=("input_prefix", "input_suffix"),
        files=[(file.filename, file.text) for file in body.input_extra],
    )
    request = body.request(
        request_id,
        served,
        [PreparedChat(tokens)],
        model=body.model,
        adapter=body.adapter,
        max_tokens=1 if body.n_predict == 0 else body.n_predict,
        sampling=body.sampling(served, logprobs=body.n_probs or None),
        stop=body.stopping(served, body.stop, find_infill_tokens(served, path="input_suffix").ends),
    )
    head = AnswerHead.of(request_id, int(time.time()), served, reading, [tokens], request)
    chunks = InfillChunks(head, probabilities=body.n_probs > 0, mute=body.n_predict == 0)
    view = StreamedInfill(chunks) if body.stream else WholeInfill(chunks, body.response_fields)
    return GenerationTask(request, view, "input_prefix", head)
